"""Convert columns: Arrow's buffers to NumPy arrays, without a Python loop over rows.

Numbers and booleans become arrays with one value for each row. Lists of equal lengths (nested or not) become one dense
array. Strings and bytes become an array of bytes objects. A null, or a list of another length, is an error that names
the column and the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.rows.vectors import dense_rows, first_size, is_vector, shown, sparse_rows

__all__ = ["Column", "arrays_of", "columns_of", "first_lengths", "is_list", "sparse_of"]


@dataclass(frozen=True)
class Column:
    """Column of a feed.

    Parameters
    ----------
    name : str
        Its name.
    dtype : numpy.dtype
        Type of its elements; ``object`` for text and bytes.
    shape : tuple of int
        Shape of one row's value.
    vector : bool
        Whether the values are vectors of Spark ML.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    vector: bool = False


def first_lengths(batch: pa.RecordBatch) -> dict[str, tuple[int, ...]]:
    """Return the shape of one row's value for each column of lists or vectors.

    The lengths are those of the first list at each level that is not null, the outermost first.
    """
    lengths = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        shape: list[int] = [first_size(column)] if is_vector(column.type) else []
        values, kind = column, column.type
        while is_list(kind):
            values = (values.drop_null() if values.null_count else values).slice(0, 1)
            shape.append(kind.list_size if pa.types.is_fixed_size_list(kind) else _length_of_first(values))
            values, kind = values.flatten(), kind.value_type
        if shape:
            lengths[name] = tuple(shape)
    return lengths


def _length_of_first(values: pa.Array) -> int:
    return len(values[0]) if len(values) else 0


def columns_of(schema: pa.Schema, lengths: Mapping[str, tuple[int, ...]]) -> dict[str, Column]:
    """Return the columns of a schema, with the shapes of :func:`first_lengths`.

    Raises
    ------
    FeedFailed
        If a column's type cannot be a tensor. The message says how to convert it.
    """
    return {
        name: Column(
            name,
            _dtype_of(name, schema.field(name).type),
            tuple(lengths.get(name, ())),
            is_vector(schema.field(name).type),
        )
        for name in schema.names
    }


def _dtype_of(name: str, kind: pa.DataType) -> np.dtype[Any]:
    while is_list(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    if _is_bytes(kind):
        return np.dtype(object)
    if is_vector(kind):
        return np.dtype(np.float64)
    raise FeedFailed(
        f"column {name!r} is {kind}, for which TensorFlow has no tensor: leave it out, or cast it "
        f"(a date or decimal: df.withColumn({name!r}, df[{name!r}].cast('double')); a struct: select its fields)"
    )


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is one of the list types."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


def arrays_of(
    batch: pa.RecordBatch, columns: Iterable[Column], fill: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Return one array per column, of shape ``(rows, *column.shape)``.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        The rows.
    columns : iterable of Column
        The columns to convert, with the shapes that their values must have.
    fill : mapping, optional
        Value that replaces a null, by column.

    Raises
    ------
    FeedFailed
        For a missing column, a null without a fill, or a list of another length or a type other than the column's.
    """
    fill = fill or {}
    return {column.name: _array_of(_found(batch, column), column, fill.get(column.name)) for column in columns}


def _found(batch: pa.RecordBatch, column: Column) -> pa.Array:
    place = batch.schema.get_field_index(column.name)
    if place < 0:  # batch.column(-1) would be the last column
        raise FeedFailed(
            f"column {column.name!r} does not exist, or exists more than once; the columns are {batch.schema.names}: "
            "name one of these, and rename columns of the same name"
        )
    return batch.column(place)


def _array_of(values: pa.Array, column: Column, fill: Any) -> np.ndarray[Any, Any]:
    rows = len(values)
    if column.vector:
        return dense_rows(_vectors(values, column, fill), column.shape[0], column.name)
    _refuse_other_type(values, column)
    for level, length in enumerate(column.shape):
        values = _flatten(_without_nulls(values, column, level, fill), length, column, level)
    values = _without_nulls(values, column, len(column.shape), fill)
    if column.dtype.hasobject:
        values = values.cast(pa.large_binary() if pa.types.is_large_string(values.type) else pa.binary())
    array: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
    return array.reshape((rows, *column.shape))


def sparse_of(
    batch: pa.RecordBatch, column: Column, fill: Any = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], tuple[int, int]]:
    """Return the arguments of ``tf.SparseTensor`` for a column of vectors: indices, values and dense shape.

    Raises
    ------
    FeedFailed
        For a null without a fill of 0, or a vector that does not have the column's length.
    """
    values = _vectors(_found(batch, column), column, fill)
    places, entries = sparse_rows(values, column.shape[0], column.name)
    return places, entries, (len(values), column.shape[0])


def _vectors(values: pa.Array, column: Column, fill: Any) -> pa.Array:
    if not is_vector(values.type):
        raise FeedFailed(
            f"column {column.name!r} must have vectors as in the first rows, got {values.type}; convert it with "
            "pyspark.ml.functions.array_to_vector"
        )
    if values.null_count and fill is None:
        _refuse_nulls(values, column)
    if values.null_count and fill != 0:
        raise FeedFailed(
            f"fill={{{column.name!r}: {fill!r}}}: in place of a null vector it can only be 0, for all zeros"
        )
    return values


def _refuse_other_type(values: pa.Array, column: Column) -> None:
    kind, depth = values.type, 0
    while is_list(kind):
        kind, depth = kind.value_type, depth + 1
    if is_vector(kind) or depth != len(column.shape) or _dtype_of(column.name, kind) != column.dtype:
        first = "bytes" if column.dtype.hasobject else str(column.dtype)
        first += f" in lists of {'x'.join(map(str, column.shape))}" if column.shape else ""
        raise FeedFailed(
            f"column {column.name!r} is {values.type} here, and was {first} in the first rows: cast it to one type"
        )


def _without_nulls(values: pa.Array, column: Column, level: int, fill: Any) -> pa.Array:
    """Replace nulls at a level of nested lists by ``fill``, or by lists of it.

    Raises
    ------
    FeedFailed
        If there are nulls and ``fill`` is None or of another type.
    """
    if not values.null_count:
        return values
    if fill is None:
        _refuse_nulls(values, column)
    whole = fill
    for length in reversed(column.shape[level:]):
        whole = [whole] * length
    try:
        if column.dtype.kind in "iu" and int(fill) != fill:
            raise TypeError("Arrow would truncate the fraction")
        return values.fill_null(pa.scalar(whole, values.type))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise FeedFailed(f"fill={{{column.name!r}: {fill!r}}}: column {column.name!r} holds {values.type}") from None


def _flatten(values: pa.Array, length: int, column: Column, level: int) -> pa.Array:
    if pa.types.is_fixed_size_list(values.type):
        lengths_match, worst = values.type.list_size == length or not len(values), 0
    else:
        lengths = values.value_lengths().to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(lengths != length)
        lengths_match, worst = not wrong.size, int(wrong[0]) if wrong.size else 0
    if not lengths_match:
        found, row = len(values[worst]), worst // max(1, math.prod(column.shape[:level]))
        raise FeedFailed(
            f"column {column.name!r} holds a list of {found} values where the first row's has {length} "
            f"({shown(values[worst].as_py())}, {row + 1} rows into a block): a dense tensor needs lists of one "
            "length. Pad or cut them in Spark, for example with "
            f"slice(concat({column.name}, array_repeat(0, {length})), 1, {length})"
        )
    return values.flatten()


def _refuse_nulls(values: pa.Array, column: Column) -> None:
    if values.null_count:
        inner = max(1, math.prod(column.shape))
        row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        where = "in a list of a row" if inner > 1 and len(values) > 1 else f"{row + 1} rows into a batch"
        raise FeedFailed(
            f"column {column.name!r} has a null ({where}), and a tensor has none: drop such rows with "
            f"df.dropna(subset=[{column.name!r}]), or give ctx.dataset(…, fill={{{column.name!r}: 0}})"
        )
