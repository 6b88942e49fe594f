"""``GPUMonitor``: whether the GPUs have enough to do, and how much memory is left."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from puffer_lightning.callbacks.protocols import log_metrics, ppo_parts
from puffer_lightning.distributed import gather_rows
from puffer_lightning.errors import ConfigurationError


class GPUMonitor(Callback):
    """Logs how busy the GPUs are and how much memory they need; without a GPU it says so and does nothing.

    On each machine one process alone asks the driver, for all GPUs there. Metrics:

    ==================== ============================================================================
    ``gpu/utilization``  share of the last moments in which a kernel ran, mean over GPUs; needs the
                         package ``nvidia-ml-py``
    ``gpu/memory_gb``    peak of the memory that torch had allocated so far, of the rank with the most
    ``gpu/memory_share`` the same, of that GPU's memory
    ==================== ============================================================================

    Args:
        every_n_iterations: How often they are logged.

    Raises:
        ConfigurationError: The option is out of its range, or the module is not ``PPO``.
    """

    def __init__(self, every_n_iterations: int = 10) -> None:
        if every_n_iterations < 1:
            raise ConfigurationError(f"every_n_iterations is {every_n_iterations}: set it to 1 or more.")
        self._every_n_iterations = every_n_iterations
        self._driver: Driver | None = None
        self._utilizations: list[float] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ppo_parts(trainer, self)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._utilizations.clear()
        self._driver = Driver() if pl_module.device.type == "cuda" else None
        if self._driver is None:
            rank_zero_info("GPUMonitor has nothing to watch: training is not on a GPU.")
        elif not self._driver.knows_utilization:
            rank_zero_info("GPUMonitor logs memory alone: for utilisation, pip install nvidia-ml-py.")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._driver is None or (trainer.current_epoch + 1) % self._every_n_iterations:
            return
        asked: list[float] = []
        if trainer.local_rank == 0 and self._driver.knows_utilization:
            asked = self._driver.utilizations(_devices_here(trainer))
        peak, total = self._driver.memory(pl_module.device)
        row = torch.tensor([sum(asked), len(asked), peak, peak / total], dtype=torch.float64)
        rows = gather_rows(row.to(pl_module.device)).cpu()
        utilization, number = rows[:, :2].sum(0).tolist()
        most = rows[rows[:, 2].argmax()]
        metrics = {"gpu/memory_gb": most[2].item() / 1e9, "gpu/memory_share": most[3].item()}
        if number:
            metrics["gpu/utilization"] = utilization / number
            self._utilizations.append(utilization / number)
        log_metrics(trainer, self, metrics)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        if "gpu/memory_gb" in metrics:
            busy = ""
            if self._utilizations:
                mean = sum(self._utilizations) / len(self._utilizations)
                busy = f"The GPUs were busy for {mean:.0%} of the time; "
            rank_zero_info(
                f"{busy}a rank needed up to {metrics['gpu/memory_gb'].item():.2f} GB of memory, "
                f"{metrics['gpu/memory_share'].item():.0%} of its GPU's."
            )


class Driver:
    """What is asked about GPUs.

    Attributes:
        knows_utilization: Whether there is a package to ask the driver with.
    """

    def __init__(self) -> None:
        self.knows_utilization = find_spec("pynvml") is not None

    def utilizations(self, devices: Sequence[torch.device]) -> list[float]:
        """The share of the last moments in which a kernel ran on each device, 0 to 1."""
        return [torch.cuda.utilization(device) / 100 for device in devices]

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Bytes of this process's peak, and of the whole GPU."""
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory


def _devices_here(trainer: Trainer) -> Sequence[torch.device]:
    """Of all ranks on this machine."""
    strategy: Any = trainer.strategy
    return getattr(strategy, "parallel_devices", None) or [strategy.root_device]
