"""What processes need that share memory and watch it for each other's words."""

import os
import time
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

from numpy.typing import NDArray

give_way: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))
"""Lets whoever else wants this processor have it, such as the process that is waited for."""

_LOCK = Lock()
_LOCK.acquire()


def fence() -> None:
    """Let no store or load cross this line, as seen by the other process.

    Python has no memory fence of its own, but a lock is released and acquired with atomic instructions: full
    fences on x86, and on ARM a release followed by an acquire, which stay in order.
    """
    _LOCK.release()
    _LOCK.acquire()


def words(line: NDArray[Any]) -> "memoryview[int]":
    """An array's elements as a memoryview, the fastest thing to read and write them through."""
    return memoryview(line)  # type: ignore[arg-type]
