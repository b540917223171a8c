"""The rows of an RDD as Arrow record batches.

A DataFrame arrives as Arrow already. An RDD's elements are Python objects: Rows, dictionaries, tuples, or single values;
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


def _column(name: str, records: list[dict[str, Any]], number: int, schema: pa.Schema | None) -> pa.Array:
    for offset, record in enumerate(records):
        if name not in record or len(record) != len(records[0]):
            raise FeedFailed(
                f"row {number + offset} has the columns {sorted(record)}, the rows before it have {sorted(records[0])}"
            )
    values = [record[name] for record in records]
    kind = schema.field(name).type if schema is not None else None
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, OverflowError):
        raise _misfit(name, values, number, kind) from None


def _misfit(name: str, values: list[Any], number: int, kind: pa.DataType | None) -> FeedFailed:
    if kind is None:
        kind = pa.array(values[:1]).type
    for offset, value in enumerate(values):
        try:
            pa.array([value], kind)
        except (pa.ArrowException, TypeError, OverflowError):
            text = repr(value)
            shown = text if len(text) <= 60 else text[:57] + "..."
            return FeedFailed(f"column {name!r}, row {number + offset}: {shown} is a {type(value).__name__}, not {kind}")
    return FeedFailed(f"column {name!r}: the rows from {number} on are not of one type")
