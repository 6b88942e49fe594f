"""How the process handles its memory."""

import ctypes
import os
import sys

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST, _LARGEST_OF_OLD = 2**30, 2**25
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let what one minibatch frees be there for the next one, for the rest of the process.

    glibc gives the memory of large tensors back to the system as soon as they are freed. Each minibatch asks
    for it again, page by page, and the system fills every page with zeros first: see docs/adr/0028. The
    process holds on to the most it has needed.

    Does nothing where the C library is another one, and where the environment says how memory is to be
    handled (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``).

    Returns:
        Whether it is kept.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or any(name in os.environ for name in _SETTINGS):
        return False
    # Before release 2.35 it takes no more for this one.
    mapped = any(mallopt(_M_MMAP_THRESHOLD, size) for size in (_LARGEST, _LARGEST_OF_OLD))
    return bool(mapped and mallopt(_M_TRIM_THRESHOLD, _LARGEST))
