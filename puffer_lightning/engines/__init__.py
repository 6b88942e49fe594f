"""The thin adapters between PPO and Lightning: Trainer plug-ins, and the same loop for Fabric."""

from puffer_lightning.engines.datamodule import RolloutDataModule
from puffer_lightning.engines.fabric import iterations, save_checkpoint
from puffer_lightning.engines.module import PPO
from puffer_lightning.engines.profiling import PhaseProfiler
from puffer_lightning.engines.strategies import DDP, FSDP, FabricDDP, FabricFSDP

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
