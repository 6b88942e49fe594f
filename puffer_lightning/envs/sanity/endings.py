"""Environments about how an episode ends: `TruncatedValue`, `TerminatedValue` and `ResetStep`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from puffer_lightning.envs.sanity.base import Array, Outcome, Rows, SanityVectorEnv


class TruncatedValue(SanityVectorEnv):
    """A garden that pays 1 a step for ever, seen through a time limit of two steps.

    Observation ``[2]``: whether the row is in the garden, and its distance from it as a share of the longest.
    In the garden action 0 stays (reward 1) and action 1 leaves (reward 3, *terminated*, and the row is put at
    the far end of a corridor of six steps). In the corridor every action walks one step back, for nothing.
    Every second step of an episode is *truncated*. This is a continuing task cut in windows: truncation does
    not move the world, so the next episode goes on where the last one stopped; only a full ``reset`` puts
    all rows in the garden.

    Staying is worth 1/(1 - γ) (``true_value``) and leaving 3, so for γ > 2/3 a right PPO stays. One that
    treats truncation as termination believes that staying is worth at most 2, and leaves.

    Optimal return 2 (two steps in the garden). Who always leaves gets 3 once in four episodes, 0.75 on
    average, because the walk back fills three whole windows; that is what makes the mean episode return
    order the policies as their values do.
    """

    time_limit: ClassVar[int] = 2
    corridor: ClassVar[int] = 6
    leave_reward: ClassVar[float] = 3.0
    optimal_return = 2.0
    random_return = 12 / 13
    solved_at = 1.7
    row_state = ("distance",)

    @classmethod
    def true_value(cls, gamma: float, distance: int = 0) -> float:
        """Value of a row at ``distance`` steps from the garden under the policy that stays there.

        Args:
            gamma: Discount factor, in [0, 1).
            distance: Steps still to walk, 0 (in the garden) to ``corridor``.

        Returns:
            γ^distance / (1 - γ).
        """
        return gamma**distance / (1.0 - gamma)

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return Box(0.0, 1.0, (2,), np.float32), Discrete(2)

    def _allocate(self) -> None:
        self.distance = np.zeros(self.num_envs, dtype=np.int64)

    def _start(self, rows: Rows) -> None:
        pass

    def _advance(self, rows: Rows, actions: Array) -> Outcome:
        in_garden = self.distance[rows] == 0
        terminated = in_garden & (actions == 1)
        reward = np.where(terminated, self.leave_reward, in_garden)
        self.distance[rows] = np.where(terminated, self.corridor, np.maximum(self.distance[rows] - 1, 0))
        return reward, terminated, ~terminated & (self.elapsed[rows] >= self.time_limit)

    def _observe(self) -> Array:
        return np.stack((self.distance == 0, self.distance / self.corridor), axis=1).astype(np.float32)


class TerminatedValue(SanityVectorEnv):
    """A leap towards the goal that is the end: the goal is seen, never reached.

    Observation: one-hot place among start, path and goal (``[3]``; all zeros once the goal is used up). At
    the start and on the path action 0 walks on to the next place (reward 0), and action 1 jumps: reward 0.5
    and *terminated*, with the goal as final observation. At the goal every action pays 1 and terminates.

    Walking from the start is worth γ² and jumping 0.5, so for γ > 0.71 a right PPO walks. One that bootstraps
    through death, treating termination as truncation, believes that jumping is worth 0.5 + γ, and jumps. In
    NEXT_STEP mode, that is: elsewhere nobody values the final observation of a terminated episode.

    Optimal return 1. Who jumps gets 0.5, chance is 0.625.
    """

    jump_reward: ClassVar[float] = 0.5
    optimal_return = 1.0
    random_return = 0.625
    solved_at = 0.9
    row_state = ("place",)
    goal: ClassVar[int] = 2

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return Box(0.0, 1.0, (3,), np.float32), Discrete(2)

    def _allocate(self) -> None:
        self.place = np.zeros(self.num_envs, dtype=np.int64)

    def _start(self, rows: Rows) -> None:
        self.place[rows] = 0

    def _advance(self, rows: Rows, actions: Array) -> Outcome:
        arrived = self.place[rows] == self.goal
        jumps = ~arrived & (actions == 1)
        self.place[rows] = np.where(jumps, self.goal, self.place[rows] + 1)
        reward = np.where(jumps, self.jump_reward, arrived)
        return reward, jumps | arrived, np.zeros(len(rows), np.bool_)

    def _observe(self) -> Array:
        return np.asarray(self.place[:, None] == np.arange(3), dtype=np.float32)


class ResetStep(SanityVectorEnv):
    """What is seen at an episode's end is worthless, and what is seen after the reset is not.

    Observation: one-hot place, fork or swamp (``[2]``). Every episode is one step. Seven in eight start at
    the fork: action 0 pays 1 and terminates, action 1 pays 0.4 and is *truncated*. One in eight starts in the
    swamp: action 0 costs 1, action 1 pays 0, both terminate. Whatever happened, the final observation is the
    swamp.

    The swamp is worth 0 to who plays action 1 there, so action 1 at the fork is worth 0.4 + γ·0 < 1. What
    goes wrong, with V(fork) >= 1:

    - Training on the NEXT_STEP reset step: there the observation is the swamp, the action is ignored, the
      reward is 0 and the next observation mostly the fork; eight such rows for every true swamp row teach
      V(swamp) ≈ 0.9·V(fork), and the truncated action 1 looks like 0.4 + 0.9·V(fork) > 1.
    - Bootstrapping the truncated step from the observation after the reset (all modes), or letting
      GAE run on through the reset: action 1 looks like 0.4 + γ·V(fork) > 1.
    - Masking the step before the reset step, not the reset step: nothing is ever learned.

    Optimal return 7/8. Who plays action 1 at the fork gets 0.35, chance is 0.55.
    """

    detour_reward: ClassVar[float] = 0.4
    swamp_share: ClassVar[float] = 1 / 8
    optimal_return = 0.875
    random_return = 0.55
    solved_at = 0.8
    row_state = ("in_swamp",)

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return Box(0.0, 1.0, (2,), np.float32), Discrete(2)

    def _allocate(self) -> None:
        self.in_swamp = np.zeros(self.num_envs, dtype=np.bool_)

    def _start(self, rows: Rows) -> None:
        self.in_swamp[rows] = self.np_random.random(len(rows)) < self.swamp_share

    def _advance(self, rows: Rows, actions: Array) -> Outcome:
        in_swamp = self.in_swamp[rows]
        at_fork = np.where(actions == 0, 1.0, self.detour_reward)
        reward = np.where(in_swamp, np.where(actions == 0, -1.0, 0.0), at_fork)
        truncated = ~in_swamp & (actions == 1)
        self.in_swamp[rows] = True
        return reward, ~truncated, truncated

    def _observe(self) -> Array:
        return np.stack((~self.in_swamp, self.in_swamp), axis=1).astype(np.float32)
