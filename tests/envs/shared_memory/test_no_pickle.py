"""Steps of worker processes, none of which may pickle anything: neither side, if there is nothing to tell."""

import pickle
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest import mock

import pytest
from gymnasium.vector import AutoresetMode

from puffer_lightning.envs import EnvironmentFaultError
from puffer_lightning.policies import make_policy
from puffer_lightning.rollout import Collector
from tests.envs.shared_memory.conftest import Make
from tests.envs.shared_memory.environments import Counting

HORIZON = 40


class PickledError(Exception):
    """Something was pickled, or unpickled."""


def refuse(*arguments: Any, **options: Any) -> Any:
    raise PickledError


def without_pickle() -> ExitStack:
    stack = ExitStack()
    for owner, name in (
        (pickle, "dumps"),
        (pickle, "loads"),
        (pickle, "Pickler"),
        (pickle, "Unpickler"),
        (ForkingPickler, "dumps"),
        (Connection, "send"),
        (Connection, "recv"),
    ):
        stack.enter_context(mock.patch.object(owner, name, refuse))
    return stack


class Without(Counting):
    """Its process cannot pickle from its first step on until its last; episodes of seven steps."""

    def __init__(self, number: int, talks: bool) -> None:
        super().__init__(number)
        self.talks = talks

    def step(self, action: Any) -> Any:
        if self.number == 0 and self.total == 0:
            self.stack = without_pickle()
        observation, reward, *_ = super().step(action)
        if self.number == 0 and self.total == HORIZON:
            self.stack.close()
        info = {"told": 1} if self.talks and self.total == HORIZON // 2 else {}
        return observation, reward, self.steps == 7, False, info


def collect(make: Make, mode: AutoresetMode, talks: bool = False) -> int:
    """The steps that the workers made for a rollout."""
    env = make([partial(Without, number, talks) for number in range(4)], num_workers=2, autoreset_mode=mode)
    policy = make_policy(env.single_observation_space, env.single_action_space)
    collector = Collector(env, HORIZON)
    with without_pickle():
        rollout = collector.collect(policy)
    return int(rollout.valid.sum())


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_steps_without_infos_pickle_nothing(make: Make, mode: AutoresetMode) -> None:
    resets = 0 if mode is AutoresetMode.SAME_STEP else HORIZON // 8
    assert collect(make, mode) == 4 * (HORIZON - resets)


def test_infos_are_pickled_so_that_this_would_notice(make: Make) -> None:
    with pytest.raises((EnvironmentFaultError, PickledError)):
        collect(make, AutoresetMode.SAME_STEP, talks=True)
