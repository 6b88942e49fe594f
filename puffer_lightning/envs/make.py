"""From what a user names to a vector environment."""

import difflib
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from gymnasium import error
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from puffer_lightning.errors import ConfigurationError

EnvSource = str | Callable[[int], VectorEnv]
"""A gymnasium id, or anything that makes a vector environment of as many environments as it is told."""


def check_env(env: EnvSource) -> None:
    """Refuse an id that gymnasium does not know, without making the environment.

    Args:
        env: A gymnasium id (``module:Name-v0`` imports the module first) or a factory.

    Raises:
        ConfigurationError: No such id; the message suggests the closest.
    """
    if isinstance(env, str):
        _find_spec(env)


def make_vector_env(
    env: EnvSource,
    num_envs: int,
    env_kwargs: dict[str, Any] | None = None,
    render_mode: str | None = None,
) -> VectorEnv[Any, Any, Any]:
    """Make ``num_envs`` environments that step together.

    Where gymnasium has a vectorised implementation of the environment, it is used (unless frames are wanted,
    which not all of them draw); otherwise the environments are stepped one after the other.

    Args:
        env: A gymnasium id or a factory.
        num_envs: N.
        env_kwargs: Arguments of the environment, for an id.
        render_mode: ``"rgb_array"`` for frames from ``render()``.

    Raises:
        ConfigurationError: The environment cannot be made; the message says what is missing.
    """
    if not isinstance(env, str):
        return env(num_envs)
    spec = _find_spec(env)
    kwargs = dict(env_kwargs or {})
    if render_mode is not None:
        kwargs["render_mode"] = render_mode
    vectorized = spec.vector_entry_point is not None and not (render_mode and spec.entry_point)
    try:
        if vectorized:
            return gym.make_vec(env, num_envs, vectorization_mode="vector_entry_point", **kwargs)
        return gym.make_vec(
            env,
            num_envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
            **kwargs,
        )
    except error.DependencyNotInstalled as problem:
        raise ConfigurationError(f"env {env} needs a package that is not installed: {problem}") from problem
    except TypeError as problem:
        raise ConfigurationError(f"env_kwargs {env_kwargs} do not fit env {env}: {problem}.") from problem


def _find_spec(env: str) -> EnvSpec:
    module, _, name = env.rpartition(":")
    try:
        if module:
            __import__(module)
        return gym.spec(name)
    except ImportError as problem:
        raise ConfigurationError(
            f"env {env}: the module {module} cannot be imported ({problem})."
        ) from problem
    except error.Error:
        known = sorted(gym.registry)
        closest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(closest)}?" if closest else "see gymnasium.pprint_registry()."
        raise ConfigurationError(f"env {env} is not a registered gymnasium id: {hint}") from None
