"""What the C library does with memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

__all__ = ["memory_kept"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4  # glibc's malloc.h
_KEPT = 128 << 20  # two batches of Spark's and what is made of them
_MMAPS = 65536  # where nobody said otherwise
_LARGEST_THRESHOLD = 32 << 20  # to which it rises by itself as larger blocks are freed


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """Have freed memory kept for the next batch of rows, instead of given back to the system.

    A task reads megabytes into memory of its own, batch for batch. Where each batch's memory goes back to the system
    when it is freed, the pages of the next one are mapped and cleared anew, which takes longer than filling them. Up
    to 256 MiB that nobody uses stay with the process for the task that follows, until Spark ends it when it has been
    idle for a minute. Nothing happens without glibc, or where the environment tells its malloc what to do.
    """
    libc = ctypes.CDLL(None)
    told = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if told or not hasattr(libc, "mallopt") or not hasattr(libc, "mallinfo2"):
        yield
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
    libc.mallopt(_M_TOP_PAD, _KEPT)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_MAX, _MMAPS)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        if _unused_bytes(libc) > 2 * _KEPT:  # more than there is at the end, or between what is in use
            libc.malloc_trim(ctypes.c_size_t(_KEPT))


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2``; ``fordblks`` are the bytes of free blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _unused_bytes(libc: ctypes.CDLL) -> int:
    libc.mallinfo2.restype = _MallInfo
    return int(libc.mallinfo2().fordblks)
