from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from puffer_lightning.policies import Action, make_policy
from puffer_lightning.rollout.buffers import HostBuffers
from puffer_lightning.rollout.stepper import Step

CPU = torch.device("cpu")


def make_buffers(action_space: spaces.Space[Any] | None = None, horizon: int = 4) -> HostBuffers:
    policy = make_policy(spaces.Box(0, 1, (2,), np.float32), action_space or spaces.Discrete(3))
    return HostBuffers(np.zeros((5, 2), np.uint8), policy, horizon, CPU)


@pytest.mark.parametrize(
    ("action_space", "shape", "dtype"),
    [
        (spaces.Discrete(3), (4, 5), torch.int64),
        (spaces.MultiDiscrete([2, 3]), (4, 5, 2), torch.int64),
        (spaces.Box(-1, 1, (3,), np.float32), (4, 5, 3), torch.float32),
    ],
)
def test_shapes_and_dtypes_follow_the_spaces(
    action_space: spaces.Space[Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    rollout = make_buffers(action_space).rollout
    assert rollout.actions.shape == shape
    assert rollout.actions.dtype == dtype
    assert rollout.observations.shape == (4, 5, 2)
    assert rollout.observations.dtype == torch.uint8
    for name in ("log_probs", "values", "next_values", "rewards"):
        assert getattr(rollout, name).shape == (4, 5)
        assert getattr(rollout, name).dtype == torch.float32
    for name in ("terminated", "truncated", "valid"):
        assert getattr(rollout, name).dtype == torch.bool


def test_what_is_written_at_a_step_stands_there_and_nowhere_else() -> None:
    buffers = make_buffers()
    observations = np.full((5, 2), 7, np.uint8)
    seen, noise = buffers.write_observations(2, observations)
    observations[...] = 9
    assert seen.eq(7).all(), "a copy, since environments use their memory again"
    assert noise.shape == (5, 3)
    flags = np.array([True, False, True, False, False])
    buffers.write_action(2, Action(torch.arange(5), torch.full((5,), -1.5), torch.full((5,), 2.5), ()))
    buffers.write_step(2, Step(np.arange(5.0), flags, ~flags, flags, flags))
    buffers.flush()
    rollout = buffers.rollout
    assert rollout.observations[2].eq(7).all()
    assert rollout.actions[2].tolist() == [0, 1, 2, 3, 4]
    assert rollout.log_probs[2].eq(-1.5).all()
    assert rollout.values[2].eq(2.5).all()
    assert rollout.rewards[2].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert rollout.terminated[2].tolist() == flags.tolist()
    assert rollout.truncated[2].tolist() == (~flags).tolist()
    assert rollout.valid[2].tolist() == flags.tolist()
    for name in ("observations", "actions", "log_probs", "rewards", "valid"):
        assert not getattr(rollout, name)[[0, 1, 3]].any(), name


def test_the_noise_of_a_step_is_a_view_of_the_rollouts() -> None:
    buffers = make_buffers()
    buffers.noise[3] = 4.0
    _, noise = buffers.write_observations(3, np.zeros((5, 2), np.uint8))
    assert noise.eq(4.0).all()


def test_host_and_device_are_one_memory_on_the_cpu() -> None:
    buffers = make_buffers()
    host = buffers.flush()
    for name in ("rewards", "terminated", "truncated", "valid"):
        assert host[name] is getattr(buffers.rollout, name)
