"""Read protobuf fields at many positions of one block at once.

A span is the start and end of a message, or of a part of one. The spans of many records are two arrays. Each function
marks spans of an unusual form as odd. :mod:`tfos_nb.runtime.tfrecord.canonical` decides whether they are valid. The
encoding is that of https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["Bools", "Children", "Ints", "Octets", "gather", "inner", "numbers_of", "split", "varints"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Octets = np.ndarray[Any, np.dtype[np.uint8]]

_MORE = 0x80
_FIELD_1 = 0x0A  # the tag of field 1 with wire type LEN
_LENGTH_BYTES = 5  # protobuf's messages are shorter than 2 GiB
_FEW = 32
_NUMBER_BYTES = 10


def varints(data: Octets, at: Ints) -> tuple[Ints, Ints]:
    """Return the length encoded as a varint at each position, and the position after it.

    The length is -1 if the varint has more than five bytes.
    """
    first = data[at]
    values = first.astype(np.int64)
    after = at + 1
    open_ = np.flatnonzero(first >= _MORE)
    if not open_.size:
        return values, after
    values[open_] &= 0x7F
    for number in range(1, _LENGTH_BYTES):
        octets = data[after[open_]]
        values[open_] |= (octets & 0x7F).astype(np.int64) << (7 * number)
        after[open_] += 1
        open_ = open_[octets >= _MORE]
        if not open_.size:
            return values, after
    values[open_] = -1
    return values, after


def inner(data: Octets, starts: Ints, ends: Ints, tag: int = _FIELD_1) -> tuple[Ints, Bools]:
    """Return the start of the content of the one field that fills each span, and whether such a field does.

    The field must have the tag ``tag`` and a length that reaches to the span's end.
    """
    lengths, begins = varints(data, starts + 1)
    return begins, (data[starts] == tag) & (lengths >= 0) & (begins + lengths == ends) & (starts < ends)


@dataclass(frozen=True)
class Children:
    """Repeated fields inside spans, in order: start and end of each field's content, and the index of its span."""

    starts: Ints
    ends: Ints
    parents: Ints


def split(data: Octets, starts: Ints, ends: Ints) -> tuple[Children, Ints]:
    """Find the repeated field 1 that fills each span, and the spans that contain other fields.

    One step takes the next field of every span, so the span with the most fields determines the number of steps. When
    only few spans are left, they are processed one by one.
    """
    rows = np.flatnonzero(starts < ends)
    at, stop = starts[rows], ends[rows]
    found: list[tuple[Ints, Ints, Ints]] = []
    odd: list[Ints] = []
    while rows.size > _FEW:
        lengths, begins = varints(data, at + 1)
        after = begins + lengths
        good = (data[at] == _FIELD_1) & (lengths >= 0) & (after <= stop)
        if not good.all():
            odd.append(rows[~good])
            rows, begins, after, stop = rows[good], begins[good], after[good], stop[good]
        found.append((begins, after, rows))
        left = after < stop
        if left.all():
            at = after
        else:
            rows, at, stop = rows[left], after[left], stop[left]
    walked = _walk(data, rows, at, stop, odd)
    wrong = np.concatenate(odd) if odd else np.empty(0, dtype=np.int64)
    return _in_order(len(starts), found, walked), wrong


def _walk(data: Octets, rows: Ints, at: Ints, stop: Ints, odd: list[Ints]) -> tuple[Ints, Ints, Ints]:
    found: list[tuple[int, int, int]] = []
    raw = memoryview(data.data)
    for row, place, end in zip(rows.tolist(), at.tolist(), stop.tolist(), strict=True):
        while place < end:
            begin, after = _one(raw, place)
            if not begin or after > end:
                odd.append(np.array([row], dtype=np.int64))
                break
            found.append((begin, after, row))
            place = after
    columns = np.array(found, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _one(raw: memoryview, place: int) -> tuple[int, int]:
    """Return the start and end of the content of the field 1 at a position; zeros if there is no such field."""
    length = 0
    if raw[place] != _FIELD_1:
        return 0, 0
    for number in range(_LENGTH_BYTES):
        octet = raw[place + 1 + number]
        length |= (octet & 0x7F) << (7 * number)
        if octet < _MORE:
            begin = place + 2 + number
            return begin, begin + length
    return 0, 0


def _in_order(spans: int, steps: list[tuple[Ints, Ints, Ints]], walked: tuple[Ints, Ints, Ints]) -> Children:
    """Return the found fields ordered by span. The n-th step found the n-th field of each span that it processed."""
    parents = np.concatenate([*(rows for _, _, rows in steps), walked[2]])
    counts = np.bincount(parents, minlength=spans)
    begins = np.concatenate(([0], np.cumsum(counts)[:-1])) if spans else counts
    places = [begins[rows] + number for number, (_, _, rows) in enumerate(steps)]
    # The fields found one by one are in order, and follow those that the steps found in the same span.
    last = walked[2]
    nth = np.arange(len(last)) - np.searchsorted(last, last)
    places.append(begins[last] + len(steps) + nth)
    place = np.concatenate(places)
    columns = [np.empty(len(parents), dtype=np.int64) for _ in range(3)]
    for number, column in enumerate(columns):
        column[place] = np.concatenate([*(step[number] for step in steps), walked[number]])
    return Children(*columns)


def gather(data: bytes, starts: Ints, ends: Ints) -> pa.Array:
    """Copy ascending spans of a block into an Arrow array of ``large_binary``.

    The spans and the gaps between them are viewed as one Arrow array, of which every second element is taken.
    """
    count = len(starts)
    if not count:
        return pa.array([], pa.large_binary())
    bounds = np.empty(2 * count, dtype=np.int64)
    bounds[0::2], bounds[1::2] = starts, ends
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    both = pa.Array.from_buffers(pa.large_binary(), 2 * count - 1, buffers)
    return both.take(pa.array(np.arange(0, 2 * count - 1, 2)))


def numbers_of(octets: Octets) -> tuple[Ints, Ints]:
    """Return the int64 numbers of concatenated varints, and the end of each.

    Raises
    ------
    ValueError
        If a varint has more than ten bytes, or the last one is cut off.
    """
    if not octets.size:
        none = np.empty(0, dtype=np.int64)
        return none, none
    last = np.flatnonzero(octets < _MORE)
    if last.size == octets.size:
        return octets.astype(np.int64), last + 1
    starts = np.empty_like(last)
    starts[0], starts[1:] = 0, last[:-1] + 1
    sizes = last - starts + 1
    longest = int(sizes.max())
    if last[-1] != octets.size - 1 or longest > _NUMBER_BYTES:
        raise ValueError("a number that is not a varint")
    values = (octets[starts] & 0x7F).astype(np.uint64)
    for number in range(1, longest):
        longer = np.flatnonzero(sizes > number)
        values[longer] |= (octets[starts[longer] + number] & 0x7F).astype(np.uint64) << np.uint64(7 * number)
    return values.view(np.int64), last + 1
