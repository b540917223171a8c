"""``dfutil``: DataFrames as TFRecord files, and rows as Examples, under TensorFlowOnSpark's names.

:mod:`tfos_nb.tfrecord` implements it, and offers more: modes, partitions, damaged files, declared schemas.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from tfos_nb import tfrecord
from tfos_nb.compat.TFCluster import check_context
from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.tfrecord.fields import Field, Kind, RecordType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row
    from pyspark.sql.types import StructType

__all__ = [
    "fromTFExample", "infer_schema", "isLoadedDF", "loadTFRecords", "loadedDF", "saveAsTFRecords", "toTFExample",
]  # fmt: skip

loadedDF: MutableMapping[Any, str] = weakref.WeakKeyDictionary()  # noqa: N816 - its name
"""Input directories of the DataFrames of :func:`loadTFRecords` that are still in use."""

_ROWS = 1024  # number of rows that are converted at a time


def saveAsTFRecords(df: DataFrame, output_dir: str) -> None:  # noqa: N802 - its name
    """Write a DataFrame as TFRecord files. An existing directory is refused, as in Hadoop."""
    tfrecord.write(df, _whole(df.sparkSession.sparkContext, output_dir))


def loadTFRecords(sc: Any, input_dir: str, binary_features: Sequence[str] = ()) -> DataFrame:  # noqa: N802 - its name
    """Read TFRecord files as a DataFrame: numbers as ``bigint`` and ``double``, bytes as ``string``.

    Parameters
    ----------
    sc : pyspark.SparkContext
        The SparkContext.
    input_dir : str
        The directory. Without a scheme it is on Hadoop's default file system.
    binary_features : list of str
        Columns of bytes to read as ``binary``. A column of bytes that are not text in a sample of the records is read
        as ``binary`` too.

    Raises
    ------
    PlanError
        If there are no files, or the records disagree about a column.
    """
    check_context(sc)
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructField, StructType

    spark, path = SparkSession(sc), _whole(sc, input_dir)
    found = tfrecord.infer_schema(spark, path)
    fields = [StructField(one.name, _lineage_type(one.dataType, one.name in binary_features)) for one in found]
    frame = tfrecord.read(spark, path, schema=StructType(fields), sample=0)
    loadedDF[frame] = input_dir
    return frame


def isLoadedDF(df: DataFrame) -> bool:  # noqa: N802 - its name
    """Return whether this DataFrame object was returned by :func:`loadTFRecords`."""
    return df in loadedDF


def toTFExample(dtypes: Sequence[tuple[str, str]]) -> Callable[[Iterable[Any]], Iterator[tuple[bytearray, None]]]:  # noqa: N802 - its name
    """Return a function for ``mapPartitions`` that converts rows to ``(bytearray of an Example, None)``.

    Parameters
    ----------
    dtypes : list of (str, str)
        Names and types of the columns, from ``df.dtypes``.

    Raises
    ------
    PlanError
        If an Example cannot contain a type.
    """
    from tfos_nb.runtime.tfrecord.schema import fields_of

    schema = {"fields": [{"name": name, "type": _parsed_type(kind)} for name, kind in dtypes]}
    return _ToExamples(fields_of(schema, RecordType.EXAMPLE))


def fromTFExample(iter: Iterable[Any], binary_features: Sequence[str] = ()) -> list[Row]:  # noqa: N802 - its name
    """Convert ``(bytes of an Example, anything)`` to rows with columns sorted by name, for ``mapPartitions``.

    A feature with one value becomes that value, with several values a list, and without a value None. Bytes become
    text, or a bytearray if the feature is in ``binary_features``.

    Raises
    ------
    FeedFailed
        If a record is not an Example, or bytes are not text.
    """
    records, rows = (bytes(record[0]) for record in iter), []
    while some := list(islice(records, _ROWS)):
        rows += _rows(some, frozenset(binary_features))
    return rows


def infer_schema(example: Any, binary_features: Sequence[str] = ()) -> StructType:
    """Return the schema of one ``tf.train.Example`` by the rules of :func:`fromTFExample`.

    A feature without a value becomes a string column.
    """
    from pyspark.sql.types import ArrayType, BinaryType, DataType, DoubleType, LongType, StringType, StructType

    struct = StructType()
    for name, feature in sorted(example.features.feature.items()):
        kind = feature.WhichOneof("kind") or "bytes_list"
        text: DataType = BinaryType() if name in binary_features else StringType()
        element = {"int64_list": LongType(), "float_list": DoubleType()}.get(kind, text)
        values = getattr(feature, kind).value
        struct.add(name, ArrayType(element) if len(values) > 1 else element if len(values) else StringType())
    return struct


def _whole(sc: Any, path: str) -> str:
    """Return a path qualified by Hadoop, on its default file system if the path has no scheme."""
    there = sc._jvm.org.apache.hadoop.fs.Path(str(path))
    return str(there.getFileSystem(sc._jsc.hadoopConfiguration()).makeQualified(there).toString())


def _lineage_type(kind: Any, binary: bool) -> Any:
    """Return TensorFlowOnSpark's type for an inferred type: double for float, binary for a string if ``binary``."""
    from pyspark.sql.types import ArrayType, BinaryType, DoubleType, FloatType, StringType

    if isinstance(kind, ArrayType):
        return ArrayType(_lineage_type(kind.elementType, binary))
    if isinstance(kind, FloatType):
        return DoubleType()
    return BinaryType() if binary and isinstance(kind, StringType) else kind


def _parsed_type(kind: str) -> Any:
    """Convert a type in ``df.dtypes`` to the form of Spark's JSON schemas."""
    if kind.startswith("array<") and kind.endswith(">"):
        return {"type": "array", "elementType": _parsed_type(kind[len("array<") : -1])}
    return kind


@dataclass(frozen=True)
class _ToExamples:
    """Function that converts a partition's rows to Examples."""

    fields: tuple[Field, ...]

    def __call__(self, rows: Iterable[Any]) -> Iterator[tuple[bytearray, None]]:
        import pyarrow as pa

        from tfos_nb.runtime.tfrecord.encode import encode

        rows = iter(rows)
        while some := list(islice(rows, _ROWS)):
            columns = [pa.array([row[place] for row in some], one.arrow) for place, one in enumerate(self.fields)]
            batch = pa.RecordBatch.from_arrays(columns, names=[one.name for one in self.fields])
            for record in encode(batch, self.fields).to_pylist():
                yield bytearray(record), None


def _rows(records: list[bytes], binary: frozenset[str]) -> list[Row]:
    import numpy as np
    from pyspark.sql import Row

    from tfos_nb.runtime.tfrecord.framing import PAD
    from tfos_nb.runtime.tfrecord.parse import parse

    ends = np.cumsum([len(record) for record in records], dtype=np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    parsed = parse(b"".join([*records, PAD]), starts, ends, RecordType.EXAMPLE)
    for number, why in parsed.bad.items():
        raise FeedFailed(f"fromTFExample: {records[number]!r:.60}: {why}")
    found: list[dict[str, Any]] = [{} for _ in records]
    for name, kinds in sorted(parsed.features.items()):
        for lists in kinds:
            values = _values(name, lists, name in binary)
            ends_at = np.cumsum(lists.counts).tolist()
            for row, count, end in zip(lists.rows.tolist(), lists.counts.tolist(), ends_at, strict=True):
                several = values[end - count : end]
                found[row][name] = several if count > 1 else several[0] if count else None
    return [Row(**one) for one in found]


def _values(name: str, lists: Any, binary: bool) -> list[Any]:
    values: list[Any] = lists.values.tolist()
    if lists.kind is not Kind.BYTES:
        return values
    try:
        return [bytearray(value) if binary else value.decode() for value in values]
    except UnicodeDecodeError:
        raise FeedFailed(
            f"fromTFExample: feature {name!r} has bytes that are not text: set binary_features=[{name!r}]"
        ) from None
