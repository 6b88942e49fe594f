from functools import partial
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium import error, spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from puffer_lightning.envs import EnvironmentFaultError, SharedMemoryVectorEnv
from puffer_lightning.envs.shared_memory.signals import TrainerEnd
from puffer_lightning.errors import ConfigurationError
from tests.envs.shared_memory.conftest import Make
from tests.envs.shared_memory.environments import Counting, Random, Uncloseable

NESTED = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 3, 1), np.uint8),
        "pair": spaces.Tuple((spaces.Discrete(5, start=-2), spaces.MultiBinary((2, 2)))),
        "number": spaces.Box(-1.0, 1.0, (), np.float64),
        "many": spaces.MultiDiscrete([3, 4]),
    }
)
# Gymnasium warns that it is not sure whether a scalar is in its space.
ACTIONS = spaces.Dict({key: space for key, space in NESTED.items() if key != "number"})


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs) or isinstance(ours, np.generic | int | float)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, np.ndarray) and theirs.dtype == object:
        assert ours.shape == theirs.shape
        for one, other in zip(ours.flat, theirs.flat, strict=True):
            assert_same(one, other)
    else:
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype
        np.testing.assert_array_equal(ours, theirs)


def compare(ours: SharedMemoryVectorEnv, serial: SyncVectorEnv, steps: int = 30) -> None:
    assert ours.observation_space == serial.observation_space
    assert ours.action_space == serial.action_space
    assert ours.metadata == serial.metadata
    serial.action_space.seed(2)
    assert_same(ours.reset(seed=11), serial.reset(seed=11))
    endings = 0
    for _ in range(steps):
        actions = serial.action_space.sample()
        one, other = ours.step(actions), serial.step(actions)
        assert_same(one, other)
        ended = other[2] | other[3]
        endings += int(ended.sum())
        if serial.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
            options = {"reset_mask": ended, "level": 3}
            assert_same(ours.reset(options=dict(options)), serial.reset(options=dict(options)))
    assert endings


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_equals_serial_environments_bit_for_bit(mode: AutoresetMode, num_workers: int, make: Make) -> None:
    ours = make(Random, 5, num_workers, autoreset_mode=mode)
    compare(ours, SyncVectorEnv([Random] * 5, autoreset_mode=mode))


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_equals_serial_environments_however_processes_start(context: str, make: Make) -> None:
    ours = make("CartPole-v1", 4, 2, context=context)
    cart_poles = [partial(gym.make, "CartPole-v1")] * 4
    compare(ours, SyncVectorEnv(cart_poles, autoreset_mode=AutoresetMode.SAME_STEP), steps=100)
    assert ours.spec is not None
    assert ours.spec.id == "CartPole-v1"


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_nested_observations_and_actions(mode: AutoresetMode, make: Make) -> None:
    nested = partial(Random, NESTED, ACTIONS)
    compare(make(nested, 3, 2, autoreset_mode=mode), SyncVectorEnv([nested] * 3, autoreset_mode=mode))


@pytest.mark.parametrize("action_space", [spaces.MultiBinary(3), spaces.Box(-1, 1, (2,), np.float32)])
def test_other_actions(action_space: gym.Space[Any], make: Make) -> None:
    kind = partial(Random, None, action_space)
    compare(make(kind, 3, 2), SyncVectorEnv([kind] * 3, autoreset_mode=AutoresetMode.SAME_STEP))


def test_environments_may_differ(make: Make) -> None:
    env = make([partial(Counting, number) for number in (7, 8, 9)], num_workers=2)
    observations, _ = env.reset(seed=[1, None, 3])
    assert observations[:, :2].tolist() == [[7, 1], [8, -1], [9, 3]]


def test_arrays_are_views_unless_copies_are_asked_for(make: Make) -> None:
    env, copying = (
        make(Counting, 2, 1, env_kwargs={"number": 0}),
        make(Counting, 2, 1, env_kwargs={"number": 0}, copy=True),
    )
    for each, steps in ((env, [2, 2]), (copying, [1, 2])):
        each.reset()
        first, second = each.step(np.zeros(2, int))[0], each.step(np.zeros(2, int))[0]
        assert [first[0, 2], second[0, 2]] == steps


def test_attributes_methods_and_frames(make: Make) -> None:
    env = make(Random, 3, 2)
    env.reset(seed=4)
    assert env.call("shout", "a", times=2) == ("AA",) * 3
    env.set_attr("scale", [1.0, 2.0, 3.0])
    assert env.get_attr("scale") == (1.0, 2.0, 3.0)
    env.set_attr("scale", 5.0)
    assert env.get_attr("scale") == (5.0,) * 3
    assert env.get_attr("np_random_seed") == (4, 5, 6)
    assert env.render_mode == "rgb_array"
    assert [frame[0, 0, 0] for frame in env.render()] == [4, 5, 6]
    with pytest.raises(ValueError, match="2 values for 3"):
        env.set_attr("scale", [1.0, 2.0])
    with pytest.raises(EnvironmentFaultError, match=r"environment 0 .*seed 4.*absent"):
        env.get_attr("absent")
    assert env.get_attr("scale") == (5.0,) * 3


def test_seeds_and_masks_are_checked(make: Make) -> None:
    env = make(Random, 3, 2, autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ValueError, match="2 seeds for 3"):
        env.reset(seed=[1, 2])
    for mask in ([True, True, True], np.ones(2, bool), np.ones(3, int), np.zeros(3, bool)):
        with pytest.raises(ValueError, match="reset_mask"):
            env.reset(options={"reset_mask": mask})


@pytest.mark.parametrize("actions", [np.zeros(2, int), np.zeros((3, 1), int), np.zeros(3), 0])
def test_actions_that_do_not_fit_are_refused(actions: Any, make: Make) -> None:
    env = make(Random, 3, 2)
    env.reset()
    with pytest.raises(ValueError, match="actions of shape"):
        env.step(actions)
    env.step(np.zeros(3, np.int32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 5}, "num_workers is 5"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"num_envs": 0}, "num_envs is 0"),
        ({"num_workers": 2, "batch_size": 3}, "batch_size is 3"),
        ({"num_workers": 3, "batch_size": 2}, "batch_size is 2"),
        ({"on_fault": "ignore"}, "on_fault is 'ignore'"),
        ({"on_non_finite": "ignore"}, "on_non_finite is 'ignore'"),
        ({"context": "thread"}, "context is 'thread'"),
        ({"step_timeout": 0}, "step_timeout is 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SharedMemoryVectorEnv(Random, **{"num_envs": 4, **options})


def test_sequences_are_checked() -> None:
    for arguments, message in (
        ({"env": [Random], "num_envs": 2}, "num_envs is 2 for 1"),
        ({"env": [Random], "env_kwargs": {"a": 1}}, "env_kwargs"),
        ({"env": []}, "empty"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            SharedMemoryVectorEnv(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "space", [spaces.Text(3), spaces.Sequence(spaces.Discrete(2)), spaces.Graph(spaces.Discrete(2), None)]
)
def test_spaces_of_no_fixed_size_are_refused_by_name(space: gym.Space[Any]) -> None:
    kind = partial(Random, spaces.Dict({"a": spaces.Tuple((space,))}))
    with pytest.raises(ConfigurationError, match=f"observation space.*{type(space).__name__}"):
        SharedMemoryVectorEnv(kind, 2)


def test_closing_ends_the_processes_and_all_else(make: Make) -> None:
    env = make(Counting, 2, 2, env_kwargs={"number": 0})
    processes = [worker.process for worker in env._supervisor.workers]
    assert all(process.is_alive() for process in processes)
    env.close()
    env.close()
    assert not any(worker.alive for worker in env._supervisor.workers)
    for use in (env.reset, env.render, env.recv, partial(env.step, np.zeros(2, int))):
        with pytest.raises(error.ClosedEnvironmentError):
            use()


def test_closing_ends_though_an_environment_does_not_close(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("puffer_lightning.envs.shared_memory.supervisor._CLOSE_SECONDS", 0.2)
    env = make(Uncloseable, 1, 1, env_kwargs={"number": 0})
    env.close()
    assert not env._supervisor.workers[0].alive


def test_closing_that_is_interrupted_ends_the_processes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make(Counting, 2, 2, env_kwargs={"number": 0})
    processes = [worker.process.pid for worker in env._supervisor.workers]
    monkeypatch.setattr(TrainerEnd, "tell", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        env.close()
    # Else they would go on to write where the next environments are, which are given the same memory.
    assert not any(psutil.pid_exists(process) for process in processes)


def test_an_environment_without_float_observations(make: Make) -> None:
    kind = partial(Random, spaces.Tuple(()))
    compare(make(kind, 2, 2), SyncVectorEnv([kind] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
