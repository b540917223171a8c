"""``dfutil``: DataFrames as TFRecord files, and rows as Examples, as TensorFlowOnSpark calls it.

All of it is :mod:`tfos_nb.tfrecord`, which has more: modes, partitions, damage, declared schemas.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from tfos_nb import tfrecord
from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.runtime.tfrecord.fields import Field, Kind, RecordType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row
    from pyspark.sql.types import StructType

__all__ = [
    "fromTFExample", "infer_schema", "isLoadedDF", "loadTFRecords", "loadedDF", "saveAsTFRecords", "toTFExample",
]  # fmt: skip

loadedDF: MutableMapping[Any, str] = weakref.WeakKeyDictionary()  # noqa: N816 - its name
"""Where the DataFrames of :func:`loadTFRecords` that are still in use came from."""

_ROWS = 1024  # that become Examples, or come from them, at once


def saveAsTFRecords(df: DataFrame, output_dir: str) -> None:  # noqa: N802 - its name
    """Write a DataFrame as TFRecord files; a directory that is there is refused, as Hadoop refuses it."""
    tfrecord.write(df, _whole(df.sparkSession.sparkContext, output_dir))


def loadTFRecords(sc: Any, input_dir: str, binary_features: Sequence[str] = ()) -> DataFrame:  # noqa: N802 - its name
    """Read TFRecord files as a DataFrame: numbers as ``bigint`` and ``double``, bytes as ``string``.

    Parameters
    ----------
    sc : pyspark.SparkContext
        Spark's.
    input_dir : str
        The directory; where it has no scheme it is on Hadoop's default file system.
    binary_features : list of str
        Columns of bytes to have as ``binary``. So are those of which a sample of the records has bytes that are no
        text.

    Raises
    ------
    PlanError
        If nothing is there, or the records disagree about a column.
    """
    if not hasattr(sc, "parallelize"):
        raise PlanError(f"sc is a {type(sc).__name__}, not a SparkContext: give spark.sparkContext")
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructField, StructType

    spark, path = SparkSession(sc), _whole(sc, input_dir)
    found = tfrecord.infer_schema(spark, path)
    fields = [StructField(one.name, _lineage_type(one.dataType, one.name in binary_features)) for one in found]
    frame = tfrecord.read(spark, path, schema=StructType(fields), sample=0)
    loadedDF[frame] = input_dir
    return frame


def isLoadedDF(df: DataFrame) -> bool:  # noqa: N802 - its name
    """Whether :func:`loadTFRecords` returned this very DataFrame."""
    return df in loadedDF


def toTFExample(dtypes: Sequence[tuple[str, str]]) -> Callable[[Iterable[Any]], Iterator[tuple[bytearray, None]]]:  # noqa: N802 - its name
    """Return what turns rows into ``(bytearray, None)``, the bytes being those of an Example: for ``mapPartitions``.

    Parameters
    ----------
    dtypes : list of (str, str)
        ``df.dtypes``.

    Raises
    ------
    PlanError
        If an Example has no place for a type.
    """
    from tfos_nb.runtime.tfrecord.schema import fields_of

    schema = {"fields": [{"name": name, "type": _parsed_type(kind)} for name, kind in dtypes]}
    return _ToExamples(fields_of(schema, RecordType.EXAMPLE))


def fromTFExample(iter: Iterable[Any], binary_features: Sequence[str] = ()) -> list[Row]:  # noqa: N802 - its name
    """Return the rows of ``(bytes of an Example, anything)``, their columns sorted by name: for ``mapPartitions``.

    A feature of one value is that value, one of several a list, one of none None. Bytes are text, and a bytearray if
    ``binary_features`` names them.

    Raises
    ------
    FeedFailed
        If a record is no Example, or bytes are no text.
    """
    records, rows = (bytes(record[0]) for record in iter), []
    while some := list(islice(records, _ROWS)):
        rows += _rows(some, frozenset(binary_features))
    return rows


def infer_schema(example: Any, binary_features: Sequence[str] = ()) -> StructType:
    """Return the schema of one ``tf.train.Example``, by the rules of :func:`fromTFExample`; no value is a string."""
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
    """Return a path as Hadoop finds it: on its default file system, if no other is named."""
    there = sc._jvm.org.apache.hadoop.fs.Path(str(path))
    return str(there.getFileSystem(sc._jsc.hadoopConfiguration()).makeQualified(there).toString())


def _lineage_type(kind: Any, binary: bool) -> Any:
    """Return the type that TensorFlowOnSpark gives what is inferred as another."""
    from pyspark.sql.types import ArrayType, BinaryType, DoubleType, FloatType, StringType

    if isinstance(kind, ArrayType):
        return ArrayType(_lineage_type(kind.elementType, binary))
    if isinstance(kind, FloatType):
        return DoubleType()
    return BinaryType() if binary and isinstance(kind, StringType) else kind


def _parsed_type(kind: str) -> Any:
    """Return a type of ``df.dtypes`` as Spark's JSON nests it."""
    if kind.startswith("array<") and kind.endswith(">"):
        return {"type": "array", "elementType": _parsed_type(kind[len("array<") : -1])}
    return kind


@dataclass(frozen=True)
class _ToExamples:
    """Turns a partition's rows into Examples."""

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
