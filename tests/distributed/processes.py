"""Functions run on processes, two if not told otherwise, that talk through gloo."""

import os
import socket
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
RANKS = 2


def free_port() -> int:
    """A port that nobody listens at, for now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(function: Callable[..., T], *arguments: object, ranks: int = RANKS) -> list[T]:
    """What ``function(rank, *arguments)`` returns on each of the ranks.

    The processes start with the first call and serve all others, since their imports take seconds.

    Args:
        function: Importable by its name.
        arguments: Further arguments, and like the result something that pickle knows.
        ranks: How many.

    Raises:
        RuntimeError: It failed on a rank; the message holds the traceback.
    """
    processes, connections = _start(ranks)
    for connection in connections:
        connection.send((function, arguments))
    results: dict[Connection, T] = {}
    while len(results) < ranks:
        for ready in cast(list[Connection], wait(set(connections) - results.keys())):
            result, failure = ready.recv()
            if failure is not None:
                # The others may wait for this one for ever.
                for process in processes:
                    process.terminate()
                _start.cache_clear()
                raise RuntimeError(failure)
            results[ready] = result
    return [results[connection] for connection in connections]


@cache
def _start(ranks: int) -> tuple[list[BaseProcess], list[Connection]]:
    port = free_port()
    context = get_context("spawn")
    processes: list[BaseProcess] = []
    connections = []
    for rank in range(ranks):
        here, there = context.Pipe()
        # Daemons end with the process that started them.
        processes.append(context.Process(target=_serve, args=(rank, ranks, port, there), daemon=True))
        processes[-1].start()
        there.close()
        connections.append(here)
    return processes, connections


def _serve(rank: int, ranks: int, port: int, connection: Connection) -> None:
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
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(_attempt(function, rank, arguments))


def _attempt(
    function: Callable[..., T], rank: int, arguments: tuple[Any, ...]
) -> tuple[T | None, str | None]:
    try:
        return function(rank, *arguments), None
    except Exception:
        return None, f"rank {rank}: {traceback.format_exc()}"
