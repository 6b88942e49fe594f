"""Where the arrays of a batch of environments lie in shared memory.

The memory is ``multiprocessing``'s own: a file that is unlinked before anything is written to it and that the
workers inherit. So nothing is left behind, however the processes end.
"""

from collections.abc import Callable, Iterator
from ctypes import c_byte
from math import prod
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from puffer_lightning.errors import ConfigurationError

_CACHE_LINE = 64
_WORDS = _CACHE_LINE // 8

Write = Callable[[int, Any], None]


def check_space(space: Space[Any], what: str) -> None:
    """Refuse a space whose values have no fixed size.

    Args:
        space: Of one environment.
        what: How to call it, such as ``"observation space"``.

    Raises:
        ConfigurationError: It is, or holds, another one than Box, Discrete, MultiDiscrete, MultiBinary, Dict
            and Tuple.
    """
    for leaf in _leaves(space):
        if not isinstance(leaf, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise ConfigurationError(
                f"the {what} has a part of type {type(leaf).__name__}, which is not supported: let the "
                "environment, or a wrapper, use Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple."
            )


class SharedBatch:
    """Everything that trainer and workers share of N environments, as views of one piece of memory.

    Attributes:
        observations: Pytree of arrays [N, ...] of the space's dtypes.
        final_observations: Likewise, the last observation of an episode that ended at this step (SAME_STEP).
        actions: Pytree of arrays [N, ...].
        rewards: [N] float64.
        terminated: [N] bool.
        truncated: [N] bool.
        commands: [W, 8] int64, a cache line for each worker to which the trainer alone writes.
        replies: [W, 8] int64, a cache line for each worker to which the worker alone writes.

    Args:
        memory: From :meth:`allocate`, with the same further arguments.
        observation_space: Of one environment.
        action_space: Of one environment.
        num_envs: N.
        num_workers: W.
    """

    def __init__(
        self,
        memory: Any,
        observation_space: Space[Any],
        action_space: Space[Any],
        num_envs: int,
        num_workers: int,
    ) -> None:
        arrays = _carve(memory, _fields(observation_space, action_space, num_envs, num_workers))
        self.observations = _tree(observation_space, arrays)
        self.final_observations = _tree(observation_space, arrays)
        self.actions = _tree(action_space, arrays)
        self.rewards: NDArray[np.float64] = next(arrays)
        self.terminated: NDArray[np.bool_] = next(arrays)
        self.truncated: NDArray[np.bool_] = next(arrays)
        self.commands: NDArray[np.int64] = next(arrays)
        self.replies: NDArray[np.int64] = next(arrays)

    @staticmethod
    def allocate(
        context: BaseContext,
        observation_space: Space[Any],
        action_space: Space[Any],
        num_envs: int,
        num_workers: int,
    ) -> Any:
        """Memory for a batch, all zeros, to be handed to processes of ``context`` when they are started."""
        fields = _fields(observation_space, action_space, num_envs, num_workers)
        # One line more than needed, as the memory may begin anywhere in a line.
        return context.RawArray(c_byte, _CACHE_LINE + sum(_size(shape, dtype) for shape, dtype in fields))


_Fields = list[tuple[tuple[int, ...], np.dtype[Any]]]


def _fields(
    observation_space: Space[Any], action_space: Space[Any], num_envs: int, num_workers: int
) -> _Fields:
    leaves = [*_leaves(observation_space), *_leaves(observation_space), *_leaves(action_space)]
    fields = [((num_envs, *_shape(leaf)), np.dtype(leaf.dtype)) for leaf in leaves]
    fields += [((num_envs,), np.dtype(dtype)) for dtype in (np.float64, np.bool_, np.bool_)]
    return fields + [((num_workers, _WORDS), np.dtype(np.int64))] * 2


def _size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return -(-prod(shape) * dtype.itemsize // _CACHE_LINE) * _CACHE_LINE


def _carve(memory: Any, fields: _Fields) -> Iterator[NDArray[Any]]:
    memory = np.frombuffer(memory, dtype=np.uint8)
    begin = -memory.ctypes.data % _CACHE_LINE
    for shape, dtype in fields:
        size = prod(shape) * dtype.itemsize
        yield memory[begin : begin + size].view(dtype).reshape(shape)
        begin += _size(shape, dtype)


def _shape(leaf: Space[Any]) -> tuple[int, ...]:
    assert leaf.shape is not None
    return leaf.shape


def _leaves(space: Space[Any]) -> Iterator[Space[Any]]:
    if isinstance(space, spaces.Dict):
        for part in space.spaces.values():
            yield from _leaves(part)
    elif isinstance(space, spaces.Tuple):
        for part in space.spaces:
            yield from _leaves(part)
    else:
        yield space


def _tree(space: Space[Any], leaves: Iterator[NDArray[Any]]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _tree(part, leaves) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_tree(part, leaves) for part in space.spaces)
    return next(leaves)


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to the leaves of a tree of dicts and tuples, and those at the same place in others.

    A worker must not import torch for torch's.
    """
    if isinstance(tree, dict):
        return {
            key: tree_map(function, part, *(other[key] for other in others)) for key, part in tree.items()
        }
    if isinstance(tree, tuple):
        parts = zip(tree, *others, strict=True)
        return tuple(tree_map(function, *part) for part in parts)
    return function(tree, *others)


def tree_leaves(tree: Any) -> list[NDArray[Any]]:
    """The arrays of a tree of dicts and tuples."""
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in tree_leaves(part)]
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in tree_leaves(part)]
    return [tree]


def writer(tree: Any) -> Write:
    """How to write one environment's value into its row of a batch.

    Args:
        tree: Pytree of arrays [N, ...].

    Returns:
        ``write(row, value)``. Values are cast as ``np.stack`` would cast them (so not from float to int), but
        not broadcast.
    """
    if isinstance(tree, dict):
        parts = [(key, writer(part)) for key, part in tree.items()]

        def write_dict(row: int, value: Any) -> None:
            for key, write in parts:
                write(row, value[key])

        return write_dict
    if isinstance(tree, tuple):
        writers = [writer(part) for part in tree]

        def write_tuple(row: int, value: Any) -> None:
            for write, part in zip(writers, value, strict=True):
                write(row, part)

        return write_tuple
    shape = tree.shape[1:]
    # Looked up once: finding a row costs as much as writing it. By a slice, so that a scalar is a view, too.
    rows = [tree[row : row + 1].reshape(shape) for row in range(len(tree))]

    def write_array(row: int, value: Any) -> None:
        array = np.asarray(value)
        if array.shape != shape:
            raise ValueError(f"an observation of shape {array.shape} where the space says {shape}")
        np.copyto(rows[row], array, casting="same_kind")

    return write_array
