import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FilterObservation, FrameStackObservation, TimeLimit

from puffer_lightning.envs import EnvSource, check_env, make_vector_env
from puffer_lightning.errors import ConfigurationError

FACTORIES = """
import gymnasium as gym
from gymnasium.vector import SyncVectorEnv


def make(num_envs, length=50):
    return SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=length)] * num_envs)


class Poles:
    @staticmethod
    def make(num_envs):
        return make(num_envs)


def one(num_envs):
    return gym.make("CartPole-v1")


def breaks(num_envs, length=50):
    return num_envs + "!"


gym.register("Imported-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
number = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("factories", None)
    gym.registry.pop("Imported-v0", None)


def local(num_envs: int, length: int = 50) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([lambda: gym.make("CartPole-v1", max_episode_steps=length)] * num_envs)


def name_of(value: object) -> str:
    """Without addresses, which differ from process to process."""
    function = value.func if isinstance(value, partial) else value
    return getattr(function, "__name__", str(value))


def longest_episode(env: VectorEnv[Any, Any, Any]) -> int:
    """Steps until the first environment's time is up, balancing the pole by hand."""
    observations, _ = env.reset(seed=0)
    for step in range(1, 100):
        actions = (observations[:, 2] + 0.5 * observations[:, 3] > 0).astype(np.int64)
        observations, _, terminated, truncated, _ = env.step(actions)
        assert not terminated[0]
        if truncated[0]:
            return step
    raise AssertionError("no episode ended")


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        "Acrobot-v1",
        "factories:Imported-v0",
        "factories.make",
        "factories.Poles.make",
        "gymnasium.envs.classic_control.cartpole.CartPoleVectorEnv",
        CartPoleVectorEnv,
        local,
        partial(local, length=9),
    ],
    ids=name_of,
)
def test_makes_as_many_as_asked_for(env: EnvSource) -> None:
    check_env(env)
    made = make_vector_env(env, 3)
    assert isinstance(made, VectorEnv)
    assert made.num_envs == 3
    assert made.reset(seed=0)[0] in made.observation_space
    made.close()


def test_prefers_the_vectorised_implementation() -> None:
    assert isinstance(make_vector_env("CartPole-v1", 2).unwrapped, CartPoleVectorEnv)
    one_by_one = make_vector_env("Acrobot-v1", 2)
    assert isinstance(one_by_one.unwrapped, SyncVectorEnv)
    assert one_by_one.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [
        ("CartPole-v1", {"max_episode_steps": 7}),
        ("factories.make", {"length": 7}),
        (local, {"length": 7}),
        (CartPoleVectorEnv, {"max_episode_steps": 7}),
    ],
    ids=name_of,
)
def test_arguments_reach_the_environment(env: EnvSource, kwargs: dict[str, Any]) -> None:
    assert longest_episode(make_vector_env(env, 2, kwargs)) == 7
    assert kwargs in ({"max_episode_steps": 7}, {"length": 7}), "left as they were"


@pytest.mark.parametrize("env", ["CartPole-v1", CartPoleVectorEnv], ids=str)
def test_draws_frames_if_asked_to(env: EnvSource) -> None:
    made = make_vector_env(env, 1, render_mode="rgb_array")
    made.reset(seed=0)
    frames = made.render()
    assert isinstance(frames, tuple | list)
    assert np.ndim(frames[0]) == 3
    made.close()


def test_a_factory_that_draws_nothing_is_not_told_to() -> None:
    assert make_vector_env("factories.make", 1, render_mode="rgb_array").num_envs == 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("CartPol-v1", "did you mean CartPole-v1"),
        ("CartPole-v7", "did you mean CartPole-v1"),
        ("CartPole", "did you mean CartPole-v1"),
        ("puffer/ImageTraget-v0", "puffer/ImageTarget-v0"),
        ("Zzzzzzzzzz-v0", "module:id"),
        ("nowhere:CartPole-v1", "nowhere cannot be imported.*PYTHONPATH"),
        ("factories.mke", "no attribute 'mke'.*PYTHONPATH"),
        ("nowhere.make", "No module named 'nowhere'.*PYTHONPATH"),
        ("factories.number", "is a int: name a class or function"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_made(name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"env {name}.*{hint}"):
        check_env(name)


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [
        ("CartPole-v1", {"wind": 1}),
        ("Acrobot-v1", {"wind": 1}),
        ("factories.make", {"wind": 1}),
        (CartPoleVectorEnv, {"wind": 1}),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_named(env: EnvSource, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"env_kwargs \{'wind': 1\} do not fit.*'wind'"):
        make_vector_env(env, 2, kwargs)


def test_what_makes_no_vector_environment_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"factories\.one made a \w+: let it make a gymnasium\.vector"
    ):
        make_vector_env("factories.one", 2)


def test_an_error_inside_a_factory_is_its_own() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        make_vector_env("factories.breaks", 2, {"length": 3})


@pytest.mark.parametrize(
    ("env", "imported_by", "package", "extra"),
    [
        ("LunarLander-v3", "gymnasium.envs.box2d", "Box2D", "box2d"),
        ("Hopper-v5", "gymnasium.envs.mujoco", "mujoco", "mujoco"),
        ("ale_py:ALE/Pong-v5", "ale_py", "ale_py", "atari"),
        ("envpool:CartPole-v1", "envpool", "envpool", "envpool"),
        ("minigrid:MiniGrid-Empty-8x8-v0", "minigrid", "minigrid", "minigrid"),
    ],
)
def test_a_missing_package_is_named_by_our_extra(
    env: str, imported_by: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith((imported_by, f"{package}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf'env {env}.*pip install "puffer-lightning\[{extra}\]"'):
        make_vector_env(env, 1)


def stacked(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return FrameStackObservation(env, 3)


def short(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return TimeLimit(env, 5)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("env", ["CartPole-v1", "Acrobot-v1"])
def test_wrappers_go_around_each_environment(env: str, num_workers: int) -> None:
    made = make_vector_env(env, 2, num_workers=num_workers, wrappers=[short, stacked])
    try:
        alone, _ = gym.make(env).reset(seed=4)
        observations, _ = made.reset(seed=3)
        assert observations in made.observation_space
        assert observations.shape == (2, 3, *alone.shape)
        assert np.array_equal(observations[1], np.stack([alone] * 3))
        for step in range(1, 6):
            *_, truncated, _ = made.step(np.full(2, step % 2))
            assert truncated.tolist() == [step == 5] * 2
    finally:
        made.close()


def test_wrapped_environments_draw_frames() -> None:
    made = make_vector_env("CartPole-v1", 1, render_mode="rgb_array", wrappers=[stacked])
    made.reset(seed=0)
    [frame] = made.render() or ()
    assert frame.shape == (400, 600, 3)
    made.close()


@pytest.mark.parametrize(
    ("env", "wrappers", "message"),
    [
        (
            "CartPole-v1",
            [partial(FilterObservation, filter_keys=["a"])],
            "wrappers do not fit env CartPole-v1:",
        ),
        ("CartPole-v1", [lambda env: 3], "wrappers made a int of env CartPole-v1: let each of them return"),
        ("puffer/TorchCartPole-v0", [stacked], "env puffer/TorchCartPole-v0 is many at once: leave them out"),
        (local, [stacked], "makes its own vector environment: leave them out, and let env apply them"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_wrappers_that_do_not_fit_are_refused(
    env: EnvSource, wrappers: Any, message: str, num_workers: int
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_vector_env(env, 2, num_workers=num_workers, wrappers=wrappers)
