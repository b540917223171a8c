"""Configure how the C library handles freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

__all__ = ["memory_kept"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4  # glibc's malloc.h
_KEPT = 128 << 20  # two of Spark's batches and their results
_MMAPS = 65536  # glibc's default
_LARGEST_THRESHOLD = 32 << 20  # glibc's dynamic threshold rises up to this value when larger blocks are freed


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """Keep freed memory for the next batch of rows, instead of returning it to the system.

    A task reads megabytes for each batch. If each batch's memory is returned to the system, the next batch's pages must
    be mapped and cleared again, which takes longer than filling them. Up to 256 MiB of unused memory stay in the
    process for the next task. Spark ends a process after a minute without a task. Does nothing without glibc, or if the
    environment configures glibc's malloc.
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
        if _unused_bytes(libc) > 2 * _KEPT:
            libc.malloc_trim(ctypes.c_size_t(_KEPT))


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc. ``fordblks`` is the number of bytes in free blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _unused_bytes(libc: ctypes.CDLL) -> int:
    libc.mallinfo2.restype = _MallInfo
    return int(libc.mallinfo2().fordblks)
