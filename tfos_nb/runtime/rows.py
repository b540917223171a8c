"""The rows of an RDD as Arrow record batches.

A DataFrame arrives as Arrow already. An RDD's elements are Python objects: Rows, dictionaries, tuples, or single
values;
their columns are named as Spark's ``toDF`` would name them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from tfos_nb.errors import FeedFailed

__all__ = ["batches_of_rows"]

_ROWS_PER_BATCH = 1024


def batches_of_rows(rows: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """Turn rows into record batches; the first batch decides the types.

    Raises
    ------
    FeedFailed
        For a row that does not fit the rows before it; the message names the column and the row's number.
    """
    source = iter(rows)
    schema: pa.Schema | None = None
    number = 0
    while chunk := list(itertools.islice(source, _ROWS_PER_BATCH)):
        records = [_record(row) for row in chunk]
        names = schema.names if schema is not None else list(records[0])
        _check_names(names, records, number)
        arrays = [_column(name, records, number, schema) for name in names]
        batch = pa.RecordBatch.from_arrays(arrays, names=names)
        schema = schema or batch.schema
        number += len(chunk)
        yield batch


def _record(row: Any) -> dict[str, Any]:
    if hasattr(row, "asDict"):
        return dict(row.asDict())
    if isinstance(row, dict):
        return {str(name): value for name, value in row.items()}
    if isinstance(row, (tuple, list)):
        return {f"_{position}": value for position, value in enumerate(row, 1)}
    return {"value": row}


def _check_names(names: list[str], records: list[dict[str, Any]], number: int) -> None:
    expected = set(names)
    for offset, record in enumerate(records):
        if record.keys() != expected:
            raise FeedFailed(
                f"row {number + offset} has the columns {sorted(record)}, the rows before it have {sorted(names)}"
            )


def _column(name: str, records: list[dict[str, Any]], number: int, schema: pa.Schema | None) -> pa.Array:
    values = [record[name] for record in records]
    kind = schema.field(name).type if schema is not None else None
    try:
        return _converted(values, kind)
    except (pa.ArrowException, TypeError, OverflowError):
        raise _misfit(name, values, number, kind) from None


def _converted(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    array = pa.array(values, kind)
    if kind is not None and _holds_integers(kind):
        pa.array(values).cast(kind)  # refuses a fraction, which the line above cuts off
    return array


def _holds_integers(kind: pa.DataType) -> bool:
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind))


def _misfit(name: str, values: list[Any], number: int, kind: pa.DataType | None) -> FeedFailed:
    for offset, value in enumerate(values):
        try:
            found = _converted([value], kind).type
        except (pa.ArrowException, TypeError, OverflowError):
            where = f"column {name!r}, row {number + offset}"
            wanted = f"not {kind}" if kind is not None else "which is no number, text, bytes or list of these"
            return FeedFailed(f"{where}: {_short(value)} is a {type(value).__name__}, {wanted}")
        kind = found if kind is None and value is not None else kind
    return FeedFailed(f"column {name!r}: the rows from {number} on are not of one type")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
