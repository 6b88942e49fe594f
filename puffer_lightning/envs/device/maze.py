"""``TorchMemoryMaze``: remember which way to turn."""

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, Space
from torch import Tensor

from puffer_lightning.envs.device.base import GameState, TorchVectorEnv
from puffer_lightning.errors import ConfigurationError


class TorchMemoryMaze(TorchVectorEnv):
    """A corridor that ends in a T; a sign at its start, seen once, says which way to turn at its end.

    Observation ``[3]`` float32: the sign, -1 for left or 1 for right, at an episode's first step and 0 after
    it; 1 in the corridor, else 0; 1 at the junction, else 0. Action: forward (0), left (1), right (2). In the
    corridor only forward leads on, at the junction only left and right; the rest bumps into a wall, which
    takes time and nothing else. Turning terminates the episode and pays 1 if it was the way on the sign, else
    0. Episodes are truncated after 4 · ``length`` steps if not told otherwise.

    A policy without memory gets 0.5 at best: at the junction all it sees is the junction. One that remembers,
    or with ``remind``, gets 1.

    Source: Bakker 2002, "Reinforcement Learning with Long Short-Term Memory" (NIPS 14), section 4.

    Args:
        num_envs: N, at least 1.
        length: Steps from the start to the junction.
        remind: Show the sign at every step, so that nothing need be remembered.
        options: As of ``TorchVectorEnv``.

    Raises:
        ConfigurationError: An argument has a value that cannot work.
    """

    noise_size: ClassVar[int] = 1

    def __init__(self, num_envs: int = 1, length: int = 8, remind: bool = False, **options: Any) -> None:
        if length < 1:
            raise ConfigurationError(f"length is {length}: set it to 1 or more.")
        self.length = length
        self.remind = remind
        options.setdefault("max_episode_steps", 4 * length)
        super().__init__(num_envs, **options)

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        """Spaces of one environment: sign, corridor and junction; three actions."""
        low = np.array([-1, 0, 0], dtype=np.float32)
        return Box(low, np.ones(3, np.float32), dtype=np.float32), Discrete(3)

    def begin(self, noise: Tensor) -> GameState:
        """At the start of the corridor, with a sign by noise [N, 1] in [-1, 1)."""
        sign = (noise[:, 0] < 0).float() * 2 - 1
        return {"sign": sign, "seen": sign, "place": torch.zeros_like(sign, dtype=torch.int64)}

    def advance(self, state: GameState, actions: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Walk or turn; returns the next states, rewards [N] and terminated [N]."""
        sign, place = state["sign"], state["place"]
        turned = (place == self.length) & (actions > 0)
        right_way = turned & (2 * actions - 3 == sign)
        after = {
            "sign": sign,
            "seen": sign if self.remind else torch.zeros_like(sign),
            "place": (place + (actions == 0)).clamp(max=self.length),
        }
        return after, right_way.float(), turned

    def observe(self, state: GameState) -> Tensor:
        """Observations [N, 3] float32."""
        junction = state["place"] == self.length
        return torch.stack((state["seen"], (~junction).float(), junction.float()), dim=1)
