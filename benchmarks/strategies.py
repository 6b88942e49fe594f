"""Train under each strategy, started in each way, on 1, 2 and 4 processes; write down what came of it.

    python benchmarks/strategies.py

Each run trains a small transformer for three iterations of the same size over all processes. The table in
``benchmarks/results/strategies.md`` holds the last value loss and the seconds of the whole command: under one
strategy and number of processes, all ways to start it should agree on the loss.
"""

import csv
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"
STRATEGIES = {
    "ddp": ("DDP", {}),
    "fsdp": ("FSDP", {}),
    "fsdp, tensor_parallel_size 2": ("FSDP", {"tensor_parallel_size": 2}),
}
ENVS, HORIZON, ITERATIONS = 32, 32, 3
_FABRIC = """
import sys
from functools import partial

from lightning.fabric import Fabric

from puffer_lightning import PPO, FabricDDP, FabricFSDP, RolloutDataModule, iterations
from puffer_lightning.policies import TransformerPolicy

if __name__ == "__main__":
    name, devices, options = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
    strategy = {"DDP": FabricDDP, "FSDP": FabricFSDP}[name](**options)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    groups = devices // options.get("tensor_parallel_size", 1)
    steps = ITERATIONS * ENVS * HORIZON
    data = RolloutDataModule(num_envs=ENVS // groups, horizon=HORIZON, total_timesteps=steps)
    model = PPO(partial(TransformerPolicy, hidden_size=32, num_blocks=2))
    *_, metrics = iterations(fabric, model, data)
    fabric.print("value_loss", metrics["train/value_loss"])
    data.close()
"""


def _commands(name: str, devices: int, options: dict[str, int]) -> dict[str, list[str]]:
    groups = devices // options.get("tensor_parallel_size", 1)
    fit = [
        "-m", "puffer_lightning", "fit",
        f"--data.num_envs={ENVS // groups}", f"--data.horizon={HORIZON}", "--data.eval_episodes=4",
        f"--data.total_timesteps={ITERATIONS * ENVS * HORIZON}",
        "--model.policy=puffer_lightning.policies.TransformerPolicy",
        "--model.policy.hidden_size=32", "--model.policy.num_blocks=2",
        "--trainer.accelerator=cpu", f"--trainer.devices={devices}", f"--trainer.strategy={name}",
        *(f"--trainer.strategy.{option}={value}" for option, value in options.items()),
    ]  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    return {
        "Trainer": fit,
        "torchrun": [*torchrun, *fit],
        "Fabric": ["fabric_run.py", name, str(devices), repr(options)],
    }


def _run(arguments: list[str]) -> str:
    """What a cell of the table says."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = f"ENVS, HORIZON, ITERATIONS = {ENVS}, {HORIZON}, {ITERATIONS}\n"
        (Path(folder) / "fabric_run.py").write_text(sizes + _FABRIC)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        seconds = time.perf_counter() - began
        if done.returncode:
            return f"failed: {done.stderr.strip().splitlines()[-1]}"
        if printed := re.search(r"value_loss (\S+)", done.stdout):
            loss = float(printed[1])
        else:
            with next(Path(folder).glob("lightning_logs/*/metrics.csv")).open() as file:
                loss = [
                    float(row["train/value_loss"]) for row in csv.DictReader(file) if row["train/value_loss"]
                ][-1]
    return f"{loss:.5f} ({seconds:.0f} s)"


def main() -> None:
    """Run all and write the table."""
    lines = [
        f"By `python benchmarks/strategies.py`, {datetime.date.today():%Y-%m-%d}, {os.cpu_count()}-core "
        f"{platform.machine()} CPU, gloo, torch {torch.__version__}. Value loss of the last of {ITERATIONS} "
        "iterations, and seconds of the whole command, most of which are imports:",
        "",
        "| strategy | processes | Trainer | torchrun | Fabric |",
        "|---|---|---|---|---|",
    ]
    for label, (name, options) in STRATEGIES.items():
        for devices in (1, 2, 4):
            if devices % options.get("tensor_parallel_size", 1):
                continue
            cells = [_run(command) for command in _commands(name, devices, options).values()]
            lines.append(f"| {label} | {devices} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "strategies.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
