"""Read TFRecord files: find the positions of the records, read them, and parse them inside TensorFlow's pipeline.

The frame of a record is described in :mod:`tfos_nb.runtime.tfrecord.framing`. Records are counted by their lengths,
without reading their data. The checksums are verified when the records are read.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.datasets.files import File, Span, naming
from tfos_nb.runtime.tfrecord.framing import is_framed, scan

__all__ = ["TFRecords", "WithValues"]

_LENGTH = struct.Struct("<Q")
_BEFORE, _AFTER = 12, 4  # bytes of a record's frame before and after its data
_UNIT_RECORDS = 8192
_BLOCK_RECORDS = 1024


@dataclass
class TFRecords:
    """TFRecord files. Their batches have one column of bytes, ``record``, which ``decode`` parses.

    Parameters
    ----------
    files : list of File
        The files.
    features : mapping or None
        Features for ``tf.io.parse_example``. None: derived from the first record. Empty: records are not parsed.
    """

    files: list[File]
    features: Mapping[str, Any] | None = None
    _index: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    _first: bytes | None = None

    @property
    def decode(self) -> Any:
        """Function that parses a batch of records; None if they are not parsed."""
        if self.features is None:
            self.features = _features_of(self._first_record())
        return _Parse(dict(self.features)) if self.features else None

    def units(self) -> list[Span]:
        """Return spans of at most 8192 records each."""
        spans = []
        for file in self.files:
            count = len(self._places(file)) - 1
            spans += [Span(file, at, min(at + _UNIT_RECORDS, count)) for at in range(0, count, _UNIT_RECORDS)]
        return spans

    def _places(self, file: File) -> np.ndarray[Any, Any]:
        """Return the position of each record of a file, and the end of the last, in bytes."""
        if file.url not in self._index:
            with naming(file), _content(file) as content:
                self._index[file.url] = _places_in(file, content)
        return self._index[file.url]

    def batches(self, spans: Sequence[Span], columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Yield the records of spans, at most 1024 per batch. ``columns`` is ignored.

        Raises
        ------
        FeedFailed
            If a file is damaged or ends within a record.
        """
        for span in spans:
            places = self._places(span.file)
            stop = len(places) - 1 if span.stop is None else span.stop
            with naming(span.file), _content(span.file) as content:
                for at in range(span.start, stop, _BLOCK_RECORDS):
                    yield _records(span.file, content, places[at : min(at + _BLOCK_RECORDS, stop) + 1])

    def first(self) -> pa.RecordBatch:
        """Return the first record as a batch of one row.

        Raises
        ------
        FeedFailed
            If no file has a record.
        """
        return pa.RecordBatch.from_pydict({"record": pa.array([self._first_record()], pa.binary())})

    def _first_record(self) -> bytes:
        if self._first is None:
            self._first = self._read_first_record()
        return self._first

    def _read_first_record(self) -> bytes:
        for file in self.files:
            with naming(file), _content(file) as content:
                head = content.read(0, _BEFORE)
                if head:
                    return content.read(_BEFORE, _length_of(file, head, 0))
        raise FeedFailed(f"none of the {len(self.files)} files has a record; the first is {self.files[0].url}")


def _length_of(file: File, head: bytes, at: int) -> int:
    if len(head) < _BEFORE:
        raise FeedFailed(
            f"{file.url} ends within a record, at byte {at}: it was not written to its end; write it again, or leave "
            "it out of the pattern"
        )
    if not is_framed(head):
        raise FeedFailed(
            f"{file.url} is not a TFRecord file, or is damaged: the checksum at byte {at} is wrong; write it again, or "
            "leave it out of the pattern"
        )
    return int(_LENGTH.unpack_from(head)[0])


def _places_in(file: File, content: _Content) -> np.ndarray[Any, Any]:
    places, at = [0], 0
    while head := content.read(at, _BEFORE):
        length = _length_of(file, head, at) if at == 0 or len(head) < _BEFORE else _LENGTH.unpack_from(head)[0]
        at += _BEFORE + length + _AFTER
        places.append(at)
    if content.size is not None and at > content.size:
        raise FeedFailed(
            f"{file.url} ends within a record: the one at byte {places[-2]} would end at byte {at}, and the file has "
            f"{content.size}. It was not written to its end, or is damaged; write it again, or leave it out of the "
            "pattern"
        )
    return np.array(places, dtype=np.int64)


def _records(file: File, content: _Content, places: np.ndarray[Any, Any]) -> pa.RecordBatch:
    """Read consecutive records, whose positions and end are ``places``, and verify their checksums."""
    base, size = int(places[0]), int(places[-1] - places[0])
    data = content.read(base, size)
    if len(data) < size:
        raise EOFError(f"it ends before byte {base + size}; it may have been changed while it was read")
    found = scan(data, size)
    good = int(found.good.argmin()) if not found.good.all() else len(found.good)
    if good < len(places) - 1:
        raise FeedFailed(f"{file.url} is damaged: the checksum of the record at byte {int(places[good])} is wrong")
    records = [data[start:end] for start, end in zip(found.starts.tolist(), found.ends.tolist(), strict=True)]
    return pa.RecordBatch.from_pydict({"record": pa.array(records, pa.binary())})


class _Content:
    """Random access to the decompressed bytes of a file. A local uncompressed file is mapped into memory.

    ``size`` is None for a compressed file.
    """

    def __init__(self, file: File) -> None:
        self._map: mmap.mmap | None = None
        packed = file.compression is not None
        self.size: int | None = None if packed else int(file.system.size(file.path))
        self._stream = None if file.local and not packed else file.open()
        if self._stream is None and self.size:
            with open(file.path, "rb") as opened:
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, start: int, count: int) -> bytes:
        if self._map is not None:
            return self._map[start : start + count]
        if self._stream is None:
            return b""
        self._stream.seek(start)
        data: bytes = self._stream.read(count)
        return data

    def __enter__(self) -> _Content:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._map is not None:
            self._map.close()
        if self._stream is not None:
            self._stream.close()


def _content(file: File) -> _Content:
    if file.local and not os.access(file.path, os.R_OK):
        raise PermissionError("this host's user may not read it")
    return _Content(file)


@dataclass(frozen=True)
class _Parse:
    """Function for ``tf.data.Dataset.map`` that parses a batch of records with ``tf.io.parse_example``."""

    features: Mapping[str, Any]

    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        import tensorflow as tf

        parsed: dict[str, Any] = tf.io.parse_example(element["record"], self.features)
        return parsed


@dataclass(frozen=True)
class WithValues:
    """Function for ``tf.data.Dataset.map`` that decodes a batch and refuses rows without values in ragged columns.

    A mean or a maximum over no values is NaN. After one step with such a row, all weights are NaN.

    Parameters
    ----------
    decode : callable
        Converts a batch of records to columns.
    names : tuple of str
        Columns that are checked: those of the model's features.
    failed : callable
        Called with the error, because TensorFlow replaces an exception by an error of its own.
    """

    decode: Callable[[dict[str, Any]], dict[str, Any]]
    names: tuple[str, ...]
    failed: Callable[[FeedFailed], object]

    def __call__(self, element: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a batch of records."""
        import tensorflow as tf

        columns = self.decode(element)
        for name in self.names:
            ragged = columns.get(name)
            if isinstance(ragged, tf.RaggedTensor):
                lengths = tf.cast(ragged.row_lengths(), tf.int64)
                looked = tf.numpy_function(functools.partial(self._look, name), [lengths], tf.int64)
                with tf.control_dependencies([looked]):
                    columns[name] = ragged.with_flat_values(tf.identity(ragged.flat_values))
        return columns

    def _look(self, name: str, lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        empty = np.flatnonzero(lengths == 0)
        if len(empty):
            error = FeedFailed(
                f"feature {name!r} has no values in row {int(empty[0])} of a batch, and a mean or maximum over none is "
                f"NaN: leave such records out, read it padded with {name!r}: tf.io.FixedLenSequenceFeature([], TYPE, "
                "allow_missing=True), or, for a model that takes such rows, read dictionaries and map them yourself: "
                f"ctx.read(…, columns=[{name!r}, …]).map(…)"
            )
            self.failed(error)
            raise error
        return lengths


def _features_of(record: bytes) -> dict[str, Any]:
    """Return fixed-length features for ``tf.io.parse_example``, derived from one record.

    All other records must have the same features with the same numbers of values.

    Raises
    ------
    FeedFailed
        If the record is no ``tf.train.Example``, or has an empty feature.
    """
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    try:
        example = tf.train.Example.FromString(record)
    except DecodeError:
        example = tf.train.Example()
    if not example.features.feature:
        raise FeedFailed(
            "the first record is not a tf.train.Example: give features={…} as for tf.io.parse_example, or features={} "
            "to have the records as they are"
        )
    kinds = {"bytes_list": tf.string, "float_list": tf.float32, "int64_list": tf.int64}
    found = {}
    for name, feature in sorted(example.features.feature.items()):
        kind = feature.WhichOneof("kind")
        values = len(getattr(feature, kind).value) if kind else 0
        if not values:
            raise FeedFailed(f"feature {name!r} is empty in the first record: describe it with features={{…}}")
        found[name] = tf.io.FixedLenFeature([] if values == 1 else [values], kinds[kind])
    return found
