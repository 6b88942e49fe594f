"""Lightning's strategies as PPO needs them, under Lightning's own names."""

from puffer_lightning.engines.strategies.ddp import DDP, FabricDDP
from puffer_lightning.engines.strategies.fsdp import FSDP, FabricFSDP

__all__ = ["DDP", "FSDP", "FabricDDP", "FabricFSDP"]
