"""The command line, run in this process in the working directory, and what it writes."""

import csv
from pathlib import Path
from typing import Any

import pytest

from puffer_lightning.cli import main

STEPS_PER_ITERATION = 128
QUICK = [
    "--data.num_envs=8",
    "--data.horizon=16",
    f"--data.total_timesteps={3 * STEPS_PER_ITERATION}",
    "--data.eval_episodes=2",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]


def run(subcommand: str, *args: str) -> None:
    """A run of three iterations, or of the evaluation alone; ``args`` win."""
    main([subcommand, *QUICK, *args])


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What the command line says when it refuses these arguments: exit code 2 and one message."""
    with pytest.raises(SystemExit) as exit_:
        main(list(args))
    said = capsys.readouterr()
    assert exit_.value.code == 2
    assert "Traceback" not in said.err
    [message] = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert "evaluation after" not in said.out, "refused before anything ran"
    return message


def metrics(version: int = 0) -> list[dict[str, Any]]:
    """The rows of a run's metrics.csv, without empty cells."""
    with Path("lightning_logs", f"version_{version}", "metrics.csv").open() as file:
        return [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def column(name: str, version: int = 0) -> dict[int, float]:
    """A metric by environment steps."""
    return {int(row["step"]): float(row[name]) for row in metrics(version) if name in row}
