"""Do to runs what happens to them, and write down what came of it.

    python benchmarks/faults.py [--kills 50] [--ranks 1 2] [--faults NAME]

First ranks under ``torchrun --max-restarts`` are killed at random moments, so many times, and the
parameters that they end with are compared with those of a run that nobody disturbed. Then one fault after
another happens to a run, which is started again. ``benchmarks/results/faults.md`` says of each which exit
code the run had, what it said, and how many environment steps had to be made again.
"""

import argparse
import contextlib
import datetime
import os
import platform
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch

RESULTS = Path(__file__).resolve().parent / "results"
ENVS, HORIZON, EVERY = 8, 16, 5
STEPS = ENVS * HORIZON
ENDLESS = 10**9
FIT = [
    "-m", "puffer_lightning", "fit", f"--data.num_envs={ENVS}", f"--data.horizon={HORIZON}",
    "--data.eval_episodes=1", "--model.normalize_observations=true", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false", "--trainer.callbacks=parts.Steps",
    "--checkpoint.dirpath=checkpoints", f"--checkpoint.every_n_iterations={EVERY}", "--ckpt_path=auto",
]  # fmt: skip
_PARTS = '''
import os

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from lightning.pytorch import Callback

from puffer_lightning.policies import MLPPolicy


class Steps(Callback):
    """Notes each iteration."""

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.is_global_zero:
            with open("steps", "a") as file:
                file.write(f"{os.getpid()} {module.env_steps}\\n")


class NaNs(SyncVectorEnv):
    """CartPole with one observation that is not a number."""

    def __init__(self, num_envs):
        super().__init__([lambda: gym.make("CartPole-v1")] * num_envs)
        self.steps = 0

    def step(self, actions):
        self.steps += 1
        observations, *rest = super().step(actions)
        if self.steps == 200:
            observations[3] = np.nan
        return observations, *rest


class Large(MLPPolicy):
    """Does not fit into memory with more than 8 samples at a time."""

    def evaluate(self, observations, *arguments, **options):
        if torch.is_grad_enabled() and len(observations) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated).")
        return super().evaluate(observations, *arguments, **options)
'''


class Run:
    """One command in a folder, whose files outlive it."""

    def __init__(self, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> None:
        self.folder = folder
        (folder / "parts.py").write_text(_PARTS)
        (folder / "steps").write_text("")
        self._said = (folder / "said").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore::FutureWarning", *launcher, *FIT, *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )

    def steps(self) -> list[int]:
        """Environment steps in all, after each of this command's iterations."""
        lines = (self.folder / "steps").read_text().splitlines()
        return [int(line.split()[1]) for line in lines if len(line.split()) == 2]

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait, five minutes at most, or until the command has ended."""
        end = time.monotonic() + 300
        while not reached() and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for the exit code."""
        try:
            return self.process.wait(1200)
        finally:
            self.process.kill()
            self._said.close()

    def said(self, pattern: str) -> str:
        """The first line that has it, as a cell of a table."""
        for line in (self.folder / "said").read_text().splitlines():
            if re.search(pattern, line):
                said = re.sub(r"^\S+\.py:\d+: ", "", line.strip())
                return said.replace(f"{self.folder}/", "").replace("|", "\\|")[:240]
        return ""

    def descendants(self, pattern: str) -> list[psutil.Process]:
        """The command's processes, itself left out, whose command lines have it."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if re.search(pattern, " ".join(process.cmdline())):
                    found.append(process)
        return found


def kills(ranks: int, times: int, folder: Path) -> str:
    """A row of the table of kills."""
    options = [f"--data.total_timesteps={60 * times * STEPS * ranks}", f"--trainer.devices={ranks}"]
    undisturbed = Run(made(folder / "undisturbed"), *options)
    if code := undisturbed.end():
        return f"| {ranks} | 0 | exit code {code} undisturbed: {undisturbed.said('rror')} | |"
    restarts = (f"--nproc-per-node={ranks}", f"--max-restarts={times}")
    torchrun = ("-m", "torch.distributed.run", "--standalone", *restarts)
    run = Run(made(folder / "killed"), *options, launcher=torchrun)
    last, chance, killed, before = run.folder / "checkpoints" / "last.ckpt", random.Random(ranks), 0, 0
    while killed < times and run.process.poll() is None:
        # Some while they start; most once they have gone on, so that the run comes to an end.
        if chance.random() < 0.8:
            run.wait_until(partial(is_newer, last, before))
        time.sleep(chance.uniform(0.0, 0.5))
        before = last.stat().st_mtime_ns if last.exists() else 0
        if victims := run.descendants("puffer_lightning fit"):
            victim = chance.choice(victims)
            victim.kill()
            killed += 1
            run.wait_until(partial(is_replaced, victim))
    if code := run.end():
        return f"| {ranks} | {killed} | exit code {code}: {run.said('rror')} | |"
    one, other = (torch.load(each / "checkpoints" / "last.ckpt")["state_dict"] for each in folder.iterdir())
    same = all(torch.equal(one[name], other[name]) for name in one)
    largest = max((one[name].double() - other[name].double()).abs().max().item() for name in one)
    return f"| {ranks} | {killed} | {'the same, bit for bit' if same else 'NOT the same'} | {largest:g} |"


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def is_newer(path: Path, moment: int) -> bool:
    return path.exists() and path.stat().st_mtime_ns > moment


def is_replaced(process: psutil.Process) -> bool:
    """Whether torchrun's agent has noticed that it is gone."""
    return not process.is_running()


def send(number: int) -> Callable[[Run], None]:
    return lambda run: run.process.send_signal(number)


def kill_rank(run: Run) -> None:
    run.descendants("puffer_lightning fit")[1].kill()


def kill_worker(run: Run) -> None:
    run.descendants("spawn_main|forkserver")[-1].kill()


def kill_worker_and_end(run: Run) -> None:
    kill_worker(run)
    time.sleep(3.0)
    run.process.terminate()


def fill_disk(run: Run) -> None:
    """Let no file of the process grow beyond 2 kB until it has noticed, and go on for a while."""
    hard = resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (2048, hard))
    run.wait_until(lambda: bool(run.said("could not be written")))
    time.sleep(1.0)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    time.sleep(1.0)
    run.process.terminate()


def corrupt(run: Run) -> None:
    run.process.kill()
    run.process.wait()
    last = run.folder / "checkpoints" / "last.ckpt"
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.write_bytes(data)


def wait(run: Run) -> None:
    run.process.wait(600)


FEW = f"--data.total_timesteps={40 * STEPS}"
WORKERS = ("--data.env=Acrobot-v1", "--data.num_workers=2")
# A name, what strikes a run that is under way, what the run is given, and the line in which it tells of it.
FAULTS: list[tuple[str, Callable[[Run], None], tuple[str, ...], str]] = [
    ("kill -9 of the trainer", send(signal.SIGKILL), (), "rror"),
    ("kill -9 of one of two ranks", kill_rank, ("--trainer.devices=2",), "rror"),
    ("kill -9 of an environment worker", kill_worker, WORKERS, "rror: "),
    (
        "the same with `on_fault: restart`, then SIGTERM",
        kill_worker_and_end,
        (*WORKERS, "--data.worker_options.on_fault=restart"),
        "died",
    ),
    ("SIGTERM", send(signal.SIGTERM), (), "Ended by"),
    ("SIGTERM, two ranks", send(signal.SIGTERM), ("--trainer.devices=2",), "Ended by"),
    ("SIGUSR1", send(signal.SIGUSR1), (), "Ended by"),
    ("Ctrl-C", send(signal.SIGINT), (), "Ended by"),
    ("full disk for some seconds, then SIGTERM", fill_disk, (), "could not be written"),
    ("kill -9, then a changed byte in last.ckpt", corrupt, (), "rror"),
    ("NaN in an observation", wait, ("--data.env=parts.NaNs", FEW), "finite|NaN|nan"),
    ("out of memory in the update", wait, ("--model.policy=parts.Large", FEW), "memory"),
]


def strike(name: str, how: Callable[[Run], None], options: tuple[str, ...], tells: str, folder: Path) -> str:
    """A row of the table of faults: a run is struck, ends, and is started again for some iterations."""
    iteration = STEPS * (2 if "--trainer.devices=2" in options else 1)
    run = Run(folder, f"--data.total_timesteps={ENDLESS}", *options)
    run.wait_until(lambda: max(run.steps(), default=0) >= (3 * EVERY + 2) * iteration)
    how(run)
    code, told, steps = run.end(), run.said(tells) or "–", run.steps()
    again = Run(folder, *options, f"--data.total_timesteps={steps[-1] + 2 * EVERY * iteration}")
    if failed := again.end():
        return f"| {name} | {code} | {told} | exit code {failed} when resumed: {again.said('rror')} |"
    going_on = again.said("Passing over") or again.said("Going on from|Starting anew")
    lost = steps[-1] - (again.steps()[0] - iteration)
    return f"| {name} | {code} | {told} | {going_on}: {lost:,} of {steps[-1]:,} steps |"


def main() -> None:
    """Kill, strike, and write the tables."""
    parser = argparse.ArgumentParser(description="Do to runs what happens to them.")
    parser.add_argument("--kills", type=int, default=50, help="of each run under torchrun; 0 for none")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="of the runs under torchrun")
    parser.add_argument("--faults", default="", help="those whose name has this regular expression")
    options = parser.parse_args()
    lines = [
        f"By `make faults-benchmark`, {datetime.date.today():%Y-%m-%d}, {os.cpu_count()}-core "
        f"{platform.machine()} CPU, gloo, torch {torch.__version__}. An iteration is {STEPS} environment "
        f"steps of each rank; `last.ckpt` is written every {EVERY} iterations.",
    ]
    if options.kills:
        lines += [
            "",
            f"Ranks killed (-9) at random moments under `torchrun --max-restarts {options.kills}`, and the "
            "final parameters against those of a run that was not disturbed:",
            "",
            "| ranks | kills | final parameters | largest difference |",
            "|---|---|---|---|",
        ]
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                lines.append(kills(ranks, options.kills, Path(folder)))
            print(lines[-1], flush=True)
    lines += ["", "| fault | exit code | what it said | resumed with, work lost |", "|---|---|---|---|"]
    for fault in FAULTS:
        if re.search(options.faults, fault[0]):
            with tempfile.TemporaryDirectory() as folder:
                lines.append(strike(*fault, Path(folder)))
            print(lines[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "faults.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
