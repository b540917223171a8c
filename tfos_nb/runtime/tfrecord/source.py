"""The data source ``tfrecord`` of Spark 4: ``spark.read.format("tfrecord")`` and ``df.write.format("tfrecord")``.

Spark uses it for planning in a Python process beside the driver, and for reading and writing in the executors'
processes. Its options are those of :func:`tfos_nb.tfrecord.read` and :func:`tfos_nb.tfrecord.write`, as text. An option
that TensorFlow's connector also has keeps the connector's name.

================== =========================================================================
``recordType``     ``Example`` or ``SequenceExample``
``mode``           reading: ``fail`` or ``skip``
``badColumn``      reading with ``skip``: the column that describes the damage
``binary``         reading without a schema: columns of bytes, separated by commas
``sample``         reading: about how many records to sample
``lengths``        the lengths of arrays, as JSON: ``{"pixels": 64}``
``partitionBy``    writing: columns that become directories, separated by commas
``compression``    writing: ``gzip``; also called ``codec``
================== =========================================================================
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from tfos_nb.errors import PlanError, near
from tfos_nb.runtime.tfrecord.files import DataFile, NoFileSystem, absolute, file_system, found, open_file
from tfos_nb.runtime.tfrecord.plan import SAMPLE, Asked, ask, plan
from tfos_nb.runtime.tfrecord.reading import Reading, fitted, read_batches, shares
from tfos_nb.runtime.tfrecord.schema import record_type_of
from tfos_nb.runtime.tfrecord.writing import RecordsWritten, WriteJob, encoding_of, may_write, write_part

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["TFRecordSource"]

_OPTIONS = {
    "path", "paths", "recordtype", "mode", "badcolumn", "binary", "sample", "lengths", "partitionby", "compression",
    "codec", "partitionoverwritemode",
}  # fmt: skip
_TASKS = 64  # a data source cannot ask Spark how many tasks run at once


class TFRecordSource(DataSource):
    """Data source ``tfrecord`` for ``spark.dataSource.register`` (PySpark 4's ``pyspark.sql.datasource``)."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "tfrecord"

    def schema(self) -> StructType:
        """Return the schema, inferred from a sample of the records."""
        from pyspark.sql.types import StructType

        return StructType.fromJson(plan(self._asked(None), self._files(), open_file).schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for a declared or inferred schema."""
        files = self._files()
        return _Source(plan(self._asked(schema.jsonValue()), files, open_file).reading, files, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the writer, which writes temporary files and renames them when all tasks have succeeded."""
        chosen = self._chosen()
        encoding = encoding_of(
            schema.jsonValue(),
            record_type_of(chosen.get("recordtype", "Example")),
            _words(chosen.get("partitionby")),
            compression=chosen.get("compression", chosen.get("codec")),
            lengths=_lengths(chosen),
        )
        (url,) = self._paths()
        try:
            fs, root = file_system(url)
        except NoFileSystem as error:
            raise _through_spark("write(df, path)", error) from error
        may_write(fs.exists(root), fs.exists(root) and not fs.isdir(root), "overwrite" if overwrite else "append", url)
        return _Sink(WriteJob(url, encoding, uuid.uuid4().hex[:12], _is_dynamic(chosen)), overwrite)

    def _chosen(self) -> dict[str, str]:
        chosen = {str(name).lower(): str(value) for name, value in dict(self.options).items()}
        for name in chosen:
            if name not in _OPTIONS:
                raise PlanError(f"option {name!r}: no such option{near(name, sorted(_OPTIONS))}")
        return chosen

    def _paths(self) -> list[str]:
        chosen = self._chosen()
        paths = [chosen["path"]] if "path" in chosen else json.loads(chosen.get("paths", "[]"))
        if not paths:
            raise PlanError("no path: spark.read.format('tfrecord').load(PATH), df.write.format('tfrecord').save(PATH)")
        return [absolute(path) for path in paths]

    def _files(self) -> list[DataFile]:
        try:
            return [file for path in self._paths() for file in found(path)]
        except NoFileSystem as error:
            raise _through_spark("read(spark, path)", error) from error

    def _asked(self, schema: dict[str, Any] | None) -> Asked:
        chosen = self._chosen()
        sample = chosen.get("sample", str(SAMPLE))
        return ask(
            schema=schema,
            record_type=chosen.get("recordtype", "Example"),
            mode=chosen.get("mode", "fail").lower(),
            bad_column=chosen.get("badcolumn", ""),
            binary=() if schema is not None else _words(chosen.get("binary")),
            lengths=_lengths(chosen),
            sample=int(sample) if sample.isdecimal() else sample,
        )


def _is_dynamic(chosen: Mapping[str, str]) -> bool:
    mode = chosen.get("partitionoverwritemode", "static").lower()
    if mode not in ("static", "dynamic"):
        raise PlanError(f"option partitionOverwriteMode must be 'static' or 'dynamic', got {mode!r}")
    return mode == "dynamic" and bool(_words(chosen.get("partitionby")))


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _lengths(chosen: Mapping[str, str]) -> Any:
    try:
        return json.loads(chosen.get("lengths", "null"))
    except ValueError:
        raise PlanError(f'option lengths={chosen["lengths"]!r}: must be JSON such as {{"pixels": 64}}') from None


def _through_spark(call: str, error: NoFileSystem) -> PlanError:
    return PlanError(
        f"fsspec does not open this path ({error}): tfos_nb.tfrecord.{call} goes through Spark's own Hadoop"
    )


class _Share(InputPartition):
    """Files of one task."""

    def __init__(self, files: Sequence[DataFile]) -> None:
        super().__init__(tuple(files))


@dataclass
class _Source(DataSourceReader):
    reading: Reading
    files: list[DataFile]
    schema: StructType

    def partitions(self) -> Sequence[InputPartition]:
        return [_Share(share) for share in shares(self.files, _TASKS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from pyspark.sql.pandas.types import to_arrow_schema

        schema = to_arrow_schema(self.schema)
        for file in partition.value or ():
            with open_file(file.url) as stream:
                for batch in read_batches(self.reading, file, stream):
                    yield fitted(batch, schema)


@dataclass
class _Message(WriterCommitMessage):
    written: RecordsWritten


@dataclass
class _Sink(DataSourceArrowWriter):
    job: WriteJob
    overwrite: bool

    def __post_init__(self) -> None:
        self.job = self.job.begin()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from pyspark import TaskContext

        context = TaskContext.get()
        return _Message(write_part(self.job, iterator, context.partitionId() if context else 0))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.job.commit([one.written for one in messages if isinstance(one, _Message)], overwrite=self.overwrite)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.job.abort()
