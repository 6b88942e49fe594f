"""PPO reinforcement learning at PufferLib speed, as a set of PyTorch Lightning plug-ins."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from puffer_lightning.engines import (
        DDP,
        FSDP,
        PPO,
        FabricDDP,
        FabricFSDP,
        PhaseProfiler,
        RolloutDataModule,
        iterations,
        save_checkpoint,
    )

__all__ = [
    "DDP",
    "FSDP",
    "PPO",
    "FabricDDP",
    "FabricFSDP",
    "PhaseProfiler",
    "RolloutDataModule",
    "iterations",
    "save_checkpoint",
]
__version__ = version("puffer-lightning")


def __getattr__(name: str) -> Any:
    # Late, so that a process that needs one room, such as an environment worker, does not import Lightning.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from puffer_lightning import engines

    return getattr(engines, name)
