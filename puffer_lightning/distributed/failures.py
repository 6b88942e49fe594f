"""What a failing rank can know of the others: whether it is the first to fail, and who does not answer."""

import atexit
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, default_pg_timeout

from puffer_lightning.distributed.collectives import rank, world_size

TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for one another, unless told otherwise: after this a hanging rank ends the run."""

TORCH_TIMEOUT = default_pg_timeout
"""The same as torch and Lightning have it."""

_ANSWER_SECONDS = 3.0
_LET_GO_SECONDS = 0.2
T = TypeVar("T")


def has_backend(name: str) -> bool:
    """Whether this torch can talk between processes by ``name`` (gloo, nccl, ...)."""
    return dist.is_available() and dist.is_backend_available(name)


def is_first_failure() -> bool:
    """Whether no other rank has failed before; asked once by each rank that fails.

    True where that cannot be known: without a process group, or if rank 0, with which ranks leave what they
    share, is gone.
    """
    if not dist.is_initialized():
        return True
    return _within_seconds(lambda: _get_default_store().add("failures", 1) == 1, default=True)


def let_others_notice() -> None:
    """Stay, on the rank that keeps what ranks share, until all that fail have said so, or some seconds."""
    if not dist.is_initialized() or rank() > 0:
        return

    def wait() -> None:
        store = _get_default_store()
        while store.add("failures", 0) < world_size():
            time.sleep(0.05)

    _within_seconds(wait, default=None)


def lost_connection(failure: BaseException) -> bool:
    """Whether a rank failed only because another one did, or does not answer."""
    return any(
        isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
        for error in _chain(failure)
    )


def seconds_waited(failure: BaseException) -> float | None:
    """How long this rank waited for others until it gave up; None if it failed for another reason."""
    for error in _chain(failure):
        if waited := re.search(r"[Tt]imed out waiting (\d+)\s?ms|Timeout\(ms\)=(\d+)", str(error)):
            return int(waited[1] or waited[2]) / 1000
    return None


def silent_ranks() -> list[int]:
    """The ranks that have not noticed the failure, because they hang; each rank that has noticed must ask."""
    if not dist.is_initialized():
        return []

    def ask() -> list[int]:
        store = _get_default_store()
        store.set(f"noticed/{rank()}", "")
        # The others notice within the time that a connection takes to close.
        time.sleep(_ANSWER_SECONDS / 2)
        return [other for other in range(world_size()) if not store.check([f"noticed/{other}"])]

    return _within_seconds(ask, default=[0])


def explanation(failure: BaseException) -> str | None:
    """One sentence on why the ranks did not come together, or None for any other failure."""
    said = " ".join(str(error) for error in _chain(failure))
    if "EADDRINUSE" in said:
        return "MASTER_PORT is in use: set it to a free port, or leave it out to have one chosen."
    if unreachable := re.search(r"timed out after (\d+)ms while trying to connect to \((.+?), (\d+)\)", said):
        return (
            f"rank 0 did not answer at MASTER_ADDR {unreachable[2]}, MASTER_PORT {unreachable[3]} within "
            f"{int(unreachable[1]) / 1000:g} seconds: start all ranks, and give each the address of rank 0."
        )
    if few := re.search(r"after (\d+) seconds waiting for clients. (\d+)/(\d+) clients joined", said):
        return (
            f"only {few[2]} of {few[3]} ranks came to MASTER_ADDR within {few[1]} seconds: start all of "
            "them, or raise the timeout of trainer.strategy."
        )
    return None


@atexit.register
def _let_threads_let_go() -> None:
    """Give gloo's threads the interpreter once more: without it, what they sent last aborts the process."""
    if dist.is_initialized():
        time.sleep(_LET_GO_SECONDS)


def _chain(failure: BaseException) -> Iterator[BaseException]:
    error: BaseException | None = failure
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _within_seconds(ask: Callable[[], T], default: T) -> T:
    """The answer; ``default`` if the store is gone, or with a process that is stopped."""
    answers: list[T] = []

    def keep() -> None:
        with contextlib.suppress(dist.DistError):
            answers.append(ask())

    asking = threading.Thread(target=keep, daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return answers[0] if answers else default
