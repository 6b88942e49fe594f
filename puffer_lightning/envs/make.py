"""From what a user names to a vector environment."""

import difflib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium as gym
from gymnasium import error
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from puffer_lightning.envs.pettingzoo import find_parallel_env, make_pettingzoo_env
from puffer_lightning.envs.shared_memory import SharedMemoryVectorEnv, WorkerOptions
from puffer_lightning.errors import ConfigurationError

EnvFactory = Callable[..., VectorEnv]
"""Anything that makes a vector environment of as many environments as its first argument says."""

EnvSource = str | EnvFactory
"""A gymnasium id (``module:Name-v0`` imports the module first), a factory, or the dotted path of a factory or
of a PettingZoo environment's module."""

EnvWrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]
"""Makes of one environment another, as the classes of ``gymnasium.wrappers`` do."""

# What takes the place of a package's own vector environment.
_ADAPTERS = {"ale_py.vector_env:AtariVectorEnv": "puffer_lightning.envs.atari:Atari"}

# What finds the environments of packages that do not register them with gymnasium.
_FINDERS = {"envpool": "puffer_lightning.envs.envpool:find"}

# The extra that installs a package, by a word of the complaint that it is missing.
_EXTRAS = {
    "ale_py": "atari",
    "box2d": "box2d",
    "envpool": "envpool",
    "minigrid": "minigrid",
    "mpe2": "pettingzoo",
    "mujoco": "mujoco",
    "pettingzoo": "pettingzoo",
}


_CORRECT_PATH = "correct it, or add the module's folder to PYTHONPATH."


def check_env(env: EnvSource) -> None:
    """Refuse a name that stands for nothing, without making the environment.

    Args:
        env: A gymnasium id, a factory or its dotted path.

    Raises:
        ConfigurationError: There is no such thing; the message suggests the closest.
    """
    _find(env)


def make_vector_env(
    env: EnvSource,
    num_envs: int,
    env_kwargs: dict[str, Any] | None = None,
    render_mode: str | None = None,
    num_workers: int = 0,
    worker_options: WorkerOptions | None = None,
    batch_size: int | None = None,
    wrappers: Sequence[EnvWrapper] = (),
) -> VectorEnv[Any, Any, Any]:
    """Make ``num_envs`` environments that step together.

    Where gymnasium has a vectorised implementation of the environment, it is used, unless frames are wanted,
    which not all of them draw, or the environments are to be wrapped; otherwise the environments are stepped
    one after the other, or in worker processes.

    Args:
        env: A gymnasium id, a factory or its dotted path.
        num_envs: N.
        env_kwargs: Arguments of the environment, or of the factory after its first.
        render_mode: ``"rgb_array"`` for frames from ``render()``; a factory is told if it takes it.
        num_workers: Processes that step what gymnasium has not vectorised, see ``SharedMemoryVectorEnv``; at
            most one an environment, and 0 for none but this.
        worker_options: Further options of them.
        batch_size: How many environments worker processes hand over at a time, if not all; a factory is told
            if it takes it.
        wrappers: Applied to each environment, the first one innermost; not with a factory.

    Raises:
        ConfigurationError: The environment cannot be made; the message says what is missing.
    """
    found, kwargs = _find(env), dict(env_kwargs or {})
    if isinstance(found, EnvSpec):
        workers = {
            **(worker_options or {}),
            "num_workers": min(num_workers, num_envs),
            "batch_size": batch_size,
        }
        return _make_registered(found, str(env), num_envs, kwargs, render_mode, workers, wrappers)
    if wrappers:
        raise ConfigurationError(
            f"wrappers go around single environments but env {env} makes its own vector environment: leave "
            "them out, and let env apply them."
        )
    if num_workers:
        raise ConfigurationError(
            f"num_workers is {num_workers} but env {env} makes its own vector environment: leave it 0 (a "
            "function of yours can make a puffer_lightning.envs.SharedMemoryVectorEnv)."
        )
    told = {"render_mode": render_mode, "batch_size": kwargs.get("batch_size", batch_size)}
    return _call(found, env, num_envs, kwargs, told)


def _make_registered(
    spec: EnvSpec,
    env: str,
    num_envs: int,
    kwargs: dict[str, Any],
    render_mode: str | None,
    workers: dict[str, Any],
    wrappers: Sequence[EnvWrapper],
) -> VectorEnv[Any, Any, Any]:
    if wrappers and spec.entry_point is None:
        raise ConfigurationError(
            f"wrappers go around single environments but env {env} is many at once: leave them out."
        )
    adapted = spec.vector_entry_point in _ADAPTERS
    draws = adapted or spec.entry_point is None or render_mode is None
    options: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    try:
        if spec.vector_entry_point is not None and draws and not wrappers:
            if adapted:
                spec = copy(spec)
                spec.vector_entry_point = _ADAPTERS[str(spec.vector_entry_point)]
            return gym.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **(kwargs | options))
        # The spec, not the id: worker processes may not have imported what registered it.
        make_one = partial(_make_one, spec, kwargs | options, wrappers)
        if workers["num_workers"]:
            return SharedMemoryVectorEnv(make_one, num_envs, **workers)
        return SyncVectorEnv([make_one] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    except error.DependencyNotInstalled as problem:
        how = _how_to_install(str(problem)) or str(problem)
        raise ConfigurationError(f"env {env} needs a package that is not installed: {how}") from problem
    except TypeError as problem:
        if not kwargs:
            raise
        raise ConfigurationError(f"env_kwargs {kwargs} do not fit env {env}: {problem}.") from problem


def _make_one(spec: EnvSpec, kwargs: dict[str, Any], wrappers: Sequence[EnvWrapper]) -> gym.Env[Any, Any]:
    env = gym.make(spec, **kwargs)
    try:
        for wrapper in wrappers:
            env = wrapper(env)
    except Exception as problem:
        raise ConfigurationError(f"wrappers do not fit env {spec.id}: {problem}") from problem
    if not isinstance(env, gym.Env):
        raise ConfigurationError(
            f"wrappers made a {type(env).__name__} of env {spec.id}: let each of them return a gymnasium.Env."
        )
    return env


def _how_to_install(complaint: str) -> str | None:
    """The command that installs the package which is complained about, if it is of an extra of ours."""
    extra = next((extra for word, extra in _EXTRAS.items() if word in complaint.lower()), None)
    return extra and f'pip install "puffer-lightning[{extra}]".'


def _call(
    factory: EnvFactory, env: EnvSource, num_envs: int, kwargs: dict[str, Any], told: dict[str, Any]
) -> VectorEnv[Any, Any, Any]:
    name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    parameters = inspect.signature(factory).parameters
    kwargs |= {key: value for key, value in told.items() if value is not None and key in parameters}
    try:
        made = factory(num_envs, **kwargs)
    except TypeError as problem:
        if problem.__traceback__ and problem.__traceback__.tb_next:
            raise  # from inside the factory, not from calling it
        raise ConfigurationError(
            f"env_kwargs {kwargs} do not fit env {name}, whose first argument is the number of environments: "
            f"{problem}."
        ) from problem
    if not isinstance(made, VectorEnv):
        raise ConfigurationError(
            f"env {name} made a {type(made).__name__}: let it make a gymnasium.vector.VectorEnv, such as "
            "SyncVectorEnv, of as many environments as its first argument says."
        )
    return made


def _find(env: EnvSource) -> EnvSpec | EnvFactory:
    if not isinstance(env, str):
        return env
    module, _, name = env.rpartition(":")
    try:
        if module:
            __import__(module)
        if module in _FINDERS:
            finder: Callable[[str], EnvFactory] = pkgutil.resolve_name(_FINDERS[module])
            return finder(name)
        return gym.spec(name)
    except ImportError as problem:
        missing = isinstance(problem, ModuleNotFoundError) and problem.name == module
        how = missing and _how_to_install(module)
        raise ConfigurationError(
            f"env {env}: the module {module} cannot be imported ({problem}): "
            f"{how or 'install it, or add its folder to PYTHONPATH.'}"
        ) from problem
    except error.Error:
        parts = name.split(".")
        if not module and len(parts) > 1 and all(part.isidentifier() for part in parts):
            return _import_factory(name)
        closest = difflib.get_close_matches(name, sorted(gym.registry), n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(closest)}?"
            if closest
            else "see gymnasium.pprint_registry(), and name one of another package as module:id."
        )
        raise ConfigurationError(f"env {env} is not a registered gymnasium id: {hint}") from None


def _import_factory(path: str) -> EnvFactory:
    try:
        factory = pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as problem:
        missing = isinstance(problem, ModuleNotFoundError) and _how_to_install(problem.name or "")
        raise ConfigurationError(
            f"env {path} is neither a gymnasium id nor something that can be imported ({problem}): "
            f"{missing or _CORRECT_PATH}"
        ) from problem
    if isinstance(factory, ModuleType):
        find_parallel_env(path)
        return partial(make_pettingzoo_env, env=path)
    if not callable(factory):
        raise ConfigurationError(
            f"env {path} is a {type(factory).__name__}: name a class or function that makes a "
            "gymnasium.vector.VectorEnv."
        )
    made: EnvFactory = factory
    return made
