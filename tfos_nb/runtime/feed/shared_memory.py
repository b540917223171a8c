"""Blocks of rows handed over in shared memory, between a Spark task and a node on one host: both ends.

::

    node:  BlockPool (a memfd, cut into blocks) ── Grant(block) ──▶ task:  BlockWriter
           lend(block) ◀── "block 3 holds 8,123,456 bytes" ───────────  writes an Arrow batch into it, once

A batch is copied once, by the task, into memory that TensorFlow then reads where it is. Through a socket it is copied
four times. Which block may be written to is said by the node (over the stream that feeds it, see
:mod:`tfos_nb.runtime.feed.transfer`), and a block is free again when nobody in the node refers to its memory any more.
If none is free, or if the task cannot open the memory (another container), the rows go through the socket.

The memory has no name: it is gone with the last process that uses it. A process of the same user opens it by way of
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
from tfos_nb.runtime.rows.balancing import PIECE_BYTES

__all__ = ["BLOCK_BYTES", "BlockPool", "BlockWriter", "Grant", "PoolPlace", "Written"]

BLOCK_BYTES = PIECE_BYTES + (64 << 10)  # with room for Arrow's own words
_MADV_POPULATE_WRITE = 23  # linux/mman.h; Python's mmap does not name it
_ALIGNED = 64  # bytes at whose multiples TensorFlow takes memory as it is; Arrow's own streams keep to those of 8
_SPARE = 4  # blocks beyond those that the queue may hold: in TensorFlow's hands, or being written


@message
@dataclass(frozen=True)
class PoolPlace:
    """Where a task finds a node's blocks: a descriptor of the node's process, and which file it has to be."""

    pid: int
    descriptor: int
    inode: int


@message
@dataclass(frozen=True)
class Grant:
    """The task may write its next rows into this block; -1 for none: through the socket."""

    block: int


@dataclass(frozen=True)
class Written:
    """Where in a block the rows are: the first byte, and how many there are."""

    first: int
    size: int


class BlockPool:
    """The node's end: its blocks, and which of them are free.

    Parameters
    ----------
    limit : int
        Bytes that may wait in the node; memory is only taken for blocks that are used.
    """

    def __init__(self, limit: int) -> None:
        count = max(1, limit // BLOCK_BYTES) + _SPARE
        self._file = os.memfd_create("tfos_nb-blocks", os.MFD_CLOEXEC)
        os.ftruncate(self._file, count * BLOCK_BYTES)
        self._memory = mmap.mmap(self._file, count * BLOCK_BYTES)
        # Appended to wherever the last reference goes, perhaps in the middle of anything: so no lock here. The block
        # freed last is given out first, since its memory is there already.
        self._free = deque(reversed(range(count)))
        self.place = PoolPlace(os.getpid(), self._file, os.fstat(self._file).st_ino)

    @classmethod
    def create(cls, limit: int) -> BlockPool | None:
        """Return a pool, or None where the system has no such memory."""
        try:
            return cls(limit)
        except (AttributeError, OSError):
            return None

    def take(self) -> int:
        """Return a free block's number, which is the caller's now; -1 if there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return -1

    def give_back(self, block: int) -> None:
        """Make a block free that nobody writes to or reads any more."""
        self._free.append(block)

    def lend(self, block: int, written: Written) -> pa.RecordBatch:
        """Return the batch that a task wrote into a block; the block is free when its memory is not used any more."""
        view = np.frombuffer(self._memory, np.uint8, written.size, block * BLOCK_BYTES + written.first)
        weakref.finalize(view, self._free.append, block).atexit = False
        try:
            return pa.ipc.open_stream(pa.py_buffer(view)).read_next_batch()
        except StopIteration:  # to whoever reads a stream it would mean that stream's own end
            raise FeedFailed(f"there are no rows in block {block}") from None

    def close(self) -> None:
        """Let go of the memory; it goes when the last batch in it goes."""
        with contextlib.suppress(OSError):
            os.close(self._file)


class BlockWriter:
    """The task's end: writes batches into a node's blocks.

    Raises
    ------
    OSError
        If the memory cannot be reached from here.
    """

    def __init__(self, place: PoolPlace) -> None:
        descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            # In another container the process of this number is another one.
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
        """Map a block's pages at once: one by one, as they are written to, takes as long as the copy itself."""
        size = min(size, BLOCK_BYTES)
        if size > self._mapped.get(block, 0):
            self._mapped[block] = size
            with contextlib.suppress(OSError):  # before Linux 5.14 there is no such advice
                self._memory.madvise(_MADV_POPULATE_WRITE, block * BLOCK_BYTES, size)

    def _align(self, memory: pa.Buffer) -> None:
        """Have the next batch begin where its largest buffer is aligned, if it is laid out as this one is.

        Where it is not, TensorFlow copies the rows of that column once more.
        """
        batch = pa.ipc.open_stream(memory).read_next_batch()
        buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]
        largest = max(buffers, key=operator.attrgetter("size"), default=memory)
        self._first = (self._first - largest.address) % _ALIGNED
