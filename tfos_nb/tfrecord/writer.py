"""Write a DataFrame as TFRecord files."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import FeedFailed, PlanError, TfosError, near
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.tfrecord.files import NoFileSystem, absolute, file_system, plain
from tfos_nb.runtime.tfrecord.schema import record_type_of
from tfos_nb.runtime.tfrecord.writing import RecordsWritten, WriteJob, WriteTask, encoding_of, may_write
from tfos_nb.spark.tfrecord_source import register_if_possible
from tfos_nb.tfrecord import hadoop
from tfos_nb.tfrecord.outcome import Saved, cause_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["write"]

_MODES = {"error": "errorifexists", "default": "errorifexists"}
_KNOWN = ("append", "overwrite", "errorifexists", "ignore")


def write(
    df: DataFrame,
    path: Any,
    *,
    mode: str = "errorifexists",
    record_type: str = "Example",
    partition_by: str | Sequence[str] = (),
    compression: str | None = None,
    lengths: Mapping[str, int] | None = None,
) -> Saved:
    """Write a DataFrame as TFRecord files, one for each of its partitions that has rows.

    Tasks write temporary files. They are renamed when all tasks have ended, ``_SUCCESS`` last, so a job that fails
    changes no existing file. A null in a row is left out of that row's record.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Columns of float, double, boolean, byte, short, int, long, string or binary, or arrays of them; with
        ``record_type="SequenceExample"`` arrays of arrays too, which become feature lists. Records have float32 and
        int64 alone: doubles are rounded.
    path : str or path
        A directory that all executors reach: a path of a shared disk, or a URL. URLs that fsspec does not support are
        written by Spark's own Hadoop file system, through the driver.
    mode : str
        What to do if the path exists: ``errorifexists`` (or ``error``), ``append``, ``overwrite``, ``ignore``. With
        ``partition_by``, ``overwrite`` obeys Spark's setting ``spark.sql.sources.partitionOverwriteMode``: where it is
        ``dynamic``, only the partitions that are written are replaced.
    record_type : str
        ``Example`` or ``SequenceExample``.
    partition_by : str or sequence of str
        Columns (string, whole number, boolean, date) whose values become directories ``column=value`` and are left out
        of the records.
    compression : str, optional
        ``gzip``. TensorFlow then needs an argument: ``TFRecordDataset(files, compression_type="GZIP")``.
    lengths : mapping of str to int, optional
        The required number of values in the arrays of a column.

    Returns
    -------
    Saved
        How many files, rows and bytes.

    Raises
    ------
    PlanError
        If a record cannot hold a column's type, a parameter is wrong, or the path exists already. Raised before any
        row is computed.
    FeedFailed
        If a row cannot be computed or written.

    Examples
    --------
    >>> write(df, "digits", mode="overwrite", lengths={"pixels": 64})  # doctest: +SKIP
    Saved(path='/home/me/digits', files=4, rows=1797, size=493562)
    """
    if not hasattr(df, "mapInArrow"):
        raise PlanError(f"df must be a Spark DataFrame, such as spark.createDataFrame(…), got a {type(df).__name__}")
    if getattr(df, "isStreaming", False):
        raise PlanError("a streaming DataFrame has no end: write each batch, stream.writeStream.foreachBatch(…)")
    chosen = _mode(mode)
    partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
    encoding = encoding_of(
        df.schema.jsonValue(), record_type_of(record_type), partition_by, compression=compression, lengths=lengths
    )
    register_if_possible(df.sparkSession)
    url = absolute(path)
    job = WriteJob(url, encoding, uuid.uuid4().hex[:12], bool(partition_by) and _is_dynamic(df))
    try:
        fs, root = file_system(url)
    except NoFileSystem as error:
        return hadoop.write(_sorted(df, partition_by), job, chosen, str(error))
    if not may_write(fs.exists(root), fs.exists(root) and not fs.isdir(root), chosen, url):
        return Saved(url, 0, 0, 0)
    return _run(_sorted(df, partition_by), job, overwrite=chosen == "overwrite")


def _mode(mode: Any) -> str:
    chosen = _MODES.get(str(mode).lower(), str(mode).lower())
    if chosen not in _KNOWN:
        raise PlanError(f"mode must be {', '.join(_KNOWN[:-1])} or {_KNOWN[-1]}, got {mode!r}{near(str(mode), _KNOWN)}")
    return chosen


def _is_dynamic(df: DataFrame) -> bool:
    """Whether Spark is to replace only the partitions that are written, where it overwrites."""
    return str(df.sparkSession.conf.get("spark.sql.sources.partitionOverwriteMode", "static")).lower() == "dynamic"


def _sorted(df: DataFrame, partition_by: Sequence[str]) -> DataFrame:
    """Rename the columns by position, and bring the rows of each directory together, so that few files are open."""
    # Spark's own look-up by name fails for a dot in a name.
    frame = df.toDF(*(f"c{number}" for number in range(len(df.columns))))
    places = [f"c{df.columns.index(name)}" for name in partition_by]
    return frame.sortWithinPartitions(*places) if places else frame


def _run(frame: DataFrame, job: WriteJob, *, overwrite: bool) -> Saved:
    job = job.begin()
    try:
        rows = frame.mapInArrow(WriteTask(job), "written binary").collect()
        written = [wire.decode(bytes(row[0])) for row in rows]
        job.commit(written, overwrite=overwrite)
    except BaseException as error:
        job.abort()
        if isinstance(error, TfosError) or not isinstance(error, Exception):
            raise
        raise FeedFailed(f"{plain(job.url)} was not written: {cause_of(error)}") from error
    files = [file for task in written if isinstance(task, RecordsWritten) for file in task.files]
    return Saved(job.url, len(files), sum(file.rows for file in files), sum(file.size for file in files))
