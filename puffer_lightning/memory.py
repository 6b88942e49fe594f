"""How the process handles its memory."""

import ctypes
import os

# Of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MEBIBYTE = 1 << 20
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let what one minibatch frees be there for the next one.

    glibc gives large blocks back to the system as soon as they are free, and the system clears each page of
    them when they are needed again: 12,000 page faults, a fifth of the update, with minibatches of 32,768
    and 128 hidden units (docs/adr/0028). From now on up to 512 MiB are kept. Does nothing where another
    library allocates, or where the user has set ``MALLOC_TRIM_THRESHOLD_`` or the like.
    """
    if any(name in os.environ for name in _SETTINGS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 512 * _MEBIBYTE)
        # The most that it takes.
        mallopt(_MMAP_THRESHOLD, 32 * _MEBIBYTE)
