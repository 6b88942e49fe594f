"""Lightning's strategies as PPO needs them, under Lightning's own names."""

from puffer_lightning.engines.strategies.ddp import DDP, FabricDDP

__all__ = ["DDP", "FabricDDP"]
