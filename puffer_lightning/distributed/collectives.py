"""Facts about the process group and what is sent over it; all of it works, and costs nothing, without one."""

import os
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank, 0 without a process group."""
    return dist.get_rank() if _grouped() else 0


def world_size() -> int:
    """The number of ranks, 1 without a process group."""
    return dist.get_world_size() if _grouped() else 1


def local_world_size() -> int:
    """The number of ranks on this machine, to share its processors; all ranks where that is not known.

    ``torchrun`` tells; Lightning's own launcher does not, and is used for one machine more often than not.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def global_sum(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over all ranks, in place.

    Args:
        tensor: Any shape, the same on every rank; on the device that the process group's backend serves.

    Returns:
        ``tensor`` itself, now equal on every rank.
    """
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast(value: T) -> T:
    """Rank 0's ``value``, anything that pickle knows."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather(value: T) -> list[T]:
    """The ranks' values in order, on every rank; anything that pickle knows."""
    if world_size() == 1:
        return [value]
    values = [value] * world_size()
    dist.all_gather_object(values, value)
    return values
