"""Paths that only Spark's own Hadoop file systems know: ``hdfs://`` without its native library, ``viewfs://``, ….

Reading: Spark's ``binaryFile`` reads each file whole, and a task takes it apart. Writing: the executors make the bytes,
and the driver, which has the Hadoop client, writes them. So these rows pass through the driver.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from tfos_nb.errors import FeedFailed, PlanError, TfosError
from tfos_nb.runtime.storage.paths import is_hidden
from tfos_nb.runtime.tfrecord.files import SUCCESS, DataFile, inflated, partitions_of, plain
from tfos_nb.runtime.tfrecord.reading import ContentTask, Reading
from tfos_nb.runtime.tfrecord.writing import GZIP, EncodeTask, WriteJob, file_name, may_write
from tfos_nb.tfrecord.outcome import Saved, cause_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


__all__ = ["found", "opener", "read", "write"]

_PIECE = 1 << 20


def _path(spark: SparkSession, url: str, why: str = "") -> tuple[Any, Any]:
    """Return Hadoop's file system of a URL, and its path there."""
    from py4j.protocol import Py4JJavaError

    if not hasattr(spark, "_jvm"):
        raise PlanError(
            f"{plain(url)}: fsspec does not open it ({why}), and Spark Connect has no Hadoop client here; install "
            "fsspec's package for this scheme, or use a classic SparkSession"
        )
    sc = spark.sparkContext
    path = sc._jvm.org.apache.hadoop.fs.Path(url)  # type: ignore[union-attr]
    try:
        return path.getFileSystem(sc._jsc.hadoopConfiguration()), path
    except Py4JJavaError as error:
        reason = str(error.java_exception).partition("\n")[0]
        raise PlanError(
            f"{plain(url)}: neither fsspec ({why}) nor Spark's Hadoop client ({reason}) opens it; correct the URL, or "
            "install fsspec's package for its scheme"
        ) from error


def found(spark: SparkSession, urls: Sequence[str], why: str) -> list[DataFile]:
    """List the files of records at some URLs, as :func:`tfos_nb.runtime.tfrecord.files.found` does."""
    files = []
    for url in urls:
        fs, path = _path(spark, url, why)
        statuses = fs.globStatus(path)
        if not statuses:
            raise PlanError(f"{plain(url)}: no such path exists; correct it, or write the files first")
        for status in statuses:
            files += _under(fs, status)
    return files


def _under(fs: Any, status: Any) -> list[DataFile]:
    root = status.getPath().toString()
    if not status.isDirectory():
        return [DataFile(root, int(status.getLen()))]
    listed = fs.listFiles(status.getPath(), True)
    files = []
    while listed.hasNext():
        one = listed.next()
        url = one.getPath().toString()
        inside = url[len(root) :].strip("/").split("/")
        if one.getLen() and not any(map(is_hidden, inside)):
            files.append(DataFile(url, int(one.getLen()), partitions_of(inside[:-1])))
    return sorted(files, key=lambda file: file.url)


class _Stream(io.RawIOBase):
    """A file that Hadoop reads."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise OSError("this stream can only be read from the beginning")
        self._stream.seek(offset)
        return offset

    def readinto(self, buffer: Any) -> int:
        data = bytes(self._stream.readNBytes(min(len(buffer), _PIECE)))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def opener(spark: SparkSession) -> Callable[[str], BinaryIO]:
    """Return what opens a file on the driver."""

    def opened(url: str) -> BinaryIO:
        fs, path = _path(spark, url)
        return inflated(io.BufferedReader(_Stream(fs.open(path))))

    return opened


def read(spark: SparkSession, files: Sequence[DataFile], reading: Reading, schema: StructType) -> DataFrame:
    """Read files that Spark opens itself."""
    if not files:
        return spark.createDataFrame([], schema)
    content = spark.read.format("binaryFile").load([file.url for file in files]).select("path", "content")
    return content.mapInArrow(ContentTask(reading, {file.url: file for file in files}), schema)


def write(frame: DataFrame, job: WriteJob, mode: str, why: str) -> Saved:
    """Write through the driver."""
    fs, root = _path(frame.sparkSession, job.url, why)
    there = bool(fs.exists(root))
    if not may_write(there, there and fs.getFileStatus(root).isFile(), mode, job.url):
        return Saved(job.url, 0, 0, 0)
    under_way = _UnderWay(fs, root, job)
    try:
        for piece in frame.mapInArrow(EncodeTask(job.encoding), EncodeTask.SCHEMA).toLocalIterator():
            under_way.take(*piece)
        under_way.commit(overwrite=mode == "overwrite")
    except BaseException as error:
        under_way.abort(whole=not there)
        if isinstance(error, TfosError) or not isinstance(error, Exception):
            raise
        raise FeedFailed(f"{plain(job.url)} was not written: {cause_of(error)}") from error
    return Saved(job.url, len(under_way.places), under_way.rows, under_way.size)


class _UnderWay:
    """Files that the driver writes: temporary ones at first, which are renamed at the end."""

    def __init__(self, fs: Any, root: Any, job: WriteJob) -> None:
        self.places: list[tuple[Any, Any]] = []
        self.rows = self.size = 0
        self._fs, self._root, self._job = fs, root, job
        self._temporary = self._at(root, f"_temporary-{job.name}")
        self._open: dict[str, tuple[Any, Any]] = {}
        self._number = -1
        fs.mkdirs(self._temporary)

    def _at(self, base: Any, name: str) -> Any:
        return self._fs.makeQualified(base).suffix("/" + name)

    def take(self, number: int, directory: str, rows: int, data: Any) -> None:
        """Write a piece of the rows of one of Spark's partitions, which come one after the other."""
        if number != self._number:
            self._close()
            self._number = number
        if directory not in self._open:
            name = file_name(self._job, number, len(self.places))
            temporary = self._at(self._temporary, name)
            place = self._at(self._root, f"{directory}/{name}" if directory else name)
            self.places.append((temporary, place))
            zipper = zlib.compressobj(wbits=GZIP) if self._job.encoding.gzip else None
            self._open[directory] = (self._fs.create(temporary, True), zipper)
        stream, zipper = self._open[directory]
        self.rows += rows
        self._put(stream, bytes(data) if zipper is None else zipper.compress(data))

    def _put(self, stream: Any, data: bytes) -> None:
        self.size += len(data)
        for start in range(0, len(data), _PIECE):
            stream.write(bytearray(data[start : start + _PIECE]))

    def _close(self) -> None:
        for stream, zipper in self._open.values():
            if zipper is not None:
                self._put(stream, zipper.flush())
            stream.close()
        self._open = {}

    def commit(self, *, overwrite: bool) -> None:
        """Give the files their names."""
        self._close()
        marker = self._at(self._root, SUCCESS)
        there = self._there() if overwrite else {}
        places = [self._below(place) for _, place in self.places]
        old = [there[name] for name in self._job.replaced(there, places)]
        self._fs.delete(marker, False)
        for temporary, place in self.places:
            self._fs.mkdirs(place.getParent())
            if not self._fs.rename(temporary, place):
                raise FeedFailed(
                    f"{plain(place.toString())}: Hadoop did not rename the file to this name; check that no other job "
                    "writes there, and write again"
                )
        for path in old:
            self._fs.delete(path, False)
        self._fs.delete(self._temporary, True)
        self._fs.create(marker, True).close()

    def _there(self) -> dict[str, Any]:
        """Return the files that exist already, by their names below the directory."""
        listed = self._fs.listFiles(self._root, True)
        paths = {}
        while listed.hasNext():
            path = listed.next().getPath()
            if path.getParent().getName() != self._temporary.getName():
                paths[self._below(path)] = path
        return paths

    def _below(self, path: Any) -> str:
        root = self._fs.makeQualified(self._root).toUri().getPath()
        return str(self._fs.makeQualified(path).toUri().getPath())[len(root) :].lstrip("/")

    def abort(self, *, whole: bool) -> None:
        """Remove the written files."""
        for stream, _ in self._open.values():
            with contextlib.suppress(Exception):
                stream.close()
        self._fs.delete(self._root if whole else self._temporary, True)
