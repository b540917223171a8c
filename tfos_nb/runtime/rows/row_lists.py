"""Rows as Python values: what a list-of-rows feed hands out of Arrow's blocks.

Each row has the kind that it had in Spark. Tuples, lists, dictionaries and single values of an RDD come as such, and
named rows (an RDD's Rows, a DataFrame's rows) as :class:`FeedRow`. A list in a row comes as a list, or as an array if
that was asked for, which costs less by far. Whole columns are converted at once; no step looks at a single value.
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
    """A row with names: a tuple, whose fields are also attributes and items, as those of Spark's ``Row`` are."""

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
    """Makes the rows of blocks of one schema.

    Parameters
    ----------
    schema : pyarrow.Schema
        The blocks'; its metadata tells of what kind an RDD's rows were.
    arrays : bool
        Whether lists of numbers come as NumPy arrays, which may not be written to.
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
    """Return a block's columns as lists, keyed by tensor; ``mapping`` has the tensor of each column.

    Columns are found by their names; where the rows have not these names (tuples have none) by their places, which are
    those of the sorted names.

    Raises
    ------
    FeedFailed
        If the rows have not one field a column.
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
    """Return a column as a list of Python values; a list in it as a list (or an array), a null as None."""
    kind, types = values.type, pa.types
    if is_vector(kind):
        return [_vector(value) for value in values.to_pylist()]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        found = _lists_of(values, arrays)
    elif types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        whole = values.fill_null(False if types.is_boolean(kind) else 0) if values.null_count else values
        found = whole.to_numpy(zero_copy_only=False).tolist()
    elif types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return list(values.to_numpy(zero_copy_only=False))  # objects already, None where there is a null
    else:
        return list(values.to_pylist())  # dates, decimals, structs: Arrow knows them best
    for row in np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)) if values.null_count else ():
        found[row] = None
    return found


def _vector(value: dict[str, Any] | None) -> list[float] | None:
    """Return a vector of Spark ML as a list, a sparse one with its zeros."""
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
    inner = values.flatten()  # without what stands behind a null
    size = int(lengths[0]) if len(lengths) else 0
    numeric = pa.types.is_integer(inner.type) or pa.types.is_floating(inner.type)
    if numeric and not inner.null_count and (lengths == size).all():
        table = inner.to_numpy(zero_copy_only=False).reshape(len(values), size)
        return list(table) if arrays else list(table.tolist())
    flat: Any = inner.to_numpy(zero_copy_only=False) if arrays and numeric and not inner.null_count else None
    flat, ends = values_of(inner, arrays) if flat is None else flat, np.cumsum(lengths).tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
