from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from puffer_lightning import PPO, RolloutDataModule
from puffer_lightning.envs import SharedMemoryVectorEnv, make_vector_env
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.rollout import Rollout


def rollouts(num_workers: int) -> list[Rollout]:
    torch.manual_seed(3)
    data = RolloutDataModule("Acrobot-v1", num_envs=5, horizon=40, num_workers=num_workers)
    model = PPO()
    model.build(data)
    try:
        return [data.collect(model.policy) for _ in range(2)][-1:]
    finally:
        data.close()


def test_rollouts_do_not_depend_on_the_number_of_workers() -> None:
    serial, *others = (rollouts(num_workers)[0] for num_workers in (0, 1, 2))
    for other in others:
        for name in ("observations", "actions", "rewards", "terminated", "truncated", "valid", "next_values"):
            assert torch.equal(getattr(serial, name), getattr(other, name)), name


def test_workers_step_what_is_not_vectorised() -> None:
    env = make_vector_env("Acrobot-v1", 2, render_mode="rgb_array", num_workers=4)
    try:
        assert isinstance(env, SharedMemoryVectorEnv)
        assert env.render_mode == "rgb_array"
        assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        env.reset(seed=1)
        assert env.step(np.zeros(2, int))[1].tolist() == [-1.0, -1.0]
    finally:
        env.close()


def test_a_vectorised_implementation_needs_no_workers() -> None:
    env = make_vector_env("CartPole-v1", 2, num_workers=2)
    assert not isinstance(env, SharedMemoryVectorEnv)


def test_a_factory_has_its_own_workers() -> None:
    with pytest.raises(ConfigurationError, match=r"num_workers is 2 .*makes its own"):
        make_vector_env(partial(SyncVectorEnv, []), 2, num_workers=2)


@pytest.mark.parametrize("num_workers", [-1, 0.5])
def test_the_number_of_workers_is_checked(num_workers: int) -> None:
    with pytest.raises(ConfigurationError, match=f"num_workers is {num_workers}"):
        RolloutDataModule(num_workers=num_workers)


def test_bad_arguments_are_told_as_without_workers() -> None:
    with pytest.raises(ConfigurationError, match="do not fit env Acrobot-v1"):
        make_vector_env("Acrobot-v1", 2, {"length": 3}, num_workers=1)
