"""Compute a checksum of rows, to check that two attempts at a partition read the same rows."""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["KEEP_ROWS_ALIKE", "Fingerprint"]

KEEP_ROWS_ALIKE = "Cache or checkpoint the DataFrame, or sort it, and train again"

_Path = tuple[int, ...]
_OF_ANY_LENGTH = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_map)
_NULLS, _LENGTHS, _VALUES = range(-3, 0)  # last item of a path: the part of a column that a stream of bytes has


class Fingerprint:
    """Checksum of all rows that were added, in their order. It does not depend on the division into batches.

    Each column is one or several streams of bytes: its values, the lengths of its lists and texts, and its null flags.
    Each stream has a CRC-32C, which continues across batches.

    Attributes
    ----------
    rows : int
        Number of rows that were added.

    Examples
    --------
    >>> one, other = Fingerprint(), Fingerprint()
    >>> one.add(pa.RecordBatch.from_pydict({"id": [1, 2]}))
    >>> other.add(pa.RecordBatch.from_pydict({"id": [1]}))
    >>> other.add(pa.RecordBatch.from_pydict({"id": [2]}))
    >>> one.value == other.value
    True
    """

    def __init__(self) -> None:
        self.rows = 0
        self._sums: dict[_Path, int] = {}
        self._counts: dict[_Path, int] = {}  # numbers of values added, of columns and of the values nested in them

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""
        self.rows += batch.num_rows
        for place, column in enumerate(batch.columns):
            self._add(column, (place,))

    def copy(self) -> Fingerprint:
        """Return an independent copy."""
        other = Fingerprint()
        other.rows, other._sums, other._counts = self.rows, dict(self._sums), dict(self._counts)
        return other

    @property
    def value(self) -> int:
        """The checksum so far; 0 if there are no rows."""
        return int(google_crc32c.value(repr(sorted(self._sums.items())).encode())) if self._sums else 0

    @property
    def at(self) -> tuple[int, int]:
        """The number of rows so far, and their checksum."""
        return self.rows, self.value

    def _add(self, values: pa.Array, path: _Path) -> None:
        start = self._counts.get(path, 0)
        self._counts[path] = start + len(values)
        if values.null_count:
            self._update((*path, _NULLS), start + np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)))
            values = values.drop_null()
        lengths, inside = _lengths_of(values), _inside(values)
        if lengths is not None:
            self._update((*path, _LENGTHS), lengths.astype(np.int64))
        for place, child in enumerate(inside):
            self._add(child, (*path, place))
        if not inside:
            self._update((*path, _VALUES), _bytes_of(values))

    def _update(self, path: _Path, data: Any) -> None:
        if len(data):
            view = np.frombuffer(data, np.uint8)
            view.setflags(write=False)  # google_crc32c accepts only read-only buffers
            self._sums[path] = google_crc32c.extend(self._sums.get(path, 0), view)


def _lengths_of(values: pa.Array) -> Any:
    """Return the lengths of lists, maps, texts or bytes; None for values of fixed length."""
    if any(test(values.type) for test in _OF_ANY_LENGTH):
        return _numbers(pc.binary_length(values))
    return np.diff(_numbers(values.offsets)) if any(test(values.type) for test in _LISTS) else None


def _inside(values: pa.Array) -> list[pa.Array]:
    """Return the arrays nested in structs, lists or maps without nulls; none for other values."""
    kind, types = values.type, pa.types
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        flat = values.flatten()
        return list(flat) if types.is_struct(kind) else [flat]
    if any(test(kind) for test in _LISTS):
        start, end = _numbers(values.offsets)[[0, -1]]
        children = (values.keys, values.items) if types.is_map(kind) else (values.values,)
        return [child.slice(start, end - start) for child in children]
    return []


def _bytes_of(values: pa.Array) -> Any:
    """Return the bytes of values that have no nulls and are not nested."""
    if not len(values):
        return b""
    kind, types = values.type, pa.types
    if types.is_boolean(kind):
        return np.ascontiguousarray(values.to_numpy(zero_copy_only=False))
    if types.is_string(kind) or types.is_binary(kind):
        return _texts(values, np.int32)
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return _texts(values, np.int64)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if is_number or types.is_fixed_size_binary(kind) or (types.is_temporal(kind) and kind.bit_width in (32, 64)):
        width = kind.bit_width // 8
        return memoryview(values.buffers()[1])[values.offset * width : (values.offset + len(values)) * width]
    return "\0".join([*map(repr, values.to_pylist()), ""]).encode()


def _numbers(values: pa.Array) -> Any:
    """Return integers without nulls as NumPy's. Arrow's own conversion imports pandas, in half a second."""
    dtype, buffer = np.dtype(f"i{values.type.bit_width // 8}"), values.buffers()[1]
    if buffer is None:  # of an empty array
        return np.zeros(len(values), dtype)
    return np.frombuffer(buffer, dtype)[values.offset : values.offset + len(values)]


def _texts(values: pa.Array, offset_type: Any) -> Any:
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, offset_type)[[values.offset, values.offset + len(values)]] if len(values) else [0, 0]
    return memoryview(data)[ends[0] : ends[1]] if data is not None else b""
