"""``CommunicationMonitor``: what the ranks send each other, and how long that takes."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from puffer_lightning.callbacks.protocols import log_metrics, ppo_parts
from puffer_lightning.distributed import (
    COLLECTIVES,
    Communication,
    CommunicationMeter,
    gather_rows,
    world_size,
)
from puffer_lightning.errors import ConfigurationError


class CommunicationMonitor(Callback):
    """Measures the collectives of one iteration in every few, and sums up when training ends.

    Metrics, of the iterations measured:

    ================================ ================================================================
    ``communication/share``          of the iteration, with a collective under way; mean over ranks
    ``communication/exposed_share``  of the iteration, with one under way and nothing computed meanwhile
    ``communication/<c>_count``      collectives of the kind c: all_reduce, all_gather, reduce_scatter,
                                     broadcast, other
    ``communication/<c>_bytes``      of the tensors, each as a whole
    ``communication/<c>_seconds``    from calls to results, waiting for slower ranks included; mean over ranks
    ``communication/<c>_gb_per_s``   bytes by the seconds of the rank that waited least
    ================================ ================================================================

    Args:
        every_n_iterations: How often an iteration is measured; that makes it slower by some microseconds for
            each operator, the others not at all.

    Raises:
        ConfigurationError: The option is out of its range, the module is not ``PPO``, or there is a profiler.
    """

    def __init__(self, every_n_iterations: int = 25) -> None:
        if every_n_iterations < 1:
            raise ConfigurationError(f"every_n_iterations is {every_n_iterations}: set it to 1 or more.")
        self._every_n_iterations = every_n_iterations
        self._meter: CommunicationMeter | None = None
        self._measured: list[dict[str, float]] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ppo_parts(trainer, self)
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            raise ConfigurationError(
                "CommunicationMonitor measures with torch's profiler itself: set trainer.profiler to null."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measured.clear()
        if world_size() == 1:
            rank_zero_info("CommunicationMonitor has nothing to measure: there is one process.")

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if world_size() > 1 and (trainer.current_epoch + 1) % self._every_n_iterations == 0:
            self._meter = CommunicationMeter()
            self._meter.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is None:
            return
        measured = self._meter.stop()
        self._meter = None
        metrics = _over_ranks(measured, pl_module.device)
        self._measured.append(metrics)
        log_metrics(trainer, self, {f"communication/{name}": value for name, value in metrics.items()})

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._measured:
            rank_zero_info(_summary(self._measured))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._meter is not None:
            self._meter.stop()
            self._meter = None


def _over_ranks(measured: Communication, device: torch.device) -> dict[str, float]:
    """The metrics by the names in the class's documentation, without the prefix."""
    row = [measured.seconds, measured.exposed_seconds, measured.iteration_seconds]
    row += [traffic.seconds for traffic in measured.traffic.values()]
    rows = gather_rows(torch.tensor(row, dtype=torch.float64, device=device)).cpu()
    seconds, exposed, iteration = rows[:, :3].mean(0).tolist()
    metrics = {"share": seconds / iteration, "exposed_share": exposed / iteration}
    for number, name in enumerate(COLLECTIVES, start=3):
        traffic, of_ranks = measured.traffic[name], rows[:, number]
        if traffic.count:
            metrics |= {
                f"{name}_count": float(traffic.count),
                f"{name}_bytes": float(traffic.bytes),
                f"{name}_seconds": of_ranks.mean().item(),
                f"{name}_gb_per_s": traffic.bytes / max(of_ranks.min().item(), 1e-9) / 1e9,
            }
    return metrics


def _summary(measured: list[dict[str, float]]) -> str:
    def mean(name: str) -> float:
        return sum(metrics.get(name, 0.0) for metrics in measured) / len(measured)

    parts = [
        f"{mean(f'{name}_count'):.0f} {name} of {mean(f'{name}_bytes') / 1e3:,.1f} kB together in "
        f"{1e3 * mean(f'{name}_seconds'):.1f} ms at {mean(f'{name}_gb_per_s'):.2g} GB/s"
        for name in COLLECTIVES
        if mean(f"{name}_count")
    ]
    return (
        f"Communication took {mean('share'):.0%} of an iteration, {mean('exposed_share'):.0%} with nothing "
        f"computed meanwhile; an iteration has {', '.join(parts)} (mean of {len(measured)} iterations)."
    )
