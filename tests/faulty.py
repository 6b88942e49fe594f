"""Environments that fail on one of several ranks, once there was time to get going."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

Fault = Literal["raise", "kill", "hang", "none"]


class Faulty(SyncVectorEnv):
    """CartPole that fails at a step.

    Args:
        num_envs: Environments.
        fault: How.
        rank: On which rank.
        step: At which step.
        pids: Folder where each rank leaves its process id, as the name of a file.
        once: File whose existence says that it has failed already.
    """

    def __init__(
        self, num_envs: int, fault: Fault, rank: int, step: int = 100, pids: str = "pids", once: str = ""
    ) -> None:
        super().__init__([lambda: gym.make("CartPole-v1")] * num_envs)
        self.fault, self.once, self.left = fault, Path(once) if once else None, step
        self.here = int(os.environ.get("RANK", "0")) == rank
        folder = Path(pids)
        folder.mkdir(exist_ok=True)
        (folder / str(os.getpid())).touch()

    def step(self, actions: Any) -> Any:
        self.left -= 1
        if self.left == 0 and self.here and not (self.once and self.once.exists()):
            if self.once:
                self.once.touch()
            self.fail()
        return super().step(actions)

    def fail(self) -> None:
        if self.fault == "raise":
            raise ValueError("the pole broke")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            time.sleep(10**6)


class NonFinite(SyncVectorEnv):
    """CartPole with a NaN in some steps of its third environment, if it has one (evaluation has two).

    Args:
        num_envs: Environments.
        kind: Where.
        rank: On which rank.
        begin: From which step on, counted from 0.
        end: To which step, exclusive.
    """

    def __init__(
        self, num_envs: int, kind: Literal["observation", "reward"], rank: int, begin: int, end: int
    ) -> None:
        super().__init__([lambda: gym.make("CartPole-v1")] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self.kind, self.steps, self.made = kind, range(begin, end), 0
        self.here = int(os.environ.get("RANK", "0")) == rank and num_envs > 2

    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        if self.made in self.steps and self.here:
            (observations if self.kind == "observation" else rewards)[2] = np.nan
        self.made += 1
        return observations, rewards, *rest
