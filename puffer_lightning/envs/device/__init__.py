"""Environments in torch: batch-first, on any device, without a loop over environments.

Importing this package registers them with gymnasium: ``gymnasium.make_vec("puffer/TorchCartPole-v0", ...)``.
"""

import gymnasium

from puffer_lightning.envs.device.base import Outcome, TorchVectorEnv
from puffer_lightning.envs.device.breakout import TorchBreakout
from puffer_lightning.envs.device.cart_pole import TorchCartPole
from puffer_lightning.envs.device.maze import TorchMemoryMaze

__all__ = [
    "TORCH_ENVS",
    "Outcome",
    "TorchBreakout",
    "TorchCartPole",
    "TorchMemoryMaze",
    "TorchVectorEnv",
    "register_torch_envs",
]

TORCH_ENVS: dict[str, type[TorchVectorEnv]] = {
    f"puffer/{cls.__name__}-v0": cls for cls in (TorchCartPole, TorchBreakout, TorchMemoryMaze)
}
"""Every environment in torch by its gymnasium id."""


def register_torch_envs() -> None:
    """Register them with gymnasium under ``puffer/``, as vector environments; again is harmless."""
    for env_id, cls in TORCH_ENVS.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(id=env_id, vector_entry_point=f"{__name__}:{cls.__name__}")


register_torch_envs()
