"""Environments without anything to see: `Bandit` (which arm?) and `Stochastic` (how often?)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from puffer_lightning.envs.sanity.base import Array, Outcome, Rows, SanityVectorEnv


class Bandit(SanityVectorEnv):
    """Four arms with noisy rewards; an episode is one pull.

    Observation: the constant 1 (``[1]``). Action: the arm. Reward: the arm's mean plus Gaussian noise of
    standard deviation 0.5. Each episode terminates after its one step.

    Catches the coarsest faults: a policy gradient of the wrong sign, log-probabilities of other actions than
    those taken, advantages of other transitions.

    Optimal return 1.0 (arm 2). A broken PPO stays at the second-best arm's 0.5 or at chance, 0.4375.
    """

    means: ClassVar[tuple[float, ...]] = (0.0, 0.5, 1.0, 0.25)
    noise: ClassVar[float] = 0.5
    optimal_return = 1.0
    random_return = 0.4375
    solved_at = 0.9

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return Box(0.0, 1.0, (1,), np.float32), Discrete(len(self.means))

    def _start(self, rows: Rows) -> None:
        pass

    def _advance(self, rows: Rows, actions: Array) -> Outcome:
        reward = self.np_random.normal(np.asarray(self.means)[actions], self.noise)
        return reward, np.ones(len(rows), np.bool_), np.zeros(len(rows), np.bool_)

    def _observe(self) -> Array:
        return np.ones((self.num_envs, 1), dtype=np.float32)


class Stochastic(SanityVectorEnv):
    """The best policy without memory is a mixture: play action 1 about three times in four.

    Observation: the constant 1 (``[1]``), so neither the time nor the past is seen. An episode terminates
    after L = 8 steps; its last step pays 1 - ((f - q) / (1 - q))², where f is the fraction of steps that
    played action 1 and q = 0.75. All other rewards are 0.

    With probability p of action 1 the expected return is 1 - ((p - q)² + p(1 - p)/L) / (1 - q)², which is
    largest at p* = (q - 1/(2L)) / (1 - 1/L) = 0.786 (``best_mixture``), where it is 0.643.

    Catches policies that collapse: actions taken greedily while collecting, ratios taken against the wrong
    log-probabilities and, with an ``ent_coef`` of about 0.5, an entropy bonus of the wrong sign.

    Optimal return 0.643. A deterministic policy gets at most 0, the uniform one -0.5. ``solved_at`` is about
    the sampling policy; the greedy action of a perfect policy scores 0.
    """

    episode_length: ClassVar[int] = 8
    target_fraction: ClassVar[float] = 0.75
    best_mixture: ClassVar[float] = (0.75 - 1 / 16) / (1 - 1 / 8)
    optimal_return = 1 - 16 * ((best_mixture - 0.75) ** 2 + best_mixture * (1 - best_mixture) / 8)
    random_return = -0.5
    solved_at = 0.4
    row_state = ("ones",)

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return Box(0.0, 1.0, (1,), np.float32), Discrete(2)

    def _allocate(self) -> None:
        self.ones = np.zeros(self.num_envs, dtype=np.int64)

    def _start(self, rows: Rows) -> None:
        self.ones[rows] = 0

    def _advance(self, rows: Rows, actions: Array) -> Outcome:
        self.ones[rows] += actions
        terminated = self.elapsed[rows] >= self.episode_length
        miss = (self.ones[rows] / self.episode_length - self.target_fraction) / (1 - self.target_fraction)
        return np.where(terminated, 1 - miss**2, 0.0), terminated, np.zeros(len(rows), np.bool_)

    def _observe(self) -> Array:
        return np.ones((self.num_envs, 1), dtype=np.float32)
