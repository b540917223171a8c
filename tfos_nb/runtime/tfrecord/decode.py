"""Convert parsed features to Arrow columns of the declared types, with null for a missing feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.runtime.tfrecord.fields import ELEMENTS, Field, Kind, RecordError, arrow_schema
from tfos_nb.runtime.tfrecord.parse import Lists, Nested, Parsed
from tfos_nb.runtime.tfrecord.spans import Ints

__all__ = ["columns"]

_ADVICE = {Kind.INT: "bigint", Kind.FLOAT: "float", Kind.BYTES: "string or binary"}


def columns(parsed: Parsed, fields: Sequence[Field]) -> pa.RecordBatch:
    """Return the features of records as a batch. A bad record becomes a row of nulls.

    Raises
    ------
    RecordError
        If a feature does not fit the declared type. Its ``row`` is the number of the record.
    """
    arrays = []
    for field in fields:
        if field.depth == 2:
            arrays.append(_nested(field, parsed.lists.get(field.name), parsed.rows))
        else:
            arrays.append(_column(field, parsed.features.get(field.name, ()), parsed.rows))
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(tuple(fields)))


def _column(field: Field, lists: tuple[Lists, ...], rows: int) -> pa.Array:
    mine = _of_kind(field, lists)
    if mine is None:
        return pa.nulls(rows, field.arrow)
    if field.depth:
        return _placed(_arrays(field, mine, mine.rows), mine.rows, rows)
    if len(mine.counts) != len(mine.values) or (mine.counts != 1).any():
        mine = _single(field, mine)
    return _placed(_cast(field, mine, mine.rows), mine.rows, rows)


def _single(field: Field, lists: Lists) -> Lists:
    """Check that no list has more than one value, and drop empty lists, which become nulls.

    Raises
    ------
    RecordError
        If a list has several values.
    """
    several = np.flatnonzero(lists.counts > 1)
    if several.size:
        first = int(several[0])
        raise RecordError(
            f"column {field.name!r} is declared {field.element}, but a record has {lists.counts[first]} values: "
            f"declare array<{field.element}>",
            int(lists.rows[first]),
        )
    filled = lists.counts > 0
    return Lists(lists.kind, lists.rows[filled], lists.counts[filled], lists.values)


def _nested(field: Field, nested: Nested | None, rows: int) -> pa.Array:
    if nested is None:
        return pa.nulls(rows, field.arrow)
    owners = np.repeat(nested.rows, nested.counts)
    mine = _of_kind(field, nested.inner, owners)
    count = len(owners)
    if mine is None:
        arrays = pa.array([[]] * count, pa.list_(ELEMENTS[field.element][1]))
    else:
        arrays = _arrays(field, mine, owners[mine.rows])
        if len(mine.rows) < count:  # a Feature without a list counts as an empty list
            arrays = _placed(arrays, mine.rows, count).fill_null(pa.scalar([], arrays.type))
    return _placed(_lists(nested.counts, arrays), nested.rows, rows)


def _of_kind(field: Field, lists: tuple[Lists, ...], owners: Ints | None = None) -> Lists | None:
    """Return the features of the declared kind; None if there are none.

    Raises
    ------
    RecordError
        If a feature is of another kind.
    """
    for one in lists:
        if one.kind is not field.kind:
            row = one.rows[0] if owners is None else owners[one.rows[0]]
            raise RecordError(
                f"column {field.name!r} is declared {field.told}, but a record has {one.kind.told} values: declare "
                + ("array<" * field.depth + _ADVICE[one.kind] + ">" * field.depth)
                + (" and cast it afterwards" if Kind.BYTES not in (one.kind, field.kind) else ""),
                int(row),
            )
    return lists[0] if lists else None


def _arrays(field: Field, lists: Lists, owners: Ints) -> pa.Array:
    if field.length is not None:
        wrong = np.flatnonzero(lists.counts != field.length)
        if wrong.size:
            raise RecordError(
                f"column {field.name!r} must have arrays of {field.length} values, got one of {lists.counts[wrong[0]]}",
                int(owners[wrong[0]]),
            )
    return _lists(lists.counts, _cast(field, lists, np.repeat(owners, lists.counts)))


def _lists(counts: Ints, values: pa.Array) -> pa.Array:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _placed(values: pa.Array, places: Ints, rows: int) -> pa.Array:
    """Return an array of ``rows`` entries with the values at their places, and null elsewhere."""
    if len(places) == rows:
        return values
    source = np.full(rows, -1, dtype=np.int64)
    source[places] = np.arange(len(places))
    return values.take(pa.array(source, mask=source < 0))


def _cast(field: Field, lists: Lists, owners: Ints) -> pa.Array:
    """Return values with the column's Arrow type. ``owners`` has the row of each value, for errors."""
    kind = ELEMENTS[field.element][1]
    values: Any = lists.values
    if lists.kind is Kind.BYTES:
        return _text(field, values, owners) if field.element == "string" else values.cast(kind)
    if lists.kind is Kind.FLOAT:
        return pa.array(values if field.element == "float" else values.astype(np.float64))
    if field.element != "bigint":
        values = _narrowed(field, values, owners)
    return pa.array(values)


def _narrowed(field: Field, values: np.ndarray[Any, Any], owners: Ints) -> np.ndarray[Any, Any]:
    dtype = np.dtype(ELEMENTS[field.element][1].to_pandas_dtype())
    narrow = values.astype(dtype)
    lost = np.flatnonzero(narrow != values)
    if lost.size:
        raise RecordError(
            f"column {field.name!r} is declared {field.told}, but a record has {values[lost[0]]}: "
            f"declare {field.told.replace(field.element, 'bigint')}",
            int(owners[lost[0]]),
        )
    return narrow


def _text(field: Field, values: pa.Array, owners: Ints) -> pa.Array:
    try:
        return values.cast(pa.large_string()).cast(pa.string())
    except pa.ArrowInvalid:
        for row, value in zip(owners.tolist(), values.to_pylist(), strict=True):
            try:
                value.decode()
            except UnicodeDecodeError:
                raise RecordError(
                    f"column {field.name!r} is declared {field.told}, but a record has bytes that are not UTF-8: "
                    f"declare {field.told.replace('string', 'binary')}",
                    row,
                ) from None
        raise
