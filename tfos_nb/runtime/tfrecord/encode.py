"""Encode rows as records: the bytes of each column for all rows at once, and then all columns joined by Arrow.

The bytes before a value in a record (tags, lengths, the column's name) depend only on the value's length. So this
prefix is computed once for each length in a batch. If all values of a column have one length, it is a constant.

The messages are those of tensorflow/core/example/example.proto and feature.proto.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tfos_nb.runtime.tfrecord.fields import Field, Kind, RecordError, RecordType
from tfos_nb.runtime.tfrecord.framing import EMPTY, large_binary
from tfos_nb.runtime.tfrecord.spans import Ints

__all__ = ["encode"]

_ENTRY, _VALUE, _ELEMENT = 0x0A, 0x12, 0x0A
_FEATURES, _CONTEXT, _LISTS = 0x0A, 0x0A, 0x12
_COUNTED = 4096  # below this length, distinct lengths are found by counting; otherwise by sorting


def encode(batch: pa.RecordBatch, fields: Sequence[Field], record_type: RecordType = RecordType.EXAMPLE) -> pa.Array:
    """Encode a batch. A null value is left out of its record.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        The rows, with the columns in the order of ``fields``.
    fields : sequence of Field
        Types of the columns.
    record_type : RecordType
        Message in which each row is encoded.

    Returns
    -------
    pyarrow.Array
        One message per row, of type ``large_binary``.

    Raises
    ------
    RecordError
        For a null inside an array, an array that does not have the declared length, or a number beyond float32.
    """
    rows = batch.num_rows
    context = _message(rows, [p for f, c in _pairs(batch, fields) if f.depth < 2 for p in _column(f, c)])
    if record_type is RecordType.EXAMPLE:
        return _joined(rows, [_prefixes(_lengths(context), None, functools.partial(_wrapped, (_FEATURES,))), context])
    lists = _message(rows, [p for f, c in _pairs(batch, fields) if f.depth == 2 for p in _column(f, c)])
    parts = []
    for part, tag, there in (
        (context, _CONTEXT, any(f.depth < 2 for f in fields)),
        (lists, _LISTS, any(f.depth == 2 for f in fields)),
    ):
        if there:
            parts += [_prefixes(_lengths(part), None, functools.partial(_wrapped, (tag,))), part]
    return _joined(rows, parts)


def _pairs(batch: pa.RecordBatch, fields: Sequence[Field]) -> list[tuple[Field, pa.Array]]:
    return list(zip(fields, batch.columns, strict=True))


def _message(rows: int, pieces: list[Any]) -> pa.Array:
    return _joined(rows, pieces) if pieces else large_binary(np.zeros(rows + 1, dtype=np.int64), b"")


def _joined(rows: int, pieces: list[Any]) -> pa.Array:
    """Concatenate pieces row by row. A piece is an array, or a scalar that is the same in every row."""
    if not rows:
        return pa.array([], pa.large_binary())
    if all(isinstance(piece, pa.Scalar) for piece in pieces):
        whole = b"".join(piece.as_py() for piece in pieces)
        return large_binary(np.arange(rows + 1) * len(whole), whole * rows)
    return pc.binary_join_element_wise(*pieces, EMPTY)


# --- prefixes -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    octets = bytearray()
    while number > 0x7F:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*octets, number])


def _wrapped(tags: tuple[int, ...], length: int) -> bytes:
    """Return the prefix of ``length`` bytes that are nested in fields with these tags, the innermost first."""
    before = b""
    for tag in tags:
        before = bytes([tag]) + _varint(length + len(before)) + before
    return before


def _entry(name: bytes, tags: tuple[int, ...], length: int) -> bytes:
    """Return the prefix of ``length`` bytes that are the value of a map's entry with the key ``name``."""
    value = _wrapped((*tags, _VALUE), length)
    key = bytes([_ELEMENT]) + _varint(len(name)) + name
    return bytes([_ENTRY]) + _varint(len(key) + len(value) + length) + key + value


def _prefixes(lengths: Ints, valid: np.ndarray[Any, Any] | None, prefix: Callable[[int], bytes]) -> Any:
    """Return the prefix for each row's length, empty for a null; a scalar if all rows have the same length."""
    if valid is None and len(lengths) and (lengths == lengths[0]).all():
        return pa.scalar(prefix(int(lengths[0])), pa.large_binary())
    if len(lengths) and int(lengths.max()) < _COUNTED:
        known = np.flatnonzero(np.bincount(lengths))
        place = np.zeros(_COUNTED, dtype=np.int64)
        place[known] = np.arange(len(known))
        places = place[lengths]
    else:
        known, places = np.unique(lengths, return_inverse=True)
    made = [prefix(length) for length in known.tolist()]
    if valid is not None:
        places = np.where(valid, places, len(made))
        made.append(b"")
    return pa.array(made, pa.large_binary()).take(pa.array(places))


# --- a column -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Values:
    """Values of all rows in one array, the number of values of each row, and which rows are not null (None: all)."""

    counts: Ints
    values: pa.Array
    valid: np.ndarray[Any, Any] | None

    @property
    def bounds(self) -> Ints:
        return np.concatenate(([0], np.cumsum(self.counts)))


def _column(field: Field, column: pa.Array) -> list[Any]:
    """Return the prefix and the data that a column adds to each record."""
    name = field.name.encode()
    rows = _rows(column, field.depth > 0)
    _refuse_length(field, rows)
    if field.depth == 2:
        features = _features(field, rows.values)
        data = large_binary(_offsets(features)[rows.bounds], features.buffers()[2])
        return [_prefixes(_lengths(data), rows.valid, functools.partial(_entry, name, ())), data]
    data = _data(field, rows)
    return [_heads(field, data, rows.valid, functools.partial(_entry, name)), data]


def _null_inside(field: Field) -> RecordError:
    return RecordError(
        f"column {field.name!r} has a null inside an array, which a record cannot store: filter it out, for example "
        f"with filter({field.name}, x -> x is not null)"
    )


def _features(field: Field, arrays: pa.Array) -> pa.Array:
    """Return each array, encoded as a Feature of a FeatureList."""
    if arrays.null_count:
        raise _null_inside(field)
    rows = _rows(arrays, is_list=True)
    _refuse_length(field, rows)
    data = _data(field, rows)
    return _joined(len(arrays), [_heads(field, data, None, _in_list), data])


def _in_list(tags: tuple[int, ...], length: int) -> bytes:
    return _wrapped((*tags, _ELEMENT), length)


def _heads(field: Field, data: pa.Array, valid: Any, around: Callable[[tuple[int, ...], int], bytes]) -> Any:
    """Return the prefix of each row's values. ``around(tags, length)`` makes the prefix around the Feature."""
    lone = field.kind is Kind.BYTES and not field.depth
    tag = _tag(field.kind)

    def prefix(length: int) -> bytes:
        packed = lone or (field.kind is not Kind.BYTES and length > 0)
        return around((_ELEMENT, tag) if packed else (tag,), length)

    return _prefixes(_lengths(data), valid, prefix)


def _tag(kind: Kind) -> int:
    return kind << 3 | 2


def _rows(column: pa.Array, is_list: bool) -> _Values:
    valid = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
    if not is_list:
        counts = np.ones(len(column), dtype=np.int64) if valid is None else valid.astype(np.int64)
        return _Values(counts, column.drop_null() if column.null_count else column, valid)
    lengths = column.value_lengths()
    if column.null_count:
        lengths = lengths.fill_null(0)
    return _Values(lengths.to_numpy(zero_copy_only=False).astype(np.int64), column.flatten(), valid)


def _refuse_length(field: Field, rows: _Values) -> None:
    innermost = not pa.types.is_list(rows.values.type) and not pa.types.is_large_list(rows.values.type)
    if field.length is None or not field.depth or not innermost:
        return
    wrong = rows.counts != field.length
    if rows.valid is not None:
        wrong &= rows.valid
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise RecordError(
            f"column {field.name!r} must have arrays of {field.length} values, got one of {rows.counts[row]}", row
        )


def _data(field: Field, rows: _Values) -> pa.Array:
    """Return the content of each row's BytesList, FloatList or Int64List, without its prefix.

    Raises
    ------
    RecordError
        For a null inside an array, or a number beyond float32.
    """
    values = rows.values
    if values.null_count:
        raise _null_inside(field)
    if field.kind is Kind.FLOAT:
        return large_binary(rows.bounds * 4, _floats(field, values))
    if field.kind is Kind.INT:
        octets, ends = _packed(values)
        return large_binary(np.concatenate(([0], ends))[rows.bounds], octets)
    return _strings(field, rows)


def _strings(field: Field, rows: _Values) -> pa.Array:
    values = rows.values.cast(pa.large_binary())
    if not field.depth:
        offsets = _offsets(values)
        return large_binary(offsets[rows.bounds], values.buffers()[2] or b"")
    heads = _prefixes(_lengths(values), None, functools.partial(_wrapped, (_ELEMENT,)))
    elements = _joined(len(values), [heads, values])
    return large_binary(_offsets(elements)[rows.bounds], elements.buffers()[2] or b"")


def _floats(field: Field, values: pa.Array) -> np.ndarray[Any, Any]:
    array = values.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        single: np.ndarray[Any, Any] = np.ascontiguousarray(array, dtype="<f4")
    if array.dtype == np.float32:
        return single
    lost = np.isinf(single) & np.isfinite(array)
    if lost.any():
        raise RecordError(
            f"column {field.name!r} has {array[lost][0]!r}, which is beyond float32, the only float type of a record: "
            "scale it, or write it as a string"
        )
    return single


def _packed(values: pa.Array) -> tuple[np.ndarray[Any, Any], Ints]:
    """Return integers or booleans as concatenated varints, and the end of each."""
    numbers = values.to_numpy(zero_copy_only=False)
    if numbers.dtype == np.bool_:
        return numbers.astype(np.uint8), np.arange(1, len(numbers) + 1)
    whole = numbers.astype(np.int64).view(np.uint64)
    longest = 1
    if len(whole):
        longest = max(1, -(-int(whole.max()).bit_length() // 7))
    if longest == 1:
        return whole.astype(np.uint8), np.arange(1, len(whole) + 1)
    octets = np.empty((len(whole), longest), dtype=np.uint8)
    sizes = np.ones(len(whole), dtype=np.int64)
    for number in range(longest):
        rest = whole >> np.uint64(7 * number)
        octets[:, number] = (rest & np.uint64(0x7F)).astype(np.uint8)
        more = rest > np.uint64(0x7F)
        octets[:, number] |= more.astype(np.uint8) << 7
        sizes += more
    return octets[np.arange(longest) < sizes[:, None]], np.cumsum(sizes)


def _offsets(array: pa.Array) -> Ints:
    if not len(array):
        return np.zeros(1, dtype=np.int64)
    return np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + len(array) + 1]


def _lengths(array: pa.Array) -> Ints:
    return np.diff(_offsets(array))
