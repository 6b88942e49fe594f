"""Environments go on from their saved states as if nothing had happened."""

from collections import deque
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from torch.utils._pytree import tree_leaves

from puffer_lightning.envs import SharedMemoryVectorEnv, make_vector_env
from puffer_lightning.envs.state import NoStateError, PlainState, get_state, pack, set_state, unpack

NUM_ENVS, BEFORE, AFTER = 4, 30, 120


def short(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return TimeLimit(env, 20)


def stacked(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return FrameStackObservation(env, 3)


class Walk(PlainState, gym.Env[Any, Any]):
    """A random walk; its attributes are its state."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.path: deque[float] = deque(maxlen=5)
        self.step_size = lambda: 0.5
        self.visited: dict[str, Any] = {"last": (0, np.float32(0.5)), "all": {1, 2}}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.path.append(self.np_random.normal())
        return np.array([sum(self.path)]), {}

    def step(self, action: Any) -> Any:
        self.path.append(self.path[-1] + self.step_size() * self.np_random.normal())
        return np.array([sum(self.path)]), 0.0, False, bool(self.np_random.random() < 0.1), {}


class Window:
    """Something that is not data."""


class Drawn(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.window = Window()


def in_turn(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([Walk] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def in_workers(num_envs: int) -> SharedMemoryVectorEnv:
    return SharedMemoryVectorEnv(
        Walk, num_envs, num_workers=2, autoreset_mode=AutoresetMode.NEXT_STEP, context="fork"
    )


KINDS: dict[str, dict[str, Any]] = {
    **{name: {"env": name} for name in ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0")},
    **{name: {"env": name} for name in ("MountainCarContinuous-v0", "FrozenLake-v1", "Blackjack-v1")},
    **{name: {"env": f"puffer/{name}-v0"} for name in ("Squared", "TorchBreakout", "TorchMemoryMaze")},
    "cut off": {"env": "CartPole-v1", "env_kwargs": {"max_episode_steps": 8}},
    "wrapped": {"env": "CartPole-v1", "wrappers": [short, stacked]},
    "workers": {"env": "Acrobot-v1", "num_workers": 2, "worker_options": {"context": "fork"}},
    "one's own": {"env": in_turn},
    "one's own in workers": {"env": in_workers},
}


def play(env: VectorEnv[Any, Any, Any], steps: int) -> list[Any]:
    """Everything that the environments return to actions that depend on what was played alone."""
    env.action_space.seed(steps)
    seen: list[Any] = []
    for _ in range(steps):
        actions = env.action_space.sample()
        returned = env.step(torch.as_tensor(actions) if hasattr(env, "device") else actions)
        seen += [torch.as_tensor(leaf).numpy().copy() for leaf in tree_leaves(returned[:4])]
    return seen


def through_a_file(state: Any, folder: Path) -> Any:
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_goes_on_bit_for_bit_in_another_instance(options: dict[str, Any], tmp_path: Path) -> None:
    one, other = (make_vector_env(num_envs=NUM_ENVS, **options) for _ in range(2))
    one.reset(seed=1)
    play(one, BEFORE)
    state = through_a_file(get_state(one), tmp_path)
    expected = play(one, AFTER)
    other.reset(seed=7)
    play(other, 3)
    for _ in range(2):  # The state is not used up.
        set_state(other, state)
        for here, there in zip(play(other, AFTER), expected, strict=True):
            np.testing.assert_array_equal(here, there)
    one.close()
    other.close()


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_there_is_a_row_for_each_environment(options: dict[str, Any]) -> None:
    """Of all but the generator, so that they can be dealt out to other ranks."""
    env = make_vector_env(num_envs=NUM_ENVS, **options)
    env.reset(seed=1)
    state = get_state(env)
    assert state["rows"]
    assert state["rest"].keys() <= {"generator"}
    env.close()


def test_what_is_missing_stays_as_it_is() -> None:
    one, other = (make_vector_env("puffer/TorchCartPole-v0", NUM_ENVS) for _ in range(2))
    one.reset(seed=1)
    other.reset(seed=2)
    state = get_state(one)
    set_state(other, {**state, "rest": {}})
    mixed = get_state(other)
    assert torch.equal(mixed["rows"]["physics"], state["rows"]["physics"])
    assert not torch.equal(mixed["rest"]["generator"], state["rest"]["generator"])


@pytest.mark.parametrize("name", ["LunarLander-v3", "ale_py:ALE/Pong-v5", "Hopper-v5"])
def test_environments_that_offer_no_state_are_named(name: str) -> None:
    env = make_vector_env(name, 2)
    env.reset(seed=1)
    with pytest.raises(NoStateError, match=r"(LunarLander|Atari|HopperEnv) has no get_state and set_state"):
        get_state(env)
    env.close()


@pytest.mark.parametrize("workers", [False, True])
def test_an_attribute_that_is_no_data_is_named(workers: bool) -> None:
    env: Any = (
        SharedMemoryVectorEnv(Drawn, 2, num_workers=2, context="fork")
        if workers
        else SyncVectorEnv([Drawn] * 2)
    )
    env.reset(seed=1)
    with pytest.raises(NoStateError, match=r"Drawn\.window cannot be saved: it holds a Window"):
        get_state(env)
    env.step(env.action_space.sample())
    env.close()


def test_states_of_other_environments_are_refused() -> None:
    acrobot, wrapped, pole = (
        make_vector_env("Acrobot-v1", 2),
        make_vector_env("Acrobot-v1", 2, wrappers=[short]),
        make_vector_env("CartPole-v1", 2),
    )
    for env in (acrobot, wrapped, pole):
        env.reset(seed=1)
    with pytest.raises(
        NoStateError, match=r"environments are TimeLimit/TimeLimit/.*AcrobotEnv, not TimeLimit/O"
    ):
        set_state(acrobot, get_state(wrapped))
    with pytest.raises(NoStateError, match="environments are not CartPoleVectorEnv"):
        set_state(pole, get_state(acrobot))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "b", b"c"], 3: (1, (2, 3)), "d": {4, 5}},
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.float64(0.1),
        deque([1, 2], maxlen=3),
        torch.arange(3),
    ],
)
def test_packing_keeps_values_and_types(value: Any, tmp_path: Path) -> None:
    back = unpack(through_a_file(pack(value), tmp_path))
    assert type(back) is type(value)
    if isinstance(value, np.ndarray | torch.Tensor):
        assert back.dtype == value.dtype
        assert back.tolist() == value.tolist()
    else:
        assert back == value


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_packing_keeps_generators(kind: Any, tmp_path: Path) -> None:
    generator = np.random.Generator(kind(3))
    generator.random(5)
    back = unpack(through_a_file(pack(generator), tmp_path))
    assert back.random(5).tolist() == generator.random(5).tolist()
