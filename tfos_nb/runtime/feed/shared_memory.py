"""Pass blocks of rows in shared memory, from a Spark task to a node on the same host: both ends.

::

    node:  BlockPool (a memfd, cut into blocks) ── Grant(block) ──▶ task:  BlockWriter
           lend(block) ◀── "block 3 holds 8,123,456 bytes" ───────────  writes an Arrow batch into it, once

A batch is copied once, by the task, into memory that TensorFlow then reads in place. Through a socket it is copied four
times. The node grants blocks to the task, over the stream that feeds it (:mod:`tfos_nb.runtime.feed.transfer`). A block
is free again when no object in the node refers to its memory any more. If no block is free, or the task cannot open the
memory (another container), the rows go through the socket.

The memory has no name: it disappears with the last process that uses it. A process of the same user opens it through
``/proc``.
"""

from __future__ import annotations

import contextlib
import mmap
import operator
import os
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.feed.messages import SAME_VERSION
from tfos_nb.runtime.rows.balancing import PIECE_BYTES

__all__ = ["BLOCK_BYTES", "BlockPool", "BlockWriter", "Grant", "PoolPlace", "Written"]

BLOCK_BYTES = PIECE_BYTES + (64 << 10)  # with room for Arrow's metadata
_MADV_POPULATE_WRITE = 23  # linux/mman.h; Python's mmap does not name it
_ALIGNED = 64  # alignment in bytes at which TensorFlow uses memory without a copy; Arrow's own streams align to 8
_SPARE = 4  # blocks beyond those that the queue may hold: in use by TensorFlow, or being written


@message
@dataclass(frozen=True)
class PoolPlace:
    """Location of a node's blocks: a descriptor of the node's process, and the identity of its file."""

    pid: int
    descriptor: int
    inode: int


@message
@dataclass(frozen=True)
class Grant:
    """Permission to write the next rows into this block; -1 means none is free: use the socket."""

    block: int


@dataclass(frozen=True)
class Written:
    """Position of rows in a block: the first byte, and the number of bytes."""

    first: int
    size: int


class BlockPool:
    """The node's end: its blocks, and which of them are free.

    Parameters
    ----------
    limit : int
        Bytes that may wait in the node. Memory is allocated only for blocks that are used.
    """

    def __init__(self, limit: int) -> None:
        count = max(1, limit // BLOCK_BYTES) + _SPARE
        self._file = os.memfd_create("tfos_nb-blocks", os.MFD_CLOEXEC)
        os.ftruncate(self._file, count * BLOCK_BYTES)
        self._memory = mmap.mmap(self._file, count * BLOCK_BYTES)
        # The last reference may go at any point of any thread, and then appends here: so this uses no lock. The block
        # freed last is granted first, since its memory is mapped already.
        self._free = deque(reversed(range(count)))
        self.place = PoolPlace(os.getpid(), self._file, os.fstat(self._file).st_ino)

    @classmethod
    def create(cls, limit: int) -> BlockPool | None:
        """Return a pool, or None if the system does not support such memory."""
        try:
            return cls(limit)
        except (AttributeError, OSError):
            return None

    def take(self) -> int:
        """Return the number of a free block, which the caller now owns; -1 if none is free."""
        try:
            return self._free.pop()
        except IndexError:
            return -1

    def give_back(self, block: int) -> None:
        """Free a block that is not written or read any more."""
        self._free.append(block)

    def lend(self, block: int, written: Written) -> pa.RecordBatch:
        """Return the batch that a task wrote into a block; the block is free when its memory is not used any more."""
        view = np.frombuffer(self._memory, np.uint8, written.size, block * BLOCK_BYTES + written.first)
        weakref.finalize(view, self._free.append, block).atexit = False
        try:
            return pa.ipc.open_stream(pa.py_buffer(view)).read_next_batch()
        except StopIteration:  # an outer iterator would take it for its own end
            raise FeedFailed(f"a task sent block {block} of shared memory without rows. {SAME_VERSION}") from None

    def close(self) -> None:
        """Release the memory; it is freed with the last batch in it."""
        with contextlib.suppress(OSError):
            os.close(self._file)


class BlockWriter:
    """The task's end: write batches into a node's blocks.

    Raises
    ------
    OSError
        If the memory cannot be reached from here.
    """

    def __init__(self, place: PoolPlace) -> None:
        descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            # In another container, this process id belongs to another process.
            if found.st_ino != place.inode or found.st_uid != os.geteuid():
                raise OSError(f"process {place.pid} has other memory there")
            self._memory = mmap.mmap(descriptor, found.st_size)
        finally:
            os.close(descriptor)
        self._mapped: dict[int, int] = {}
        self._first = 0

    @classmethod
    def open(cls, place: PoolPlace | None) -> BlockWriter | None:
        """Return a writer, or None if the memory cannot be reached from here."""
        try:
            return None if place is None else cls(place)
        except (OSError, ValueError):
            return None

    def write(self, block: int, batch: pa.RecordBatch) -> Written | None:
        """Write a batch into a block; return where it is, or None if it does not fit."""
        self._populate(block, batch.nbytes)
        start = block * BLOCK_BYTES + self._first
        memory = pa.py_buffer(memoryview(self._memory)[start : (block + 1) * BLOCK_BYTES])
        sink = pa.FixedSizeBufferWriter(memory)
        try:
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
        except (OSError, pa.ArrowInvalid):
            return None
        written = Written(self._first, int(sink.tell()))
        self._align(memory)
        return written

    def _populate(self, block: int, size: int) -> None:
        """Map a block's pages at once. Mapping each at its first write takes as long as the copy itself."""
        size = min(size, BLOCK_BYTES)
        if size > self._mapped.get(block, 0):
            self._mapped[block] = size
            with contextlib.suppress(OSError):  # Linux before 5.14 does not support this advice
                self._memory.madvise(_MADV_POPULATE_WRITE, block * BLOCK_BYTES, size)

    def _align(self, memory: pa.Buffer) -> None:
        """Choose the next batch's start so that its largest buffer is aligned, if its layout is the same as this one's.

        If it is not aligned, TensorFlow copies that column once more.
        """
        batch = pa.ipc.open_stream(memory).read_next_batch()
        buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]
        largest = max(buffers, key=operator.attrgetter("size"), default=memory)
        self._first = (self._first - largest.address) % _ALIGNED
