"""Tensors that the ranks of one machine hand to each other through memory they share.

gloo sends them through sockets and wakes a thread for each message. For the gradients of a small policy that
takes longer than to compute them, see docs/adr/0019.
"""

import fcntl
import mmap
import os
import secrets
import time
from contextlib import suppress
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import (  # type: ignore[attr-defined]
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)
from torch.distributed import group
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from puffer_lightning.sharing import fence, give_way, words

NAME = "shared_memory"
"""Of this way, where torch has gloo or nccl, for the profiler."""

# What is larger does not wait for a thread's waking but for bytes, and gloo sends these while others are
# still computed.
_SLOT_BYTES = 2**20
_LINE_BYTES = 64
_TOKEN_BYTES = 16
_WATCH_SECONDS = 2e-3
_NAP_SECONDS = 2e-4
_CHECK_SECONDS = 0.1


class Exchange:
    """Memory with two slots for each rank, used in turns, and a count of what each has put there.

    A rank that has begun its next exchange but one has seen every other begin the next, and so end this one:
    its slot is free.

    Each rank holds a lock on a byte of the memory's file, which ends with the process however that ends.

    Args:
        descriptor: Of the file.
        rank: This process's.
        ranks: How many there are.
    """

    def __init__(self, descriptor: int, rank: int, ranks: int) -> None:
        self._descriptor, self._rank, self._ranks = descriptor, rank, ranks
        finalize(self, os.close, descriptor)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        memory = np.frombuffer(mmap.mmap(descriptor, _size(ranks)), np.uint8)
        lines = ranks * _LINE_BYTES
        self._counts = words(memory[:lines].view(np.int64)[:: _LINE_BYTES // 8])
        self._slots = torch.from_numpy(memory[lines : _size(ranks) - _TOKEN_BYTES]).view(2, ranks, -1)

    def gather(self, tensor: Tensor, name: str = "all_gather") -> Tensor:
        """The ranks' tensors in order; valid until the next exchange but one.

        Args:
            tensor: ``[...]`` on the CPU, of the same size and type on every rank.
            name: Of the collective that it serves, for the profiler.

        Returns:
            ``[ranks, K]`` of its K elements.

        Raises:
            DistBackendError: A rank is gone, or has not come within the process group's timeout.
        """
        record = _record_function_with_args_enter(f"{NAME}:{name}", tensor)
        try:
            return self._gather(tensor)
        finally:
            _record_function_with_args_exit(record)

    def _gather(self, tensor: Tensor) -> Tensor:
        number = self._counts[self._rank] + 1
        rows = self._slots[number % 2, :, : tensor.nbytes].view(tensor.dtype)
        rows[self._rank].copy_(tensor.flatten())
        fence()
        self._counts[self._rank] = number
        for rank in range(self._ranks):
            self._wait(rank, number)
        fence()
        return rows

    def sum(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks, in place, in the order of ranks on each of them.

        Args:
            tensor: As of :meth:`gather`.

        Raises:
            DistBackendError: As of :meth:`gather`.
        """
        first, *others = (row.view(tensor.shape) for row in self.gather(tensor, "all_reduce"))
        tensor.copy_(first)
        for other in others:
            tensor.add_(other)

    def _wait(self, rank: int, number: int) -> None:
        counts, end = self._counts, time.perf_counter() + _WATCH_SECONDS
        while counts[rank] < number:
            give_way()
            if time.perf_counter() > end:
                self._nap(rank, number)

    def _nap(self, rank: int, number: int) -> None:
        timeout = _timeout()
        began = checked = time.perf_counter()
        while self._counts[rank] < number:
            time.sleep(_NAP_SECONDS)
            now = time.perf_counter()
            if now - checked > _CHECK_SECONDS:
                checked = now
                if self._is_gone(rank) and self._counts[rank] < number:
                    raise dist.DistBackendError(f"Rank {rank} is gone.")
            if now - began > timeout:
                raise dist.DistBackendError(f"Timed out waiting {timeout * 1000:.0f}ms for rank {rank}.")

    def _is_gone(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
        return True


_exchanges: WeakKeyDictionary[dist.ProcessGroup, Exchange | None] = WeakKeyDictionary()


def exchange_for(tensor: Tensor) -> Exchange | None:
    """How all ranks can exchange ``tensor`` through memory; None if they cannot, or should not.

    The first time, all ranks must ask.

    Args:
        tensor: Of the same size and type, and on the same kind of device, on every rank.
    """
    if tensor.device.type != "cpu" or tensor.nbytes > _SLOT_BYTES:
        return None
    ranks = group.WORLD
    assert ranks is not None
    if ranks not in _exchanges:
        _exchanges[ranks] = _open(ranks)
    return _exchanges[ranks]


def exchange_gradients(model: DistributedDataParallel) -> None:
    """Let DDP average gradients on the CPU through memory, where that can be, and as ever elsewhere."""
    if model.device_type == "cpu":
        model.register_comm_hook(None, _average)


def _average(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    exchange = exchange_for(buffer)
    if exchange is None:
        assert group.WORLD is not None
        return allreduce_hook(group.WORLD, bucket)
    exchange.sum(buffer.div_(dist.get_world_size()))
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def _open(ranks: dist.ProcessGroup) -> Exchange | None:
    """Memory in a file without a name, so that nothing is left of it; the others find it by whose it is."""
    rank, number = dist.get_rank(ranks), dist.get_world_size(ranks)
    path, token, descriptor = "", secrets.token_bytes(_TOKEN_BYTES), None
    # Not where this is another kind of system, or there is no memory left.
    with suppress(AttributeError, OSError):
        if rank == 0:
            descriptor = os.memfd_create("puffer_lightning")
            os.posix_fallocate(descriptor, 0, _size(number))
            os.pwrite(descriptor, token, _size(number) - _TOKEN_BYTES)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
    told: list[tuple[str, bytes]] = [(path, token)]
    dist.broadcast_object_list(told, group=ranks)
    path, token = told[0]
    # On another machine there may be something else of that name.
    with suppress(OSError):
        if rank > 0:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    found = bool(path) and descriptor is not None and _holds(descriptor, token, _size(number))
    if descriptor is not None and not found:
        os.close(descriptor)
    exchange = Exchange(descriptor, rank, number) if descriptor is not None and found else None
    opened = [False] * number
    dist.all_gather_object(opened, found, group=ranks)
    return exchange if all(opened) else None


def _holds(descriptor: int, token: bytes, size: int) -> bool:
    with suppress(OSError):
        return os.pread(descriptor, _TOKEN_BYTES, size - _TOKEN_BYTES) == token
    return False


def _size(ranks: int) -> int:
    return ranks * (_LINE_BYTES + 2 * _SLOT_BYTES) + _TOKEN_BYTES


def _timeout() -> float:
    """Of the process group, in seconds; it may be set anew at any time."""
    ranks = group.WORLD
    assert ranks is not None
    return float(ranks._get_backend(torch.device("cpu")).options._timeout.total_seconds())
