"""Facts about the ranks that train on data of their own, and sums over them.

All of it works, and costs nothing, without a process group. The ranks are all of the process group's, unless
several share their data because they share a policy's layers: then one of each group of these is counted.
"""

import os
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from puffer_lightning.distributed.exchange import Exchange, exchange_for

T = TypeVar("T")

_data_parallel: dist.ProcessGroup | None = None


def set_data_parallel(group: dist.ProcessGroup | None) -> None:
    """Say which ranks, this one among them, train on data of their own; None for all."""
    global _data_parallel
    _data_parallel = group


def data_parallel() -> dist.ProcessGroup | None:
    """The ranks that train on data of their own; None for all."""
    return _data_parallel


def shares_data() -> bool:
    """Whether this rank must do what others do, since each has only a part of the policy's layers."""
    return _grouped() and dist.get_world_size() > world_size()


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's data-parallel rank, 0 without a process group."""
    return dist.get_rank(_data_parallel) if _grouped() else 0


def world_size() -> int:
    """The number of data-parallel ranks, 1 without a process group."""
    return dist.get_world_size(_data_parallel) if _grouped() else 1


def local_world_size() -> int:
    """The number of ranks on this machine, to share its processors; all ranks where that is not known.

    ``torchrun`` tells; Lightning's own launcher does not, and is used for one machine more often than not.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() if _grouped() else 1))


def global_sum(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over all data-parallel ranks, in place.

    Args:
        tensor: Any shape, the same on every rank; on the device that the process group's backend serves.

    Returns:
        ``tensor`` itself, now equal on every rank.
    """
    if exchange := _exchange_for(tensor):
        exchange.sum(tensor)
    elif world_size() > 1:
        dist.all_reduce(tensor, group=_data_parallel)
    return tensor


def broadcast(value: T) -> T:
    """The first process's ``value``, on all processes; anything that pickle knows."""
    if not _grouped():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather(value: T) -> list[T]:
    """The values of all processes in order, on each of them; anything that pickle knows."""
    if not _grouped():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rows(row: Tensor) -> Tensor:
    """The data-parallel ranks' rows in order, on each of them.

    Args:
        row: ``[K]``, K the same on every rank; on the device that the process group's backend serves.

    Returns:
        ``[ranks, K]``.
    """
    if exchange := _exchange_for(row):
        return exchange.gather(row).clone()
    rows = row.new_empty(world_size(), len(row))
    if world_size() > 1:
        dist.all_gather(list(rows.unbind()), row, group=_data_parallel)
    else:
        rows[0] = row
    return rows


def _exchange_for(tensor: Tensor) -> Exchange | None:
    return exchange_for(tensor) if world_size() > 1 and _data_parallel is None else None
