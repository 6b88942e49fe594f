"""Environments that misbehave on demand, importable by worker processes."""

import multiprocessing
import os
import signal
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray


class Random(gym.Env[Any, Any]):
    """Observes samples of any space; its episodes end at random; every kind of info."""

    def __init__(
        self, observation_space: Space[Any] | None = None, action_space: Space[Any] | None = None
    ) -> None:
        # A copy, as it is seeded.
        self.observation_space = deepcopy(observation_space or spaces.Box(-1.0, 1.0, (3,), np.float32))
        self.action_space = action_space or spaces.Discrete(3, start=-1)
        self.render_mode = "rgb_array"
        self.scale = 1.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {"options": str(options)} if options else {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        draw = self.np_random.random()
        info: dict[str, Any] = {}
        if draw > 0.5:
            info = {"draw": draw, "action": action, "nested": {"vector": np.full(2, draw)}, "text": str(draw)}
        return self.observation_space.sample(), self.scale * draw, draw < 0.15, 0.1 < draw < 0.3, info

    def render(self) -> Any:
        return np.full((2, 2, 3), int(self.np_random_seed or 0) % 256, np.uint8)

    def shout(self, word: str, times: int = 1) -> str:
        return word.upper() * times


class Counting(gym.Env[Any, Any]):
    """Observes (its number, its seed, its step, the episode), and never ends; misbehaves at one step.

    Args:
        number: Which of the environments.
        at: The step at which to misbehave, counted over all episodes, if ``number`` is ``who``.
        how: What to do: ``raise``, ``kill``, ``hang``, ``nan``, ``reward``, or ``reset`` (raise there).
        once: A file that is made at that time, after which it behaves.
        nap: Seconds that a step takes.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(
        self,
        number: int,
        who: int = -1,
        at: int = 3,
        how: str = "raise",
        once: Path | None = None,
        nap: float = 0.0,
    ) -> None:
        self.number, self.misbehaves, self.at, self.how, self.once, self.nap = (
            number,
            number == who,
            at,
            how,
            once,
            nap,
        )
        self.seed, self.steps, self.episode, self.total = -1, 0, -1, 0

    def observe(self) -> NDArray[np.float64]:
        return np.array([self.number, self.seed, self.steps, self.episode], dtype=np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if self.misbehaves and self.how == "reset" and self.episode >= 0:
            raise RuntimeError("not again")
        self.seed = self.seed if seed is None else seed
        self.steps, self.episode = 0, self.episode + 1
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        time.sleep(self.nap)
        self.steps, self.total = self.steps + 1, self.total + 1
        observation, reward = self.observe(), float(self.total)
        if self.misbehaves and self.total == self.at and not (self.once and self.once.exists()):
            if self.once:
                self.once.touch()
            if self.how == "raise":
                raise RuntimeError("what a day")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(1000.0)
            if self.how == "nan":
                observation[2] = np.nan
            if self.how == "reward":
                reward = np.inf
        return observation, reward, False, False, {}

    def process(self) -> int:
        return os.getpid()


class Uncloseable(Counting):
    """Hangs when it is closed, in a worker."""

    def close(self) -> None:
        if multiprocessing.parent_process():
            time.sleep(1000.0)


class Unmakeable(Counting):
    """Cannot be made but as the first."""

    def __init__(self, number: int) -> None:
        if number:
            raise OSError("no such level")
        super().__init__(number)
