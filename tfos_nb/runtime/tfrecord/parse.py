"""Parse the features of all records of a block at once.

Records of unusual form are first rewritten by :mod:`tfos_nb.runtime.tfrecord.canonical`, one by one. Invalid records
are reported by row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.runtime.tfrecord.canonical import NotThatMessage, canonical
from tfos_nb.runtime.tfrecord.fields import Kind, RecordType
from tfos_nb.runtime.tfrecord.framing import PAD
from tfos_nb.runtime.tfrecord.spans import Bools, Children, Ints, Octets, gather, inner, numbers_of, split, varints

__all__ = ["Lists", "Nested", "Parsed", "parse"]

_KEY, _VALUE = 0x0A, 0x12
_CONTEXT, _LISTS = 0x0A, 0x12
_NONE: Ints = np.empty(0, dtype=np.int64)
_SHORT = 1 << 16


@dataclass(frozen=True)
class Lists:
    """Features of one column that have the same kind of values.

    Attributes
    ----------
    kind : Kind
        The list that is set.
    rows : numpy.ndarray
        The rows that have such a feature, ascending.
    counts : numpy.ndarray
        Number of values in each of these rows.
    values : numpy.ndarray or pyarrow.Array
        Values of all these rows, concatenated: float32, int64, or an Arrow array of ``large_binary``.
    """

    kind: Kind
    rows: Ints
    counts: Ints
    values: Any


@dataclass(frozen=True)
class Nested:
    """Feature lists of one column: ``counts[i]`` features in row ``rows[i]``. Each is a row of ``inner``."""

    rows: Ints
    counts: Ints
    inner: tuple[Lists, ...]


@dataclass(frozen=True)
class Parsed:
    """Features of records.

    Attributes
    ----------
    rows : int
        Number of records.
    features : mapping of str to tuple of Lists
        By name, one entry for each kind of values that occurs.
    lists : mapping of str to Nested
        Feature lists of SequenceExamples, by name.
    bad : mapping of int to str
        Rows that are not a valid message, and why. They have no features.
    """

    rows: int
    features: Mapping[str, tuple[Lists, ...]]
    lists: Mapping[str, Nested]
    bad: Mapping[int, str] = field(default_factory=dict)


def parse(
    data: bytes, starts: Ints, ends: Ints, record_type: RecordType, wanted: Collection[str] | None = None
) -> Parsed:
    """Return the features of records.

    Parameters
    ----------
    data : bytes
        A block, with at least :data:`~tfos_nb.runtime.tfrecord.framing.PAD` after its last record.
    starts, ends : numpy.ndarray
        Start and end of each message in ``data``, ascending.
    record_type : RecordType
        Type of the messages.
    wanted : collection of str, optional
        Names of the columns to return. Default: all.
    """
    parsed, odd = _Parse(data, wanted).run(starts, ends, record_type)
    if not odd.size:
        return parsed
    data, starts, ends, bad = _mended(data, starts, ends, odd, record_type)
    parsed, still = _Parse(data, wanted).run(starts, ends, record_type)
    if still.size:
        raise AssertionError(f"protobuf wrote {data[starts[still[0]] : ends[still[0]]]!r}")
    return Parsed(parsed.rows, parsed.features, parsed.lists, bad)


def _mended(
    data: bytes, starts: Ints, ends: Ints, odd: Ints, record_type: RecordType
) -> tuple[bytes, Ints, Ints, dict[int, str]]:
    """Return the block with its odd records rewritten, and why others are bad. A bad record becomes empty."""
    messages = [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    bad: dict[int, str] = {}
    for row in np.unique(odd).tolist():
        try:
            messages[row] = canonical(messages[row], record_type)
        except NotThatMessage as error:
            messages[row], bad[row] = b"", str(error)
    bounds = np.concatenate(([0], np.cumsum([len(message) for message in messages]))).astype(np.int64)
    return b"".join([*messages, PAD]), bounds[:-1], bounds[1:], bad


class _Parse:
    """One pass over a block. It collects the rows of unusual form in ``_odd``."""

    def __init__(self, data: bytes, wanted: Collection[str] | None) -> None:
        self._data = data
        self._octets: Octets = np.frombuffer(data, dtype=np.uint8)
        self._wanted = None if wanted is None else frozenset(wanted)
        self._odd: list[Ints] = []

    def run(self, starts: Ints, ends: Ints, record_type: RecordType) -> tuple[Parsed, Ints]:
        rows = np.arange(len(starts))
        starts, at = starts.astype(np.int64), ends.astype(np.int64)
        context, after = self._part(starts, at, _CONTEXT)
        lists: dict[str, Nested] = {}
        if record_type is RecordType.SEQUENCE_EXAMPLE:
            body, after = self._part(after, at, _LISTS)
            lists = {name: self._nested(entry) for name, entry in self._entries(*body, rows).items()}
        self._note(rows, after == at)
        entries = self._entries(*context, rows)
        features = {name: self._features(entry.parents, entry.starts, entry.ends) for name, entry in entries.items()}
        odd = np.concatenate(self._odd) if self._odd else _NONE
        return Parsed(len(rows), features, lists), odd

    def _note(self, rows: Ints, good: Bools) -> bool:
        """Add the rows that are not good to the odd ones. Return whether all rows are good."""
        if good.all():
            return True
        self._odd.append(rows[~good])
        return False

    def _part(self, starts: Ints, ends: Ints, tag: int) -> tuple[tuple[Ints, Ints], Ints]:
        """Return the content of a field at the beginning of each span, and the position after it.

        If a span does not begin with the field, its content is empty.
        """
        there = (self._octets[starts] == tag) & (starts < ends)
        lengths, begins = varints(self._octets, starts + 1)
        fits = there & (lengths >= 0) & (begins + lengths <= ends)
        begins = np.where(fits, begins, starts)
        after = np.where(fits, begins + lengths, starts)
        return (begins, after), after

    def _entries(self, starts: Ints, ends: Ints, rows: Ints) -> dict[str, Children]:
        """Return the spans of the values of a map, by key."""
        entries, odd = split(self._octets, starts, ends)
        self._odd.append(rows[odd])
        if not len(entries.parents):
            return {}
        lengths, keys = varints(self._octets, entries.starts + 1)
        key_ends = keys + lengths
        good = (self._octets[entries.starts] == _KEY) & (lengths >= 0) & (key_ends < entries.ends)
        if not self._note(entries.parents, good):
            return {}
        values, fits = inner(self._octets, key_ends, entries.ends, _VALUE)
        if not self._note(entries.parents, fits):
            return {}
        return self._by_key(gather(self._data, keys, key_ends), Children(values, entries.ends, entries.parents))

    def _by_key(self, keys: pa.Array, values: Children) -> dict[str, Children]:
        coded = keys.dictionary_encode()
        codes = coded.indices.to_numpy()
        if len(coded.dictionary) < _SHORT:
            codes = codes.astype(np.uint16)  # NumPy has a radix sort for 16-bit integers, which is faster
        order = np.argsort(codes, kind="stable")
        bounds = np.concatenate(([0], np.cumsum(np.bincount(codes))))
        found = {}
        for code, key in enumerate(coded.dictionary.to_pylist()):
            mine = order[bounds[code] : bounds[code + 1]]
            try:
                name = key.decode()
            except UnicodeDecodeError:  # canonical() reports the record as invalid
                self._odd.append(values.parents[mine])
                continue
            if self._wanted is not None and name not in self._wanted:
                continue
            entry = Children(values.starts[mine], values.ends[mine], values.parents[mine])
            twice = np.diff(entry.parents) == 0
            self._note(entry.parents[1:], ~twice)
            found[name] = entry
        return found

    def _features(self, rows: Ints, starts: Ints, ends: Ints, parents: Ints | None = None) -> tuple[Lists, ...]:
        """Return the values of features, by kind.

        ``rows`` has the row of each in the result, and ``parents`` its record (default: the same).
        """
        parents = rows if parents is None else parents
        there = starts < ends
        if not there.all():  # a Feature without a list counts as missing
            rows, starts, ends, parents = rows[there], starts[there], ends[there], parents[there]
        tags = self._octets[starts]
        found = []
        for kind in Kind:
            mine = np.flatnonzero(tags == (kind << 3 | 2))
            if not mine.size:
                continue
            begins, good = inner(self._octets, starts[mine], ends[mine], kind << 3 | 2)
            if self._note(parents[mine], good):
                found.append(self._list(kind, rows[mine], parents[mine], (begins, ends[mine])))
        known = (tags & 7 == 2) & (tags >> 3 >= 1) & (tags >> 3 <= len(Kind))
        self._note(parents, known)
        return tuple(one for one in found if one is not None)

    def _list(self, kind: Kind, rows: Ints, parents: Ints, spans: tuple[Ints, Ints]) -> Lists | None:
        begins, ends = spans
        filled = begins < ends
        starts, good = inner(self._octets, begins, ends)
        if kind is Kind.BYTES:
            if good.all():
                return Lists(kind, rows, np.ones(len(rows), dtype=np.int64), gather(self._data, starts, ends))
            return self._strings(rows, parents, begins, ends)
        good |= ~filled
        starts = np.where(filled, starts, ends)
        if kind is Kind.FLOAT:
            good &= (ends - starts) % 4 == 0
        else:
            good &= ~filled | (self._octets[ends - 1] < 0x80)
        if not self._note(parents, good):
            return None
        packed = gather(self._data, starts, ends)
        octets = np.frombuffer(packed.buffers()[2] or b"", dtype=np.uint8)[: int((ends - starts).sum())]
        if kind is Kind.FLOAT:
            return Lists(kind, rows, (ends - starts) // 4, octets.view("<f4"))
        return self._numbers(rows, parents, ends - starts, octets)

    def _numbers(self, rows: Ints, parents: Ints, sizes: Ints, octets: Octets) -> Lists | None:
        try:
            values, stops = numbers_of(octets)
        except ValueError:
            self._odd.append(parents)
            return None
        counts = sizes
        if len(values) != len(octets):
            counts = np.diff(np.searchsorted(stops, np.concatenate(([0], np.cumsum(sizes))), side="right"))
        return Lists(Kind.INT, rows, counts, values)

    def _strings(self, rows: Ints, parents: Ints, begins: Ints, ends: Ints) -> Lists:
        elements, odd = split(self._octets, begins, ends)
        self._odd.append(parents[odd])
        counts = np.bincount(elements.parents, minlength=len(rows)).astype(np.int64)
        return Lists(Kind.BYTES, rows, counts, gather(self._data, elements.starts, elements.ends))

    def _nested(self, entry: Children) -> Nested:
        """Return the feature lists of one column."""
        features, odd = split(self._octets, entry.starts, entry.ends)
        self._odd.append(entry.parents[odd])
        counts = np.bincount(features.parents, minlength=len(entry.parents)).astype(np.int64)
        parents = entry.parents[features.parents]
        inside = self._features(np.arange(len(parents)), features.starts, features.ends, parents)
        return Nested(entry.parents, counts, inside)
