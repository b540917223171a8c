"""Convert the results of ``main`` to record batches: one result for each row, split by the partitions of the rows.

A DataFrame's results have a schema, so they are sent as Arrow columns. An RDD's results have none, so they are sent as
data (:mod:`tfos_nb.runtime.control.wire`), a list or an array for each batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control import wire

__all__ = ["PLAIN", "Answers", "listed"]

PLAIN = pa.schema([("results", pa.large_binary())])
"""Schema of results without a schema of their own: one value, which has all results of a batch, encoded."""


class Answers:
    """Results of consecutive rows.

    Parameters
    ----------
    results : object
        ``{column: array}``, an array or tensor whose first axis is the rows, or a list with one result per row: a
        value, a tuple, a dictionary or a Row.

    Attributes
    ----------
    count : int
        Number of results.

    Raises
    ------
    FeedFailed
        If ``results`` is none of these, or its columns have different lengths.

    Examples
    --------
    >>> schema = pa.schema([("class", pa.int64()), ("score", pa.float32())])
    >>> Answers([(3, 0.5), (7, 0.25)]).cut(1, 1, schema).to_pylist()
    [{'class': 7, 'score': 0.25}]
    """

    def __init__(self, results: Any) -> None:
        if isinstance(results, Mapping):
            self._columns = {str(name): _sliceable(column, f"column {name!r}") for name, column in results.items()}
            lengths = {name: len(column) for name, column in self._columns.items()}
            if len(set(lengths.values())) > 1:
                raise FeedFailed(f"the columns of the results must have one value for each row, got {lengths}")
            self._rows: Any = []
            self.count = next(iter(lengths.values()), 0)
        else:
            self._columns = {}
            self._rows = _sliceable(results, "the results")
            self.count = len(self._rows)

    def cut(self, start: int, count: int, schema: pa.Schema | None) -> pa.RecordBatch:
        """Return ``count`` results from ``start`` on, in the columns of a schema, or encoded if it is None.

        Raises
        ------
        FeedFailed
            If they do not fit the schema (the message names the column), or cannot be encoded.
        """
        stop = start + count
        columns = {name: column[start:stop] for name, column in self._columns.items()}
        if schema is None:
            return _plain(columns or self._rows[start:stop])
        if not columns:
            columns = _by_column(self._rows[start:stop], schema)
        _check_names(columns, schema)
        arrays = [_arrow_of(columns[field.name], field, count) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _sliceable(values: Any, what: str) -> Any:
    """Return values as an array or a list, which can be sliced by rows.

    Raises
    ------
    FeedFailed
        If they are one value, and not one for each row.
    """
    if isinstance(values, (list, np.ndarray)):
        found = values
    elif isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise FeedFailed(f"{what}: results must be a list with one result for each row, got a {type(values).__name__}")
    else:
        found = np.asarray(values) if hasattr(values, "__array__") else list(values)
    if isinstance(found, np.ndarray) and not found.ndim:
        raise FeedFailed(f"{what}: results must be a list with one result for each row, got one number")
    return found


def _plain(results: Any) -> pa.RecordBatch:
    try:
        data = _encoded(results)
    except wire.NotData as error:
        raise FeedFailed(
            f"a result cannot be sent: {error}. A result must be data: numbers, text, lists, tuples, dictionaries or "
            "arrays"
        ) from None
    return pa.RecordBatch.from_arrays([pa.array([data], pa.large_binary())], schema=PLAIN)


def _encoded(results: Any) -> bytes:
    try:
        return wire.encode(results)
    except wire.NotData:  # there may be tensors; searching for them is slow, so it is done only now
        return wire.encode(_without_tensors(results))


def _without_tensors(value: Any) -> Any:
    """Return a nested result in which each tensor is replaced by an array or a number."""
    if isinstance(value, Mapping):
        return {name: _without_tensors(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        found = [_without_tensors(item) for item in value]
        return tuple(found) if isinstance(value, tuple) else found
    if callable(getattr(value, "numpy", None)) and hasattr(value, "__array__"):
        return np.asarray(value)[()]
    return value


def listed(data: bytes) -> list[Any]:
    """Return the results of an encoded batch (see :data:`PLAIN`), one per row."""
    results = wire.decode(data)
    if not isinstance(results, dict):
        return list(results)
    names = list(results)
    return [dict(zip(names, row, strict=True)) for row in zip(*results.values(), strict=True)]


def _check_names(columns: Mapping[str, Any], schema: pa.Schema) -> None:
    if set(columns) != set(schema.names):
        raise FeedFailed(
            f"the results have the columns {', '.join(sorted(columns))}; the schema that inference() was given has "
            f"{', '.join(schema.names)}: use the same names in both"
        )


def _by_column(rows: Any, schema: pa.Schema) -> dict[str, Any]:
    names = schema.names
    if isinstance(rows, np.ndarray) and rows.ndim > 1 and len(names) > 1:
        if rows.shape[1] != len(names):
            raise FeedFailed(
                f"a result has {rows.shape[1]} values; the schema has {', '.join(names)}: return {len(names)} values "
                "for each row"
            )
        return {name: rows[:, place] for place, name in enumerate(names)}
    if not isinstance(rows, np.ndarray) and len(rows):
        take = _taker(rows[0], names)
        if take is not None:
            return {name: _taken(rows, take, name, place) for place, name in enumerate(names)}
    if len(names) != 1 and len(rows):
        raise FeedFailed(
            f"a result is one value ({rows[0]!r:.60}); the schema has {', '.join(names)}: return a dictionary with "
            "these names"
        )
    return dict.fromkeys(names, rows)


def _taker(first: Any, names: Sequence[str]) -> Callable[[Any, str, int], Any] | None:
    """Return the function that takes a field from results like the first; None if a result is one value."""
    if isinstance(first, Mapping) or hasattr(first, "asDict"):
        return lambda row, name, place: row[name]
    if isinstance(first, tuple) or (isinstance(first, list) and len(names) > 1):
        return lambda row, name, place: row[place]
    return None


def _taken(rows: Any, take: Callable[[Any, str, int], Any], name: str, place: int) -> list[Any]:
    try:
        return [take(row, name, place) for row in rows]
    except (KeyError, IndexError, TypeError):
        raise FeedFailed(
            f"not every result has a value for column {name!r} of the schema: return one for each row"
        ) from None


def _arrow_of(values: Any, field: pa.Field, rows: int) -> pa.Array:
    try:
        return _array(values, field.type, rows)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        shape = f" of shape {values.shape}" if isinstance(values, np.ndarray) else ""
        what = f"{type(values).__name__}{shape}"
        raise FeedFailed(
            f"column {field.name!r} of the results must be {field.type}, got a {what} that does not fit: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from None


def _array(values: Any, kind: pa.DataType, rows: int) -> pa.Array:
    if not isinstance(values, np.ndarray):
        stacked = _stacked(values)
        if stacked is None:
            array = pa.array(values, kind)
            if pa.types.is_integer(kind):
                pa.array(values).cast(kind)  # raises for a fraction, which the line above truncates
            return array
        values = stacked
    depth, inner = 0, kind
    while pa.types.is_list(inner) or pa.types.is_large_list(inner):
        depth, inner = depth + 1, inner.value_type
    sizes = values.shape[1:]
    if not depth and math.prod(sizes) == 1:
        sizes = ()
    if len(sizes) != depth:
        raise ValueError(f"it has {len(sizes)} axes besides that of the rows, and the type has {depth}")
    flat = values.reshape(-1)
    column = pa.array(flat.tolist(), inner) if flat.dtype.hasobject else pa.array(flat).cast(inner)
    for level in reversed(range(depth)):
        lists = rows * math.prod(sizes[:level])
        offsets = pa.array(np.arange(lists + 1, dtype=np.int64) * sizes[level]).cast(pa.int32())
        column = pa.ListArray.from_arrays(offsets, column)
    return column


def _stacked(values: list[Any]) -> np.ndarray[Any, Any] | None:
    """Return a list of arrays or tensors of one shape as one array; None for any other list."""
    if not values or not hasattr(values[0], "__array__"):
        return None
    arrays = [np.asarray(value) for value in values]
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else None
