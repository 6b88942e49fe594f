"""Train a configuration on several seeds through the command line; write a table and the training curves.

    python benchmarks/solve.py --config ppo.yaml --seeds 5 --name cartpole

Writes ``benchmarks/results/<name>.md`` and ``<name>.png``. Seconds are of training alone, between the first
rollout and the last update, by the wall clock and as processor time of all threads; the evaluation is the one
that ``fit`` ends with.
"""

import argparse
import contextlib
import csv
import datetime
import io
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from puffer_lightning.cli import PufferCLI

mpl.use("Agg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"


class _Clock(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds, self.cpu_seconds = -time.perf_counter(), -time.process_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += time.perf_counter()
        self.cpu_seconds += time.process_time()


class _CLI(PufferCLI):
    def before_fit(self) -> None:
        super().before_fit()
        self.clock = _Clock()
        self.trainer.callbacks.append(self.clock)


def _train(seed: int, args: list[str]) -> tuple[dict[str, float], list[tuple[int, float]]]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli = _CLI(["fit", *args, "--seed_everything", str(seed)])
    row = {
        "seed": seed,
        "steps": cli.model.env_steps,
        "seconds": cli.clock.seconds,
        "cpu_seconds": cli.clock.cpu_seconds,
        "sps": cli.model.env_steps / cli.clock.seconds,
        "return": cli.trainer.callback_metrics["val/episode_return"].item(),
        "std": cli.trainer.callback_metrics["val/episode_return_std"].item(),
    }
    with (Path(cli.trainer.log_dir or ".") / "metrics.csv").open() as file:
        curve = [
            (int(line["step"]), float(line["rollout/episode_return"]))
            for line in csv.DictReader(file)
            if line.get("rollout/episode_return")
        ]
    return row, curve


def _draw(curves: dict[int, list[tuple[int, float]]], title: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=120, layout="constrained")
    for seed, curve in curves.items():
        steps, returns = zip(*curve, strict=True)
        axes.plot(steps, returns, linewidth=1.4, label=f"seed {seed}")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("mean return of the last 100 episodes")
    axes.set_title(title, fontsize=10)
    axes.xaxis.set_major_formatter(lambda steps, _: f"{steps / 1000:.0f}k")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="ppo.yaml")
    parser.add_argument("--seeds", type=int, default=5, help="Trains seeds 1 to this.")
    parser.add_argument("--name", default="cartpole", help="Of the files under benchmarks/results.")
    options, overrides = parser.parse_known_args()
    rows, curves = [], {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for seed in range(1, options.seeds + 1):
            row, curves[seed] = _train(seed, ["--config", options.config, *overrides])
            rows.append(row)
            print(", ".join(f"{key} {value:,.6g}" for key, value in row.items()), flush=True)
    median = statistics.median(row["seconds"] for row in rows)
    cpu = statistics.median(row["cpu_seconds"] for row in rows)
    took = f"median training time {median:.1f} s, {cpu:.1f} s of processor time"
    lines = [
        f"`{' '.join([options.config, *overrides])}`, {datetime.date.today():%Y-%m-%d}, "
        f"{os.cpu_count()}-core {platform.machine()} CPU, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; by `python benchmarks/solve.py --config {options.config} "
        f"--seeds {options.seeds} --name {options.name}`:",
        "",
        "| seed | environment steps | training, s | processor time, s | SPS "
        "| mean return ± std of the greedy evaluation |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['seed']} | {row['steps']:,} | {row['seconds']:.1f} | {row['cpu_seconds']:.1f} "
            f"| {row['sps']:,.0f} | {row['return']:.1f} ± {row['std']:.1f} |"
            for row in rows
        ),
        "",
        f"{took.capitalize()}.",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{options.name}.md").write_text("\n".join(lines) + "\n")
    _draw(curves, f"{options.config}: {took}", RESULTS / f"{options.name}.png")


if __name__ == "__main__":
    main()
