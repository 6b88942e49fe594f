"""Train for 10,000 iterations and see whether anything grows that should not.

    python benchmarks/long_run.py

One run of the command line, with all that it does unasked (metrics, checkpoints, evaluations, progress), of a
task so small that what is left behind by an iteration shows: environments in a worker process, observations
normalised. Every 100 iterations it counts what the process holds. ``benchmarks/results/long_run.md`` has the
counts and the slope of the resident memory, by least squares over the last nine tenths of the run.
"""

import argparse
import datetime
import gc
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from puffer_lightning.cli import PufferCLI

RESULTS = Path(__file__).resolve().parent / "results"
ENVS, HORIZON, EVERY = 4, 8, 100


class Count(NamedTuple):
    """What the process holds."""

    iteration: int
    seconds: float
    resident_kib: int
    objects: int
    threads: int
    descriptors: int
    segments: int
    log_kib: int


class Counts(Callback):
    """Counts every so many iterations."""

    def __init__(self, every: int = EVERY) -> None:
        self.every, self.made = every, list[Count]()
        self.begin = time.perf_counter()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (trainer.current_epoch + 1) % self.every:
            return
        gc.collect()
        # Those that are mapped; their names are taken back as soon as the workers have found them.
        maps = Path("/proc/self/maps").read_text()
        logs = Path(str(trainer.log_dir)).rglob("*")
        self.made.append(
            Count(
                trainer.current_epoch + 1,
                time.perf_counter() - self.begin,
                int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
                len(gc.get_objects()),
                len(list(Path("/proc/self/task").iterdir())),
                len(list(Path("/proc/self/fd").iterdir())),
                sum("/dev/shm" in line for line in maps.splitlines()),
                sum(path.stat().st_size for path in logs if path.is_file()) // 1024,
            )
        )


class _Counted(PufferCLI):
    counts = Counts()

    def before_fit(self) -> None:
        super().before_fit()
        self.trainer.callbacks.append(self.counts)


def run(iterations: int, *options: str) -> list[Count]:
    """The counts of a run in the working directory."""
    _Counted.counts = counts = Counts(min(EVERY, iterations // 10))
    _Counted(
        [
            "fit",
            f"--data.num_envs={ENVS}",
            f"--data.horizon={HORIZON}",
            f"--data.total_timesteps={iterations * ENVS * HORIZON}",
            "--data.num_workers=1",
            "--data.env=MountainCar-v0",
            "--data.eval_episodes=1",
            "--model.update_epochs=1",
            "--model.num_minibatches=2",
            "--model.normalize_observations=true",
            *options,
        ]
    )
    return counts.made


def slope(counts: list[Count], name: str) -> float:
    """Of a count, for each 1,000 iterations; by least squares, without the first tenth of the run."""
    settled = counts[len(counts) // 10 :]
    iterations = np.array([count.iteration for count in settled]) / 1000
    return float(np.polyfit(iterations, [getattr(count, name) for count in settled], 1)[0])


def _table(counts: list[Count]) -> str:
    shown = [counts[0], *(count for count in counts[1:-1] if count.iteration % 1000 == 0), counts[-1]]
    lines = ["| iteration | " + " | ".join(name.replace("_", " ") for name in Count._fields[1:]) + " |"]
    lines.append("|" + "---:|" * len(Count._fields))
    lines += ["| " + " | ".join(f"{number:,.0f}" for number in count) + " |" for count in shown]
    per = [f"{slope(counts, name):+.1f}" for name in Count._fields[1:]]
    return "\n".join([*lines, f"| slope, for 1,000 iterations | {' | '.join(per)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=10_000)
    iterations = parser.parse_args().iterations
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        counts = run(iterations)
    text = (
        f"{datetime.date.today()}, {os.cpu_count()}-core {platform.machine()}, torch {torch.__version__}, "
        f"{iterations:,} iterations of {ENVS} × {HORIZON} steps of MountainCar-v0 in a worker process, by "
        f"`make long-run`:\n\n{_table(counts)}\n\nEach count is an object itself, so there are ten more of "
        "them after 1,000 iterations. The logs are a line of CSV an iteration and one an evaluation, and two "
        "checkpoints that are written over and over.\n"
    )
    print(text)
    (RESULTS / "long_run.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
