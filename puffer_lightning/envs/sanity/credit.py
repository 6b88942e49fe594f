"""Environments whose one reward comes late: `Password` (explore) and `DelayedCredit` (assign it)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from puffer_lightning.envs.sanity.base import Array, Outcome, Rows, SanityVectorEnv


class Password(SanityVectorEnv):
    """Type five bits; only the right five pay.

    Observation: one-hot position in the password (``[5]``, all zeros once it is typed). Action: the next
    bit. The fifth step terminates the episode and pays 1 if every bit was right; nothing else pays.

    Catches lost exploration: one chance in 32 must be tried often enough and then be remembered, which a
    policy that acts greedily or loses its entropy before the first success does not do.

    Optimal return 1. A policy that collapses before it finds the password stays at 0, chance is 1/32.
    """

    password: ClassVar[tuple[int, ...]] = (1, 0, 0, 1, 0)
    optimal_return = 1.0
    random_return = 1 / 32
    solved_at = 0.9
    row_state = ("correct",)

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return Box(0.0, 1.0, (len(self.password),), np.float32), Discrete(2)

    def _allocate(self) -> None:
        self.correct = np.ones(self.num_envs, dtype=np.bool_)

    def _start(self, rows: Rows) -> None:
        self.correct[rows] = True

    def _advance(self, rows: Rows, actions: Array) -> Outcome:
        self.correct[rows] &= actions == np.asarray(self.password)[self.elapsed[rows] - 1]
        terminated = self.elapsed[rows] >= len(self.password)
        return self.correct[rows] & terminated, terminated, np.zeros(len(rows), np.bool_)

    def _observe(self) -> Array:
        return np.asarray(self.elapsed[:, None] == np.arange(len(self.password)), dtype=np.float32)


class DelayedCredit(SanityVectorEnv):
    """The first action is paid for seven steps later, and nothing in between tells what it was.

    Observation ``[2]``: a cue, -1 or 1 at the first step and 0 after it; and the elapsed share of the
    episode. The last of the eight steps terminates the episode and pays 1 if the *first* action was the
    cue's (1 for cue 1, 0 for cue -1). The other actions change nothing.

    Since no later observation tells whether the first action was right, no critic can help: only the sum over
    (γλ)^k in GAE (Schulman et al. 2016, arXiv:1506.02438) carries the reward back. Catches an accumulation
    that is cut, runs forwards or along the wrong axis, and λ = 0.

    Optimal return 1. A PPO that does not carry the reward back stays at chance, 0.5.
    """

    episode_length: ClassVar[int] = 8
    optimal_return = 1.0
    random_return = 0.5
    solved_at = 0.9
    row_state = ("cue", "correct")

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return Box(-1.0, 1.0, (2,), np.float32), Discrete(2)

    def _allocate(self) -> None:
        self.cue = np.zeros(self.num_envs, dtype=np.int64)
        self.correct = np.zeros(self.num_envs, dtype=np.bool_)

    def _start(self, rows: Rows) -> None:
        self.cue[rows] = self.np_random.integers(2, size=len(rows))

    def _advance(self, rows: Rows, actions: Array) -> Outcome:
        first = self.elapsed[rows] == 1
        self.correct[rows] = np.where(first, actions == self.cue[rows], self.correct[rows])
        terminated = self.elapsed[rows] >= self.episode_length
        return self.correct[rows] & terminated, terminated, np.zeros(len(rows), np.bool_)

    def _observe(self) -> Array:
        cue = np.where(self.elapsed == 0, 2 * self.cue - 1, 0)
        return np.stack((cue, self.elapsed / self.episode_length), axis=1).astype(np.float32)
