import csv
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger

from puffer_lightning.engines import PPO
from puffer_lightning.engines.reports import outlast_full_disks
from tests.callbacks.runs import data, trainer


class Lines(L.Callback):
    """Lines of the metrics after each iteration: on disk, header and all, and still in memory."""

    def __init__(self) -> None:
        self.on_disk: list[int] = []
        self.in_memory: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        file = Path(trainer.log_dir, "metrics.csv")
        self.on_disk.append(len(file.read_text().splitlines()) if file.exists() else 0)
        self.in_memory.append(len(trainer.logger.experiment.metrics))


def test_metrics_do_not_pile_up_in_memory(tmp_path: Path) -> None:
    lines = Lines()
    run = trainer(lines, folder=tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    run.fit(PPO(update_epochs=1), datamodule=data(60))
    assert lines.on_disk == [0] * 24 + [26] * 25 + [51] * 11
    assert max(lines.in_memory) == 24
    assert len(Path(str(run.log_dir), "metrics.csv").read_text().splitlines()) == 61


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("lines", [0, 1])
def test_a_full_disk_loses_no_line(lines: int, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    outlast_full_disks(logger)
    save = logger.save
    outlast_full_disks(logger)
    assert logger.save is save, "told once is enough"
    file = Path(logger.log_dir) / "metrics.csv"
    for step in range(lines):
        logger.log_metrics({"a": 1.0}, step)
    logger.save()
    written = file.read_bytes() if lines else b""
    with warnings.catch_warnings(record=True) as said, room_for(len(written) + 3):
        warnings.simplefilter("always")
        for step in range(lines, 10):
            logger.log_metrics({"a": 1.0}, step)
            logger.save()
        logger.log_metrics({"a": 1.0, "b": 2.0}, 10)
        logger.save()
        assert (file.read_bytes() if file.exists() else b"") == written
    assert ["cannot be written" in str(warning.message) for warning in said] == [True]
    logger.save()
    with file.open(newline="") as text:
        rows = [(row["step"], row["b"]) for row in csv.DictReader(text)]
    assert rows == [*((str(step), "") for step in range(10)), ("10", "2.0")]
