"""Convert Arrow blocks to lists of Python rows, by column.

Rows have the classes that they had in Spark: tuples, lists, dictionaries and single values of an RDD. Named rows (Rows
of an RDD, rows of a DataFrame) become :class:`FeedRow`. A list in a row becomes a list, or on request an array, which
is much faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.rows.rdd_rows import KIND_KEY
from tfos_nb.runtime.rows.vectors import is_vector

__all__ = ["FeedRow", "RowMaker", "columns_by_mapping", "values_of"]


class FeedRow(tuple[Any, ...]):
    """Tuple whose fields can also be read as attributes and by name, like those of Spark's ``Row``.

    It is pickled as a plain tuple.
    """

    __slots__ = ()
    __fields__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[self.__fields__.index(name)]
        except ValueError:
            raise AttributeError(f"the row has no field {name!r}; it has {', '.join(self.__fields__)}") from None

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            try:
                return tuple.__getitem__(self, self.__fields__.index(key))
            except ValueError:
                raise KeyError(f"the row has no field {key!r}; it has {', '.join(self.__fields__)}") from None
        return tuple.__getitem__(self, key)

    def asDict(self) -> dict[str, Any]:  # noqa: N802 - Spark's name of it
        """Return the row as a dictionary."""
        return dict(zip(self.__fields__, self, strict=True))

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{name}={value!r}' for name, value in zip(self.__fields__, self, strict=True))})"


class RowMaker:
    """Converter from blocks of one schema to Python rows.

    Parameters
    ----------
    schema : pyarrow.Schema
        Schema of the blocks. Its metadata has the class of an RDD's rows (:data:`KIND_KEY`).
    arrays : bool
        Whether lists of numbers become NumPy arrays, which are read-only.
    """

    def __init__(self, schema: pa.Schema, arrays: bool = False) -> None:
        self.names = list(schema.names)
        self._arrays = arrays
        kind = (schema.metadata or {}).get(KIND_KEY, b"row").decode()
        makers: dict[str, Callable[[list[list[Any]]], Iterable[Any]]] = {
            "value": lambda columns: columns[0],
            "array": lambda columns: map(np.asarray, columns[0]),
            "tuple": _zipped,
            "list": lambda columns: map(list, _zipped(columns)),
            "dict": self._dictionaries,
        }
        self._row = type("Row", (FeedRow,), {"__slots__": (), "__fields__": tuple(self.names)})
        self._make = makers.get(kind, self._named)

    def rows(self, block: pa.RecordBatch) -> list[Any]:
        """Return the rows of a block."""
        return list(self._make([values_of(column, self._arrays) for column in block.columns]))

    def _dictionaries(self, columns: list[list[Any]]) -> Iterable[Any]:
        return (dict(zip(self.names, row, strict=True)) for row in _zipped(columns))

    def _named(self, columns: list[list[Any]]) -> Iterable[Any]:
        return map(self._row, _zipped(columns))


def _zipped(columns: list[list[Any]]) -> Iterable[tuple[Any, ...]]:
    return zip(*columns, strict=True)


def columns_by_mapping(block: pa.RecordBatch, mapping: Mapping[str, str], arrays: bool = False) -> dict[str, list[Any]]:
    """Return a block's columns as lists, by tensor.

    Parameters
    ----------
    block : pyarrow.RecordBatch
        The rows.
    mapping : mapping of str to str
        Tensor of each column. The rows of an RDD may be tuples, without these names. Then the block's columns are taken
        in the order of the mapping's sorted names.
    arrays : bool
        Whether lists of numbers become NumPy arrays.

    Raises
    ------
    FeedFailed
        If the block has neither these columns nor the same number of columns.
    """
    names, columns = block.schema.names, sorted(mapping)
    if all(column in names for column in columns):
        places = [names.index(column) for column in columns]
    elif len(names) == len(columns):
        places = list(range(len(columns)))
    else:
        raise FeedFailed(
            f"input_mapping names {len(columns)} columns ({', '.join(columns)}), and a row has {len(names)} fields "
            f"({', '.join(names)}): feed these columns alone, in the order of their sorted names"
        )
    pairs = zip(columns, places, strict=True)
    return {mapping[column]: values_of(block.column(place), arrays) for column, place in pairs}


def values_of(values: pa.Array, arrays: bool = False) -> list[Any]:
    """Return a column as a list of Python values. A null becomes None, a list in it a list (or an array)."""
    kind, types = values.type, pa.types
    if is_vector(kind):
        return [_vector(value) for value in values.to_pylist()]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        found = _lists_of(values, arrays)
    elif types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        whole = values.fill_null(False if types.is_boolean(kind) else 0) if values.null_count else values
        found = whole.to_numpy(zero_copy_only=False).tolist()
    elif types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return list(values.to_numpy(zero_copy_only=False))  # an array of objects, with None for a null
    else:
        return list(values.to_pylist())  # dates, decimals, structs: no faster way
    for row in np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)) if values.null_count else ():
        found[row] = None
    return found


def _vector(value: dict[str, Any] | None) -> list[float] | None:
    """Return a vector of Spark ML as a list, with the zeros of a sparse one."""
    if value is None or value["size"] is None:
        return None if value is None else list(value["values"])
    dense = [0.0] * int(value["size"])
    for place, number in zip(value["indices"], value["values"], strict=True):
        dense[place] = number
    return dense


def _lists_of(values: pa.Array, arrays: bool) -> list[Any]:
    if pa.types.is_fixed_size_list(values.type):
        there = values.is_valid().to_numpy(zero_copy_only=False)
        lengths = np.where(there, values.type.list_size, 0)
    else:
        lengths = values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    inner = values.flatten()  # without the values that a null list may have in the buffer
    size = int(lengths[0]) if len(lengths) else 0
    numeric = pa.types.is_integer(inner.type) or pa.types.is_floating(inner.type)
    if numeric and not inner.null_count and (lengths == size).all():
        table = inner.to_numpy(zero_copy_only=False).reshape(len(values), size)
        return list(table) if arrays else list(table.tolist())
    flat: Any = inner.to_numpy(zero_copy_only=False) if arrays and numeric and not inner.null_count else None
    flat, ends = values_of(inner, arrays) if flat is None else flat, np.cumsum(lengths).tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
