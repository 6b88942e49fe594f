"""The thin adapters between PPO and Lightning: Trainer plug-ins, and the same loop for Fabric."""

from puffer_lightning.engines.datamodule import RolloutDataModule
from puffer_lightning.engines.fabric import iterations
from puffer_lightning.engines.module import PPO

__all__ = ["PPO", "RolloutDataModule", "iterations"]
