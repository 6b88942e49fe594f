"""What users hand to ``SharedMemoryVectorEnv``, checked."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from puffer_lightning.errors import ConfigurationError

EnvFn = Callable[[], gym.Env[Any, Any]]


class WorkerOptions(TypedDict, total=False):
    """What may be said of worker processes in a configuration; see ``SharedMemoryVectorEnv`` for each."""

    context: Literal["forkserver", "spawn", "fork"]
    step_timeout: float
    on_fault: Literal["raise", "restart"]
    on_non_finite: Literal["raise", "mask"]
    max_faults: int


def environment_functions(
    env: str | EnvFn | Sequence[EnvFn], num_envs: int | None, env_kwargs: dict[str, Any] | None
) -> list[EnvFn]:
    """One function for each environment.

    Args:
        env: Gymnasium id, function that makes one environment, or N of these.
        num_envs: N, unless ``env`` says so.
        env_kwargs: Arguments of the environment.

    Raises:
        ConfigurationError: The arguments contradict each other.
    """
    if not isinstance(env, str) and not callable(env):
        if num_envs not in (None, len(env)):
            raise ConfigurationError(f"num_envs is {num_envs} for {len(env)} environments: leave it out.")
        if env_kwargs:
            raise ConfigurationError("env_kwargs do not go with a sequence: let its functions apply them.")
        if not env:
            raise ConfigurationError("env is empty: give at least one function that makes an environment.")
        return list(env)
    if num_envs is None or num_envs < 1:
        raise ConfigurationError(f"num_envs is {num_envs}: set it to a whole number, 1 or more.")
    if isinstance(env, str):
        module, _, name = env.rpartition(":")
        if module:
            __import__(module)
        # The spec, not the id: the workers may not have imported what registered it.
        return [partial(gym.make, gym.spec(name), **(env_kwargs or {}))] * num_envs
    return [partial(env, **(env_kwargs or {}))] * num_envs


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divide(num_envs: int, num_workers: int, batch_size: int | None) -> list[range]:
    """Deal the environments out to the workers: runs of equal length, or shorter by one in the end.

    Raises:
        ConfigurationError: A worker would have none, or a batch cannot be of whole workers.
    """
    if not 1 <= num_workers <= num_envs:
        raise ConfigurationError(
            f"num_workers is {num_workers}: set it to 1 or more, at most num_envs={num_envs}."
        )
    size, more = divmod(num_envs, num_workers)
    if batch_size is not None and (more or batch_size % size or not 1 <= batch_size <= num_envs):
        raise ConfigurationError(
            f"batch_size is {batch_size} with num_envs={num_envs} and num_workers={num_workers}: let "
            "num_workers divide num_envs, and set batch_size to a multiple of one worker's environments."
        )
    starts = [worker * size + min(worker, more) for worker in range(num_workers + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def seeds_of(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """A seed for each environment, as gymnasium deals them out.

    Raises:
        ValueError: It is a sequence of another length.
    """
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + row for row in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(f"got {len(seed)} seeds for {num_envs} environments")
    return list(seed)


def next_seed(seed: int | None, row: int, attempt: int) -> int:
    """The seed of an environment that stands in for a lost one: another one, but the same in the next run."""
    entropy = np.random.SeedSequence() if seed is None else np.random.SeedSequence((seed, row, attempt))
    return int(entropy.generate_state(1)[0])


def split_options(
    options: dict[str, Any] | None, num_envs: int
) -> tuple[dict[str, Any] | None, NDArray[np.bool_] | None]:
    """The options of a reset without gymnasium's ``reset_mask``, and the mask.

    Raises:
        ValueError: The mask is not [N] bool, or selects nothing.
    """
    if options is None or "reset_mask" not in options:
        return options, None
    mask = options["reset_mask"]
    if (
        not isinstance(mask, np.ndarray)
        or mask.shape != (num_envs,)
        or mask.dtype != np.bool_
        or not mask.any()
    ):
        raise ValueError(f"reset_mask must be a bool array of {num_envs}, not all False; it is {mask!r}")
    return {key: value for key, value in options.items() if key != "reset_mask"}, mask


def assign(target: NDArray[Any], rows: Any, values: Any) -> None:
    """Write rows of an array, without broadcasting, or casting to another kind of number.

    Raises:
        ValueError: Shape or dtype do not fit.
    """
    values = np.asarray(values)
    shape = (len(target) if isinstance(rows, slice) else len(rows), *target.shape[1:])
    if values.shape != shape or not np.can_cast(values.dtype, target.dtype, "same_kind"):
        raise ValueError(
            f"actions of shape {values.shape} and dtype {values.dtype} where {shape} and {target.dtype} are "
            "needed"
        )
    target[rows] = values
