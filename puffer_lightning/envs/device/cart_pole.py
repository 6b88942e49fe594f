"""``TorchCartPole``: gymnasium's CartPole-v1, in torch."""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, Space
from torch import Tensor

from puffer_lightning.envs.device.base import GameState, TorchVectorEnv

_GRAVITY, _POLE_MASS, _TOTAL_MASS, _HALF_LENGTH = 9.8, 0.1, 1.1, 0.5
_LEVER = _POLE_MASS * _HALF_LENGTH / _TOTAL_MASS
_FORCE, _SECONDS = 10.0, 0.02
_POSITION_LIMIT, _ANGLE_LIMIT = 2.4, 12 * 2 * math.pi / 360
_START = 0.05


class TorchCartPole(TorchVectorEnv):
    """Balance a pole on a cart: the dynamics, rewards and limits of gymnasium's CartPole-v1.

    Observation: position (m), velocity, angle (rad), angular velocity (``[4]`` float32). Action: push to the
    left (0) or to the right (1) with 10 N for 0.02 s. Each step pays 1. An episode terminates when the cart
    is off the track (2.4 m) or the pole leans by more than 12°, and is truncated after 500 steps, as of
    CartPole-v1. It starts with all four uniform in ±0.05. Computed in float32, where gymnasium computes in
    float64 and rounds what it returns.

    Source: Barto, Sutton and Anderson 1983 (doi:10.1109/TSMC.1983.6313077), with the equations of motion
    corrected by Florian 2007, "Correct equations for the dynamics of the cart-pole system".
    """

    default_max_episode_steps: ClassVar[int] = 500
    noise_size: ClassVar[int] = 4

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        """Spaces of one environment: those of CartPole-v1."""
        high = np.array([2 * _POSITION_LIMIT, np.inf, 2 * _ANGLE_LIMIT, np.inf], dtype=np.float32)
        return Box(-high, high, dtype=np.float32), Discrete(2)

    def begin(self, noise: Tensor) -> GameState:
        """States at the start of an episode, for uniform noise [N, 4] in [-1, 1)."""
        return {"physics": noise * _START}

    def advance(self, state: GameState, actions: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Push for one time step of explicit Euler; returns next states, rewards and terminated, [N] each."""
        _, velocity, angle, spin = state["physics"].unbind(1)
        cos, sin = angle.cos(), angle.sin()
        # Each addcmul is a + value · b · c, in one pass over memory.
        force = actions.to(angle.dtype) * (2 * _FORCE / _TOTAL_MASS) - _FORCE / _TOTAL_MASS
        push = torch.addcmul(force, spin.square(), sin, value=_LEVER)
        inertia = _HALF_LENGTH * 4 / 3 - cos.square() * (_HALF_LENGTH * _POLE_MASS / _TOTAL_MASS)
        angular_acceleration = torch.addcmul(sin * _GRAVITY, cos, push, value=-1) / inertia
        acceleration = torch.addcmul(push, angular_acceleration, cos, value=-_LEVER)
        # One quantity after the other in memory, as the noise is: each is computed in one stretch.
        rates = torch.stack((velocity, acceleration, spin, angular_acceleration)).t()
        after = torch.add(state["physics"], rates, alpha=_SECONDS)
        x, _, angle, _ = after.unbind(1)
        terminated = (x.abs() > _POSITION_LIMIT) | (angle.abs() > _ANGLE_LIMIT)
        return {"physics": after}, torch.ones_like(terminated, dtype=torch.float32), terminated

    def observe(self, state: GameState) -> Tensor:
        """Observations [N, 4] float32: the state itself."""
        return state["physics"]
