"""Functions run on several processes that talk through gloo."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

T = TypeVar("T")


def run_ranks(function: Callable[..., T], *arguments: object, ranks: int = 2) -> list[T]:
    """What ``function(rank, *arguments)`` returns on each rank; it must be importable by its name."""
    with TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        spawn(_on_rank, (function, arguments, ranks, port, folder), ranks)  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(ranks)]


def _on_rank(
    rank: int, function: Callable[..., T], arguments: tuple[Any, ...], ranks: int, port: int, folder: str
) -> None:
    # Lightning, too, finds itself to be one of several processes by these.
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(ranks),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        torch.save(function(rank, *arguments), Path(folder, str(rank)))
        dist.barrier()
    finally:
        dist.destroy_process_group()
