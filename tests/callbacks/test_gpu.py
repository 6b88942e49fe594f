"""On a machine without GPUs, with made-up ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from puffer_lightning.callbacks import GPUMonitor
from puffer_lightning.callbacks import gpu as module
from puffer_lightning.distributed import rank
from puffer_lightning.errors import ConfigurationError
from tests.callbacks.runs import PPO, data, heard, trainer
from tests.distributed.processes import run_ranks


class FakeDriver:
    """Two GPUs of 8 GB, of which one process at a time must ask."""

    knows_utilization = True

    def utilizations(self, devices: list[torch.device]) -> list[float]:
        assert rank() == 0, "the one process of this machine"
        return [0.25 + 0.5 * number for number in range(len(devices))]

    def memory(self, device: torch.device) -> tuple[int, int]:
        return 2_000_000_000 * (rank() + 1), 8_000_000_000


class OnGPU(GPUMonitor):
    """Takes the processor for a GPU."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._driver = FakeDriver()  # type: ignore[assignment]


def fit(this_rank: int, folder: Path) -> tuple[dict[str, float], str]:
    run = trainer(OnGPU(every_n_iterations=2), folder=folder, devices=2, strategy="ddp")
    with heard() as said:
        run.fit(PPO(), datamodule=data(4))
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    return {name: value for name, value in metrics.items() if name.startswith("gpu/")}, said.getvalue()


def test_one_process_asks_for_all_gpus_and_the_fullest_is_named(tmp_path: Path) -> None:
    (one, said), (other, said_there) = run_ranks(fit, tmp_path)
    assert one == other == {"gpu/utilization": 0.5, "gpu/memory_gb": 4.0, "gpu/memory_share": 0.5}
    assert "The GPUs were busy for 50% of the time; a rank needed up to 4.00 GB of memory, 50% of" in said
    assert "busy" not in said_there


def test_without_a_gpu_it_says_so_and_nothing_else(tmp_path: Path) -> None:
    run = trainer(GPUMonitor(every_n_iterations=1), folder=tmp_path)
    with heard() as said:
        run.fit(PPO(), datamodule=data(2))
    assert said.getvalue().count("GPUMonitor has nothing to watch: training is not on a GPU.") == 1
    assert "GPUs were" not in said.getvalue()
    assert not [name for name in run.callback_metrics if name.startswith("gpu/")]


def test_utilisation_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert not module.Driver().knows_utilization
    monkeypatch.setattr(FakeDriver, "knows_utilization", False)
    run = trainer(OnGPU(every_n_iterations=1), folder=tmp_path)
    with heard() as said:
        run.fit(PPO(), datamodule=data(1))
    assert "gpu/utilization" not in run.callback_metrics
    assert run.callback_metrics["gpu/memory_gb"] == 2.0
    assert "a rank needed up to 2.00 GB" in said.getvalue()


def test_refuses() -> None:
    with pytest.raises(ConfigurationError, match="every_n_iterations is 0: set it to 1 or more"):
        GPUMonitor(every_n_iterations=0)
