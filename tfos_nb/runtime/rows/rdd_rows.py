"""Convert the rows of an RDD to Arrow record batches, and measure the size of Spark's batches.

The rows of a DataFrame arrive as Arrow batches. An RDD's elements are Python objects: Rows, dictionaries, tuples, or
single values. Their columns are named as Spark's ``toDF`` names them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from tfos_nb.errors import FeedFailed

__all__ = ["KIND_KEY", "batches_of_rows", "size_of"]

KIND_KEY = b"tfos_nb.rows"
"""Metadata key of a schema for the rows' class: ``value``, ``array``, ``tuple``, ``list``, ``dict`` or ``row``."""

_ROWS_PER_BATCH = 1024
_NO_DATA = (
    "which is no number, text, bytes or list of these; a list's values are of one type. Convert it in the RDD's map: a "
    "tuple of several types, say, into fields of the row"
)


def size_of(batch: pa.RecordBatch) -> int:
    """Return the size in bytes of a batch that was received from Spark.

    ``batch.nbytes`` would crash the process: it reads the offsets of nested lists, which Spark 3.5 does not send if all
    outer lists are empty.
    """
    return int(batch.get_total_buffer_size())


def batches_of_rows(rows: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """Yield rows as record batches of up to 1024 rows. The first batch determines the types.

    Raises
    ------
    FeedFailed
        For a row whose columns or types are not those of the rows before it. The message names the column and the
        row's number in the partition, from 0.

    Examples
    --------
    >>> [batch] = batches_of_rows([(1, "a"), (2, "b")])
    >>> batch.to_pydict()
    {'_1': [1, 2], '_2': ['a', 'b']}
    """
    source = iter(rows)
    schema: pa.Schema | None = None
    number = 0
    while chunk := list(itertools.islice(source, _ROWS_PER_BATCH)):
        records = [_record(row) for row in chunk]
        names = schema.names if schema is not None else list(records[0])
        _check_names(names, records, number)
        arrays = [_column(name, records, number, schema) for name in names]
        if schema is None:
            fields = [pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)]
            schema = pa.schema(fields, {KIND_KEY: _kind_of(chunk[0])})
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        number += len(chunk)
        yield batch


def _record(row: Any) -> dict[str, Any]:
    if hasattr(row, "asDict"):
        return dict(row.asDict())
    if _is_namedtuple(row):
        return dict(row._asdict())
    if isinstance(row, dict):
        return row
    if isinstance(row, (tuple, list)):
        return {f"_{position}": value for position, value in enumerate(row, 1)}
    return {"value": row}


def _is_namedtuple(row: Any) -> bool:
    return isinstance(row, tuple) and hasattr(row, "_asdict")


def _kind_of(row: Any) -> str:
    if hasattr(row, "asDict") or _is_namedtuple(row):
        return "row"
    kinds = ((dict, "dict"), (tuple, "tuple"), (list, "list"))
    plain = "array" if hasattr(row, "__array__") and getattr(row, "shape", None) else "value"
    return next((name for kind, name in kinds if isinstance(row, kind)), plain)


def _check_names(names: list[Any], records: list[dict[Any, Any]], number: int) -> None:
    expected = set(names)
    wrong = next((name for name in names if not isinstance(name, str)), None)
    if wrong is not None:
        raise FeedFailed(
            f"row {number} is a dictionary with the key {wrong!r}: keys are names of columns, so they must be text. "
            "Make them so in the RDD's map, {str(key): value}, or feed tuples"
        )
    for offset, record in enumerate(records):
        if record.keys() != expected:
            found = sorted(map(str, record))
            raise FeedFailed(
                f"row {number + offset} has the columns {found}, the rows before it have {sorted(names)}: give all "
                "rows the same columns"
            )


def _column(name: str, records: list[dict[str, Any]], number: int, schema: pa.Schema | None) -> pa.Array:
    values = [record[name] for record in records]
    kind = schema.field(name).type if schema is not None else None
    try:
        return _converted(values, kind)
    except (pa.ArrowException, TypeError, OverflowError):
        raise _misfit(name, values, number, kind) from None


def _converted(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    try:
        array = pa.array(values, kind)
    except pa.ArrowInvalid:
        if not any(getattr(value, "ndim", 0) > 1 for value in values):
            raise
        values = [_nested(value) for value in values]  # Arrow does not convert arrays of several axes, such as pictures
        array = pa.array(values, kind)
    if kind is not None and _holds_integers(kind):
        pa.array(values).cast(kind)  # raises for a fraction, which the line above truncates
    return array


def _nested(value: Any) -> Any:
    """Return an array of several axes as nested lists of arrays of one axis, so that its numbers keep their type."""
    return [_nested(part) for part in value] if getattr(value, "ndim", 0) > 1 else value


def _holds_integers(kind: pa.DataType) -> bool:
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind))


def _misfit(name: str, values: list[Any], number: int, kind: pa.DataType | None) -> FeedFailed:
    kind = kind or _usual_kind(values)
    for offset, value in enumerate(values):
        try:
            found = _converted([value], kind).type
        except (pa.ArrowException, TypeError, OverflowError):
            where = f"column {name!r}, row {number + offset}"
            wanted = f"not {kind}" if kind is not None else _NO_DATA
            return FeedFailed(f"{where}: {_short(value)} is a {type(value).__name__}, {wanted}")
        kind = found if kind is None and value is not None else kind
    return FeedFailed(f"column {name!r}: the rows from {number} on are not of one type")


def _usual_kind(values: list[Any]) -> pa.DataType | None:
    """Return the Arrow type of most values, because the first value may be the wrong one."""
    kinds = Counter(type(value) for value in values if value is not None)
    for kind, _ in kinds.most_common():
        try:
            return _converted([next(value for value in values if type(value) is kind)], None).type
        except (pa.ArrowException, TypeError, OverflowError):
            continue
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
