"""Environments that fail on one of several ranks, once there was time to get going."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
from gymnasium.vector import SyncVectorEnv

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
