"""Convert dense and sparse vectors of Spark ML to arrays, without a Python loop over rows.

Spark stores a vector as a struct: ``type`` (0 sparse, 1 dense), ``size`` and ``indices`` of a sparse one, ``values``
(``org.apache.spark.ml.linalg.VectorUDT``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed

__all__ = ["dense_rows", "first_size", "is_vector", "shown", "sizes_of", "sparse_rows"]

_FIELDS = ("type", "size", "indices", "values")
_DENSE = 1
_SHOWN = 60

Array = np.ndarray[Any, Any]


def shown(value: Any) -> str:
    """Return the text of a value for a message, cut off if it is long."""
    text = repr(value[:10]) if isinstance(value, list) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def is_vector(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is that of Spark ML's vectors."""
    return bool(pa.types.is_struct(kind) and tuple(field.name for field in kind) == _FIELDS)


def first_size(values: pa.Array) -> int:
    """Return the length of the first vector that is not null; 0 if there is none."""
    values = (values.drop_null() if values.null_count else values).slice(0, 1)
    if not len(values):
        return 0
    _, size, _, content = values.flatten()
    return int(size[0].as_py()) if size[0].is_valid else len(content[0])


def sizes_of(values: pa.Array, of_null: int = 0) -> Array:
    """Return the number of elements of each vector, and ``of_null`` for a null. A dense one does not store it."""
    kinds, sizes, _, content = values.flatten()
    dense = kinds.fill_null(0).to_numpy(zero_copy_only=False) == _DENSE
    counts = content.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    found: Array = np.where(dense, counts, sizes.fill_null(of_null).to_numpy(zero_copy_only=False))
    return found


def sparse_rows(values: pa.Array, length: int, name: str) -> tuple[Array, Array]:
    """Return ``(row, position)`` of each stored entry, as an int64 array of two columns, and the entries.

    They are in the order of the rows. A null has no entries.

    Raises
    ------
    FeedFailed
        If a vector does not have ``length`` elements. The message names the column.
    """
    kinds, _, positions, content = values.flatten()
    dense = kinds.fill_null(0).to_numpy(zero_copy_only=False) == _DENSE
    counts = content.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    lengths = sizes_of(values, length)
    wrong = np.flatnonzero(lengths != length)
    if wrong.size:
        row = int(wrong[0])
        raise FeedFailed(
            f"column {name!r} holds a vector of length {int(lengths[row])} where the first row's has {length} "
            f"({shown(content[row].as_py())}, {row + 1} rows into a block): a "
            "tensor needs one length. Leave such rows out in Spark, or make vectors of one length"
        )
    rows = np.repeat(np.arange(len(values), dtype=np.int64), counts)
    of_dense = np.repeat(dense, counts)
    columns = np.empty(len(rows), np.int64)
    columns[of_dense] = np.tile(np.arange(length, dtype=np.int64), int(dense.sum()))
    columns[~of_dense] = positions.flatten().to_numpy(zero_copy_only=False)
    return np.stack([rows, columns], axis=1), content.flatten().to_numpy(zero_copy_only=False)


def dense_rows(values: pa.Array, length: int, name: str) -> Array:
    """Return vectors as an array of shape ``(rows, length)``. A null becomes zeros.

    Raises
    ------
    FeedFailed
        If a vector does not have ``length`` elements. The message names the column.
    """
    places, entries = sparse_rows(values, length, name)
    if len(entries) == len(values) * length:
        return entries.reshape(len(values), length)  # every vector stores all its elements, in order
    array = np.zeros((len(values), length))
    array[places[:, 0], places[:, 1]] = entries
    return array
