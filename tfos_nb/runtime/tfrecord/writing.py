"""Write batches to temporary files, and rename the files when all tasks have succeeded.

::

    driver     WriteJob.begin()  ─▶ makes <path>/_temporary-<job>/
    tasks      write_part(…)     ─▶ writes one file there per partition directory; returns RecordsWritten
    driver     WriteJob.commit() ─▶ renames each file to its final path, writes _SUCCESS
               or abort()        ─▶ removes the temporary directory

Only the files of each task's successful attempt are renamed. The files of failed, repeated and speculative attempts are
removed with the temporary directory. An overwrite removes old files only after the new ones are in place.
"""

from __future__ import annotations

import contextlib
import posixpath
import socket
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed, PlanError, absent_column
from tfos_nb.runtime.control.wire import encode as to_wire
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.rows.rdd_rows import size_of
from tfos_nb.runtime.tfrecord.encode import encode
from tfos_nb.runtime.tfrecord.fields import Field, RecordType
from tfos_nb.runtime.tfrecord.files import SUCCESS, file_system, partition_directory, plain
from tfos_nb.runtime.tfrecord.framing import frame
from tfos_nb.runtime.tfrecord.schema import fields_of, type_name

__all__ = [
    "GZIP", "EncodeTask", "Encoding", "RecordFile", "RecordsWritten", "WriteJob", "WriteTask", "encoding_of",
    "file_name", "may_write", "write_part",
]  # fmt: skip

_OPEN_FILES = 64
_SLICE = 8 * 1024 * 1024
_DIRECTORY_TYPES = ("string", "byte", "short", "integer", "long", "boolean", "date")
_COMPRESSIONS = {"none": False, "uncompressed": False, "gzip": True, "gzipcodec": True}
GZIP = 16 | zlib.MAX_WBITS
"""zlib's code (``wbits``) for gzip."""


@dataclass(frozen=True)
class Encoding:
    """Description of how rows are encoded as files.

    Parameters
    ----------
    fields : tuple of Field
        Types of the columns, without the partition columns.
    partition : tuple of (int, str)
        Positions and names of the partition columns, whose values become directories.
    record_type : RecordType
        Message in which a row is encoded.
    gzip : bool
        Whether the files are compressed.
    """

    fields: tuple[Field, ...]
    partition: tuple[tuple[int, str], ...]
    record_type: RecordType
    gzip: bool

    def pieces(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int, pa.Buffer]]:
        """Yield pieces of files: the partition directory (empty: none), the number of rows, and the framed bytes.

        The bytes are not compressed.
        """
        for batch in batches:
            for piece in _pieces(batch):
                for directory, rows in self._by_directory(piece):
                    yield directory, rows.num_rows, frame(encode(rows, self.fields, self.record_type))

    def _by_directory(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if not self.partition:
            yield "", batch
            return
        features = pa.RecordBatch.from_arrays(
            [column for number, column in enumerate(batch.columns) if number not in dict(self.partition)],
            names=[field.name for field in self.fields],
        )
        codes = np.zeros(batch.num_rows, dtype=np.int64)
        texts = []
        for number, _ in self.partition:
            coded = batch.column(number).cast(pa.string()).dictionary_encode(null_encoding="encode")
            texts.append(coded.dictionary.to_pylist())
            codes = codes * len(coded.dictionary) + coded.indices.to_numpy()
        for code in np.unique(codes).tolist():
            yield self._directory(code, texts), features.take(pa.array(np.flatnonzero(codes == code)))

    def _directory(self, code: int, texts: list[list[str | None]]) -> str:
        names = []
        for (_, name), known in zip(reversed(self.partition), reversed(texts), strict=True):
            code, place = divmod(code, len(known))
            names.append(partition_directory(name, known[place]))
        return "/".join(reversed(names))


def encoding_of(
    schema: Mapping[str, Any],
    record_type: RecordType,
    partition_by: Sequence[str] = (),
    *,
    compression: Any = None,
    lengths: Any = None,
) -> Encoding:
    """Return how a DataFrame with a schema (``df.schema.jsonValue()``) is encoded.

    Raises
    ------
    PlanError
        If a record cannot store a column, or a parameter is wrong.
    """
    gzip = _COMPRESSIONS.get(str(compression or "none").rpartition(".")[2].lower())
    if gzip is None:
        raise PlanError(f"compression must be 'gzip', or None, got {compression!r}")
    columns = {column["name"]: (number, column["type"]) for number, column in enumerate(schema["fields"])}
    for name in partition_by:
        if name not in columns:
            raise absent_column("partition_by", name, list(columns))
        if columns[name][1] not in _DIRECTORY_TYPES:
            raise PlanError(
                f"partition_by: column {name!r} is {type_name(columns[name][1])}: cast it to string, or take a column "
                "of strings, whole numbers, booleans or dates"
            )
    fields = fields_of(schema, record_type, partition_by, lengths=lengths)
    if not fields:
        apart = " apart from those of partition_by" * bool(partition_by)
        raise PlanError(f"df must have a column to write{apart}, got {', '.join(columns) or 'no columns'}: add one")
    return Encoding(fields, tuple((columns[name][0], name) for name in partition_by), record_type, gzip)


def may_write(exists: bool, is_file: bool, mode: str, url: str) -> bool:
    """Return whether a write may begin; False if the path exists and the mode is ``ignore``.

    Raises
    ------
    PlanError
        If the path exists and the mode is ``errorifexists``, or if it is a file.
    """
    if exists and mode == "ignore":
        return False
    if exists and mode == "errorifexists":
        raise PlanError(f"{plain(url)} exists already: give another path, mode='overwrite' or mode='append'")
    if is_file:
        raise PlanError(f"{plain(url)} is a file: give a directory, in which the files are created")
    return True


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield slices of a batch of about 8 MiB each, to limit memory."""
    pieces = max(1, -(-size_of(batch) // _SLICE))
    rows = max(1, -(-batch.num_rows // pieces))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


@message
@dataclass(frozen=True)
class RecordFile:
    """File that a task wrote.

    Attributes
    ----------
    temporary : str
        Its temporary URL.
    place : str
        Its final path below the job's directory.
    rows : int
        Number of rows.
    size : int
        Size in bytes, compressed.
    """

    temporary: str
    place: str
    rows: int
    size: int


@message
@dataclass(frozen=True)
class RecordsWritten:
    """Files that a task wrote, and its host."""

    host: str
    files: tuple[RecordFile, ...]


@dataclass(frozen=True)
class WriteJob:
    """One write of a DataFrame.

    Parameters
    ----------
    url : str
        Directory of the files.
    encoding : Encoding
        How rows are encoded.
    name : str
        Unique name of the job. It is part of the names of its files, so two jobs never write the same file.
    dynamic : bool
        Whether an overwrite replaces only the partitions for which there are rows, as Spark's
        ``partitionOverwriteMode=dynamic`` does.
    is_new : bool
        Whether the directory did not exist before this job.
    """

    url: str
    encoding: Encoding
    name: str
    dynamic: bool = False
    is_new: bool = False

    def replaced(self, old: Iterable[str], places: Iterable[str]) -> list[str]:
        """Return the old files that an overwrite removes. ``places`` are the new files; paths are relative."""
        directories = {posixpath.dirname(place) for place in places}
        return [path for path in old if not self.dynamic or posixpath.dirname(path) in directories]

    @property
    def temporary(self) -> str:
        """Directory of files that are not committed yet."""
        return f"{self.url}/_temporary-{self.name}"

    def begin(self) -> WriteJob:
        """Make the temporary directory. Return the job that knows whether its own directory existed before."""
        fs, root = file_system(self.url)
        is_new = not fs.exists(root)
        fs.makedirs(file_system(self.temporary)[1], exist_ok=True)
        return replace(self, is_new=is_new)

    def commit(self, written: Iterable[RecordsWritten], *, overwrite: bool = False) -> None:
        """Move the files to their final paths. With ``overwrite``, then remove the old files.

        Raises
        ------
        FeedFailed
            If a file is not visible on this host.
        """
        fs, root = file_system(self.url)
        written = list(written)
        places = [part.place for task in written for part in task.files]
        there = [posixpath.relpath(path, root) for path in fs.find(root)] if overwrite else []
        mine = f"_temporary-{self.name}"
        old = self.replaced((path for path in there if path.partition("/")[0] != mine), places)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(posixpath.join(root, SUCCESS))
        for task in written:
            for part in task.files:
                self._move(fs, root, part, task.host)
        self._remove(fs, root, [posixpath.join(root, path) for path in old])
        fs.rm(file_system(self.temporary)[1], recursive=True)
        fs.touch(posixpath.join(root, SUCCESS))

    def _move(self, fs: Any, root: str, part: RecordFile, host: str) -> None:
        place = posixpath.join(root, part.place)
        fs.makedirs(posixpath.dirname(place), exist_ok=True)
        try:
            fs.mv(file_system(part.temporary)[1], place)
        except FileNotFoundError:
            raise FeedFailed(
                f"{plain(part.temporary)}, which an executor on {host} wrote, is not visible on "
                f"{socket.gethostname()}: path has to be on a disk that all hosts share, or a URL that fsspec knows"
            ) from None

    def _remove(self, fs: Any, root: str, old: list[str]) -> None:
        directories = set()
        for path in old:
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(path)
            while (path := posixpath.dirname(path)) != root and path.startswith(root):
                directories.add(path)
        for directory in sorted(directories, key=len, reverse=True):
            with contextlib.suppress(OSError, NotImplementedError):
                if not fs.find(directory):
                    fs.rm(directory, recursive=True)

    def abort(self) -> None:
        """Remove the temporary directory, and the job's directory if it was made for this job and is empty."""
        fs, root = file_system(self.url)
        with contextlib.suppress(FileNotFoundError):
            fs.rm(file_system(self.temporary)[1], recursive=True)
        with contextlib.suppress(OSError, NotImplementedError):
            if self.is_new and not fs.ls(root):
                fs.rmdir(root)


def file_name(job: WriteJob, task: int, number: int) -> str:
    """Return the name of a task's file. ``number`` counts the files of the task from 0."""
    ending = ".tfrecord.gz" if job.encoding.gzip else ".tfrecord"
    return f"part-{task:05d}-{job.name}" + (f".{number:03d}" if number else "") + ending


def write_part(job: WriteJob, batches: Iterable[pa.RecordBatch], number: int) -> RecordsWritten:
    """Write the rows of one task into files in the temporary directory, one per partition directory.

    At most 64 files are open at once. If more partitions alternate, a partition gets several files. If the task fails,
    its open files are removed; :meth:`WriteJob.abort` removes the others.
    """
    sinks: dict[str, _Sink] = {}
    parts: list[RecordFile] = []
    try:
        for directory, rows, data in job.encoding.pieces(batches):
            if directory not in sinks:
                parts += _close_to_make_room(sinks)
                sinks[directory] = _Sink(job, directory, (number, len(parts) + len(sinks)))
            sinks[directory].write(data, rows)
        parts += [sink.close() for sink in sinks.values()]
    except BaseException:
        for sink in sinks.values():
            sink.discard()
        raise
    return RecordsWritten(socket.gethostname(), tuple(parts))


def _close_to_make_room(sinks: dict[str, _Sink]) -> list[RecordFile]:
    """Close the file that was opened first, if no more may be open; return the closed files."""
    return [sinks.pop(next(iter(sinks))).close()] if len(sinks) == _OPEN_FILES else []


class _Sink:
    """Open file of a task."""

    def __init__(self, job: WriteJob, directory: str, numbers: tuple[int, int]) -> None:
        name = file_name(job, *numbers)
        self._place = posixpath.join(directory, name)
        self._temporary = f"{job.temporary}/{uuid.uuid4().hex[:8]}-{name}"
        self._zip = zlib.compressobj(wbits=GZIP) if job.encoding.gzip else None
        self._rows = self._size = 0
        self._fs, self._path = file_system(self._temporary)
        try:
            self._file = self._fs.open(self._path, "wb")
        except FileNotFoundError:
            raise FeedFailed(
                f"{plain(job.temporary)}, which the driver made, is not visible on {socket.gethostname()}: path has "
                "to be on a disk that all hosts share, or a URL that fsspec knows"
            ) from None

    def write(self, data: Any, rows: int) -> None:
        self._rows += rows
        self._put(data if self._zip is None else self._zip.compress(data))

    def _put(self, data: Any) -> None:
        self._size += len(data)
        self._file.write(data)

    def close(self) -> RecordFile:
        if self._zip is not None:
            self._put(self._zip.flush())
        self._file.close()
        return RecordFile(self._temporary, self._place, self._rows, self._size)

    def discard(self) -> None:
        """Close and remove the file. Errors are ignored, because the task has already failed."""
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._path)


@dataclass(frozen=True)
class WriteTask:
    """Task for ``mapInArrow`` that writes a partition. It returns one row with an encoded :class:`RecordsWritten`."""

    job: WriteJob

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows of a partition."""
        from pyspark import TaskContext

        context = TaskContext.get()
        written = write_part(self.job, batches, context.partitionId() if context else 0)
        yield pa.record_batch({"written": pa.array([to_wire(written)], pa.binary())})


@dataclass(frozen=True)
class EncodeTask:
    """Task for ``mapInArrow`` that returns the bytes of a partition's files. The driver writes them through Hadoop."""

    encoding: Encoding
    SCHEMA: ClassVar[str] = "number int, directory string, rows bigint, data binary"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row per piece, of the columns in :attr:`SCHEMA`."""
        from pyspark import TaskContext

        context = TaskContext.get()
        number = context.partitionId() if context else 0
        for directory, rows, data in self.encoding.pieces(batches):
            yield pa.record_batch(
                {
                    "number": pa.array([number], pa.int32()),
                    "directory": pa.array([directory]),
                    "rows": pa.array([rows], pa.int64()),
                    "data": pa.array([data.to_pybytes()], pa.binary()),
                }
            )
