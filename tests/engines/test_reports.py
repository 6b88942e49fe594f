from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger

from puffer_lightning.engines import PPO
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
