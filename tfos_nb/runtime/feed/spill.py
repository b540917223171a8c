"""A node's rows on local disk, for the passes after the first."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator

import pyarrow as pa

__all__ = ["Spill"]

logger = logging.getLogger(__name__)

_NOTE = b"tfos_nb"


class Spill:
    """An Arrow stream on local disk, written once and read by memory map as often as wanted.

    Parameters
    ----------
    directory : str
        Where to write.
    limit : int
        The most bytes to write. Beyond this, the spill stops and :attr:`whole` is False.
    file : str, optional
        An empty file to write into, in place of a new one.
    """

    def __init__(self, directory: str, limit: int, file: str = "") -> None:
        self._directory = directory
        self._file = file
        self._fd, self._path = -1, ""  # no file until the first write
        self._limit = limit
        self._lock = threading.Lock()
        self._sink: pa.NativeFile | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._sealed = self._closed = False
        self._maps: list[weakref.ref[mmap.mmap]] = []
        self.bytes = 0
        self.whole = True

    @classmethod
    def of_file(cls, file: str) -> Spill:
        """Return the spill that an earlier process has written into a file and sealed."""
        spill = cls("", 0, file)
        spill._open()
        spill.bytes, spill._sealed = os.fstat(spill._fd).st_size, True
        return spill

    def write(self, batch: pa.RecordBatch, note: bytes = b"") -> None:
        """Append a batch, with a note about it; a full disk ends the spill, not the training."""
        with self._lock:
            if not self.whole or self._sealed:
                return
            try:
                self._append(batch, note)
            except OSError as error:
                self._give_up(f"writing to disk failed: {error}")

    def _append(self, batch: pa.RecordBatch, note: bytes) -> None:
        if self._writer is None:
            self._create()
            self._sink = pa.OSFile(self._path, mode="wb")
            self._writer = pa.ipc.new_stream(self._sink, batch.schema)
        self._writer.write_batch(batch, {_NOTE: note})
        self.bytes += batch.nbytes
        if self.bytes > self._limit:
            self._give_up(f"more than spill_bytes={self._limit}")

    def _open(self) -> None:
        self._fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        self._path = f"/proc/self/fd/{self._fd}"

    def _create(self) -> None:
        if self._file:
            self._open()
            return
        self._fd, path = tempfile.mkstemp(prefix="tfos_nb-spill-", dir=self._directory)
        self._path = f"/proc/self/fd/{self._fd}"
        if os.path.exists(self._path):
            os.unlink(path)
        else:  # no /proc: the file must keep its name until close
            self._path = path

    def _give_up(self, reason: str) -> None:
        logger.warning("rows are not kept for the later epochs (%s): Spark will read them again", reason)
        self.whole = False
        self._end_writing()
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)

    def _end_writing(self) -> None:
        with contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.close()
            if self._sink is not None:
                self._sink.close()
        self._writer = self._sink = None

    def seal(self) -> None:
        """End the file; from now on it is only read."""
        with self._lock:
            self._sealed = True
            self._end_writing()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read all rows without a copy; after :meth:`close` there are none.

        The file is mapped before this returns, so that it may be closed while it is read.

        The memory is writable, but writes do not change the file. TensorFlow reuses a tensor's memory for the result of
        the last operation that needs it, so it writes into memory that it was given to read.
        """
        stream = self._stream()
        return iter(stream if stream is not None else ())

    def notes(self) -> Iterator[bytes]:
        """Read the notes about the batches, in order."""
        stream = self._stream()
        with contextlib.suppress(StopIteration):
            while stream is not None:
                yield stream.read_next_batch_with_custom_metadata().custom_metadata[_NOTE]

    def _stream(self) -> pa.RecordBatchReader | None:
        with self._lock:
            if not self.bytes or self._closed:
                return None
            with open(self._path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps = [one for one in self._maps if one() is not None] + [weakref.ref(mapped)]
        return pa.ipc.open_stream(pa.py_buffer(mapped))  # each buffer keeps the mapping alive

    @property
    def is_mapped(self) -> bool:
        """Whether rows that were read are still in use: the file must not change."""
        return any(one() is not None for one in self._maps)

    def close(self) -> None:
        """Release the disk space, unless it is of a file that was given."""
        self.seal()
        with self._lock:
            if self._closed:  # the descriptor's number may belong to another file now
                return
            self._closed = True
            with contextlib.suppress(OSError):
                os.close(self._fd)
                if not self._path.startswith("/proc/"):
                    os.unlink(self._path)
            self._fd = -1
