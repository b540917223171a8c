"""What the C library does with memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

__all__ = ["memory_kept"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # glibc's malloc.h
_KEPT = 128 << 20  # two batches of Spark's and what is made of them
_MMAPS = 65536  # where nobody said otherwise
_LARGEST_THRESHOLD = 32 << 20  # to which it rises by itself as larger blocks are freed
_LOOKS_AT_WHAT_IS_KEPT = 1 << 17  # bytes of a block: malloc does not look when a smaller one is freed


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """Have freed memory kept for the next batch of rows, instead of given back to the system.

    A task reads megabytes into memory of its own, batch for batch. Where each batch's memory goes back to the system
    when it is freed, the pages of the next one are mapped and cleared anew, which takes longer than filling them. The
    process keeps 128 MiB for the task that follows, until Spark ends it when it has been idle for a minute. Without
    glibc nothing happens.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_MAX, _MMAPS)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        libc.malloc.restype = ctypes.c_void_p
        libc.free(ctypes.c_void_p(libc.malloc(_LOOKS_AT_WHAT_IS_KEPT)))
