"""`Squared`: a small grid with several targets and many optimal policies."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from puffer_lightning.envs.sanity.base import Array, Outcome, Rows, SanityVectorEnv

RADIUS = 2
MOVES = np.array([[0, -1], [0, 1], [-1, 0], [1, 0]])
TARGETS = RADIUS * MOVES


class Squared(SanityVectorEnv):
    """Visit the middles of all four sides of a 5 x 5 grid, in any order.

    Observation ``[6]``: the agent's column and row as shares of the way from the centre to the border
    (-1 to 1), then for each target whether it is still to be visited (up, down, left, right). Action: move
    up, down, left or right; the border holds. A target not visited before pays 0.25 and puts the agent back
    in the centre. The episode terminates when all four are visited and is truncated after 20 steps; 8 do.

    Catches rows that do not belong together: observations kept by reference and overwritten by the next step,
    a shuffle that parts observations from actions or advantages, a policy that ignores part of its input.
    There are 24 optimal orders, so averaging over them must not freeze the policy between two targets.

    Optimal return 1. A policy that does not tell which targets are left gets 0.25 if it is deterministic and
    at most 0.855 if it tosses coins in the centre. Chance is about 0.44.
    """

    time_limit: ClassVar[int] = 20
    optimal_return = 1.0
    random_return = 0.444
    solved_at = 0.95
    row_state = ("position", "remaining")

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        low = np.array([-1, -1, 0, 0, 0, 0], dtype=np.float32)
        return Box(low, np.ones(6, dtype=np.float32), dtype=np.float32), Discrete(len(MOVES))

    def _allocate(self) -> None:
        self.position = np.zeros((self.num_envs, 2), dtype=np.int64)
        self.remaining = np.ones((self.num_envs, len(TARGETS)), dtype=np.bool_)

    def _start(self, rows: Rows) -> None:
        self.position[rows] = 0
        self.remaining[rows] = True

    def _advance(self, rows: Rows, actions: Array) -> Outcome:
        position = np.clip(self.position[rows] + MOVES[actions], -RADIUS, RADIUS)
        hit = np.all(position[:, None] == TARGETS, axis=2) & self.remaining[rows]
        found: Array = hit.any(axis=1)
        self.position[rows] = np.where(found[:, None], 0, position)
        self.remaining[rows] &= ~hit
        terminated: Array = ~np.any(self.remaining[rows], axis=1)
        return found / len(TARGETS), terminated, ~terminated & (self.elapsed[rows] >= self.time_limit)

    def _observe(self) -> Array:
        return np.concatenate((self.position / RADIUS, self.remaining), axis=1).astype(np.float32)
