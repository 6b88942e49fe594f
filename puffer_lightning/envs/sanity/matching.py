"""Environments where the action must match what is seen: continuous, in an image, in several parts."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space

from puffer_lightning.envs.sanity.base import Array, Outcome, Rows, SanityVectorEnv


class MatchingVectorEnv(SanityVectorEnv):
    """Something new to match at every step, eight times an episode, which then terminates.

    The return is the mean score of the eight actions.
    """

    episode_length: ClassVar[int] = 8

    @abstractmethod
    def _show(self, rows: Rows) -> None:
        """Draw what ``rows`` ``[R]`` see next."""

    @abstractmethod
    def _score(self, rows: Rows, actions: Array) -> Array:
        """Score ``[R]`` of ``actions`` ``[R, ...]`` against what ``rows`` ``[R]`` see."""

    def _start(self, rows: Rows) -> None:
        self._show(rows)

    def _advance(self, rows: Rows, actions: Array) -> Outcome:
        reward = self._score(rows, actions) / self.episode_length
        self._show(rows)
        return reward, self.elapsed[rows] >= self.episode_length, np.zeros(len(rows), np.bool_)


class ContinuousTarget(MatchingVectorEnv):
    """Two continuous actions that must follow the observation, each within its own bounds.

    Observation: uniform in [-1, 1]² (``[2]``). Action: Box of [-1, 3] × [-2, 0]. The target lies at the
    middle of the bounds plus 0.8 of half their width times the observation, so both actions have to leave
    [-1, 1]. Score of an action: minus its squared distance from the target, averaged over the two. Actions
    out of bounds are clipped to them.

    Catches a mean that does not follow the observation, log-probabilities summed or broadcast over the wrong
    axis, and actions squashed or clipped to [-1, 1] where the bounds say otherwise.

    Optimal return 0. A mean that ignores the observation gets at most -0.533, one held within [-1, 1] about
    -0.267, uniform actions -1.367. ``solved_at`` is about the greedy policy (the mean): sampling costs the
    variance on top.
    """

    low: ClassVar[tuple[float, float]] = (-1.0, -2.0)
    high: ClassVar[tuple[float, float]] = (3.0, 0.0)
    optimal_return = 0.0
    random_return = -41 / 30
    solved_at = -0.15
    solved_by = "greedy"
    row_state = ("seen",)

    def target(self, observation: Array) -> Array:
        """The best actions ``[..., 2]`` for observations ``[..., 2]``."""
        low, high = np.asarray(self.low), np.asarray(self.high)
        return np.asarray((low + high) / 2 + 0.4 * (high - low) * observation)

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        low, high = np.asarray(self.low, np.float32), np.asarray(self.high, np.float32)
        return Box(-1.0, 1.0, (2,), np.float32), Box(low, high, dtype=np.float32)

    def _allocate(self) -> None:
        self.seen = np.zeros((self.num_envs, 2), dtype=np.float32)

    def _show(self, rows: Rows) -> None:
        self.seen[rows] = self.np_random.uniform(-1.0, 1.0, size=(len(rows), 2))

    def _score(self, rows: Rows, actions: Array) -> Array:
        error = np.clip(actions, self.low, self.high) - self.target(self.seen[rows])
        return np.asarray(-np.square(error).mean(axis=1))

    def _observe(self) -> Array:
        return self.seen.copy()


class ImageTarget(MatchingVectorEnv):
    """Name the bright quarter of a small noisy image.

    Observation: uint8 ``[1, 16, 16]`` (channel first), noise of 0 to 63, with 128 added in one quarter.
    Action: the quarter (0 and 1 above, 2 and 3 below; even is left). Score: 1 if right, else 0.

    Catches images that are not scaled, scaled twice or wrapped around in uint8 arithmetic, height and width
    or rows of the batch mixed up by a reshape, and an encoder whose gradient does not arrive.

    Optimal return 1. A policy that does not see gets 0.25, one that mixes up two quarters 0.5.
    """

    size: ClassVar[int] = 16
    optimal_return = 1.0
    random_return = 0.25
    solved_at = 0.9
    row_state = ("quarter", "image")
    render_modes = ("rgb_array",)

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return Box(0, 255, (1, self.size, self.size), np.uint8), Discrete(4)

    def _allocate(self) -> None:
        self.quarter = np.zeros(self.num_envs, dtype=np.int64)
        self.image = np.zeros((self.num_envs, 1, self.size, self.size), dtype=np.uint8)

    def _show(self, rows: Rows) -> None:
        self.quarter[rows] = self.np_random.integers(4, size=len(rows))
        noise = self.np_random.integers(64, size=(len(rows), self.size, self.size), dtype=np.uint8)
        half = np.arange(self.size) // (self.size // 2)
        bright = 2 * half[:, None] + half == self.quarter[rows, None, None]
        self.image[rows, 0] = noise + 128 * bright.astype(np.uint8)

    def _score(self, rows: Rows, actions: Array) -> Array:
        return np.asarray(actions == self.quarter[rows], dtype=np.float32)

    def _observe(self) -> Array:
        return self.image.copy()

    def render(self) -> tuple[Array, ...] | None:
        """The images as seen, four times enlarged: one uint8 ``[64, 64, 3]`` a row; None without a mode."""
        if self.render_mode is None:
            return None
        frames = np.repeat(np.repeat(self.image[:, 0], 4, axis=1), 4, axis=2)
        return tuple(np.repeat(frames[..., None], 3, axis=3))


class MultiDiscreteMatch(MatchingVectorEnv):
    """Three discrete actions at once, each of which must match its part of the observation.

    Observation: three one-hot targets of sizes 2, 3 and 4, side by side (``[9]``). Action: MultiDiscrete of
    2, 3 and 4. Score: the share of the three that match.

    Catches joint log-probabilities and entropies that leave out a factor, logits split at the wrong places,
    and factors stored in the wrong order.

    Optimal return 1. With the two smaller factors right and the last at chance it is 0.75, with the first
    alone 0.528, chance is 0.361.
    """

    sizes: ClassVar[tuple[int, ...]] = (2, 3, 4)
    optimal_return = 1.0
    random_return = 13 / 36
    solved_at = 0.9
    row_state = ("targets",)

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return Box(0.0, 1.0, (sum(self.sizes),), np.float32), MultiDiscrete(list(self.sizes))

    def _allocate(self) -> None:
        self.targets = np.zeros((self.num_envs, len(self.sizes)), dtype=np.int64)

    def _show(self, rows: Rows) -> None:
        self.targets[rows] = self.np_random.integers(self.sizes, size=(len(rows), len(self.sizes)))

    def _score(self, rows: Rows, actions: Array) -> Array:
        return np.asarray((actions == self.targets[rows]).mean(axis=1))

    def _observe(self) -> Array:
        factor = np.repeat(np.arange(len(self.sizes)), self.sizes)
        choice = np.concatenate([np.arange(size) for size in self.sizes])
        return np.asarray(self.targets[:, factor] == choice, dtype=np.float32)
