"""``Stragglers``: which rank the others waited for."""

from collections import Counter
from statistics import median
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from puffer_lightning.callbacks.protocols import ppo_parts


class Stragglers(Callback):
    """Says at the end of training which rank was slowest, how often, and by how much.

    Of the metrics ``ranks/…``, which there are with several ranks; does nothing with one.

    Raises:
        ConfigurationError: The module is not ``PPO``.
    """

    def __init__(self) -> None:
        self._slowdowns: list[tuple[int, float]] = []
        self._waiting = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ppo_parts(trainer, self)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._slowdowns.clear()
        self._waiting = 0.0
        # The trainer looks for new ones each time it is asked for them.
        self._metrics = trainer.callback_metrics

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = self._metrics
        if "ranks/slowest" in metrics:
            self._slowdowns.append((int(metrics["ranks/slowest"].item()), metrics["ranks/slowdown"].item()))
            self._waiting += metrics["ranks/waiting_share"].item()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._slowdowns:
            return
        iterations = len(self._slowdowns)
        [(slowest, times)] = Counter(rank for rank, _ in self._slowdowns).most_common(1)
        by = median(slowdown for rank, slowdown in self._slowdowns if rank == slowest)
        rank_zero_info(
            f"Rank {slowest} was the slowest to collect in {times / iterations:.0%} of iterations, then at "
            f"{by:.1f} times the median of the others; on average a rank waited for the slowest for "
            f"{self._waiting / iterations:.0%} of the time."
        )
