"""A file becomes batches: read block by block, its damage told by byte or left out and counted.

::

    ReadTask (a Spark task): its share of the files ─▶ blocks ─▶ parse ─▶ columns ─▶ RecordBatch, as the schema has it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa

from tfos_nb.runtime.tfrecord.decode import columns
from tfos_nb.runtime.tfrecord.fields import DIRECTORIES, Field, RecordError, RecordType
from tfos_nb.runtime.tfrecord.files import DataFile, open_file, plain
from tfos_nb.runtime.tfrecord.framing import PAD, Scan, scan
from tfos_nb.runtime.tfrecord.parse import Parsed, parse

__all__ = [
    "BLOCK",
    "Block",
    "ContentTask",
    "Damage",
    "ReadTask",
    "Reading",
    "blocks",
    "fitted",
    "read_batches",
    "shares",
]

BLOCK = 4 * 1024 * 1024
"""How many bytes of a file are taken at once: large enough for columns, small enough for a processor's cache."""

_SHARE = 128 * 1024 * 1024
_SMALL = 4 * 1024 * 1024
_SKIP = "mode='skip' skips such records"


@dataclass(frozen=True)
class Damage:
    """What of a file was left out.

    Attributes
    ----------
    records : int
        How many records, of those that could be told apart.
    first : int
        The byte at which the first of them begins, in what is inside a compressed file.
    why : str
        What is wrong with that one.
    cut : int or None
        The byte from which on nothing could be read; None if the file was read to its end.
    """

    records: int
    first: int
    why: str
    cut: int | None = None


class Tally(Protocol):
    """Takes what was left out."""

    def add(self, term: dict[str, Damage]) -> Any:
        """Add the damage of a file."""


@dataclass(frozen=True)
class Block:
    """Some whole records of a file: ``data`` begins at the file's byte ``offset``."""

    data: bytes
    offset: int
    scan: Scan
    broken: str = ""


def blocks(file: BinaryIO, size: int = BLOCK) -> Iterator[Block]:
    """Read a file of records block by block; the last one says why it is the last, if the file does not end there."""
    rest, offset, wanted = b"", 0, size
    while True:
        chunk = file.read(max(size, wanted - len(rest)))
        data = b"".join((rest, chunk, PAD))
        scanned = scan(data, len(data) - len(PAD))
        broken = scanned.broken
        if not chunk and not broken:
            broken = getattr(file, "broken", "") or ("the file ends within a record" if rest else "")
        if len(scanned.starts) or broken:
            yield Block(data, offset, scanned, broken)
        if broken or not chunk:
            return
        offset += scanned.consumed
        rest, wanted = data[scanned.consumed : -len(PAD)], scanned.wanted


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Parameters
    ----------
    fields : tuple of Field
        The columns that are features.
    record_type : RecordType
        The message that each record holds.
    order : tuple of str
        All columns as they come out: the features, ``partition`` and ``bad_column``.
    partition : tuple of (str, str)
        Partition columns and their types.
    skip : bool
        Leave out what is damaged, instead of failing.
    bad_column : str
        A column of text that tells of each damage, in a row of its own; empty: none.
    tally : Tally or None
        Takes what was left out.
    """

    fields: tuple[Field, ...]
    record_type: RecordType
    order: tuple[str, ...]
    partition: tuple[tuple[str, str], ...] = ()
    skip: bool = False
    bad_column: str = ""
    tally: Any = field(default=None, repr=False)

    def schema(self) -> pa.Schema:
        """Return Arrow's schema of what comes out."""
        kinds = {one.name: one.arrow for one in self.fields}
        kinds.update({name: DIRECTORIES[kind] for name, kind in self.partition})
        if self.bad_column:
            kinds[self.bad_column] = pa.string()
        return pa.schema([pa.field(name, kinds[name]) for name in self.order])


def read_batches(reading: Reading, file: DataFile, stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Read a file.

    Raises
    ------
    RecordError
        For a damaged record, unless these are skipped, and for one that does not fit the schema. The message has the
        file and the byte at which the record begins.
    """
    return _Reader(reading, file).batches(stream)


class _Reader:
    def __init__(self, reading: Reading, file: DataFile) -> None:
        self._reading = reading
        self._file = file
        self._schema = reading.schema()
        self._wanted = {one.name for one in reading.fields}
        self._bad: list[tuple[int, str]] = []
        self._records = 0
        self._first: tuple[int, str] | None = None

    def batches(self, stream: BinaryIO) -> Iterator[pa.RecordBatch]:
        for block in blocks(stream):
            good = self._good(block)
            starts = block.scan.starts[good]
            parsed = parse(block.data, starts, block.scan.ends[good], self._reading.record_type, self._wanted)
            heads = block.offset + starts - 12
            for row, why in sorted(parsed.bad.items()):
                self._damaged(int(heads[row]), why)
            batch = self._columns(parsed, heads)
            if batch.num_rows:
                yield batch
            cut = block.offset + block.scan.consumed if block.broken else None
            if cut is not None:
                self._damaged(cut, block.broken)
            if self._bad:
                yield from self._told()
            if self._reading.tally is not None and self._first is not None:
                self._reading.tally.add({self._file.url: Damage(self._records, *self._first, cut)})

    def _good(self, block: Block) -> Any:
        good = block.scan.good
        for place in (block.offset + block.scan.starts[~good] - 12).tolist():
            self._damaged(place, "the checksum of the record is wrong")
        return good

    def _damaged(self, place: int, why: str) -> None:
        """Count a record that is damaged, or fail."""
        if not place and "length" in why:
            why = "it is no TFRecord file"
        if not self._reading.skip:
            raise RecordError(f"{plain(self._file.url)}, byte {place}: {why}; {_SKIP}", corrupt=True)
        self._records += 1
        self._first = self._first or (place, why)
        if self._reading.bad_column:
            self._bad.append((place, why))

    def _columns(self, parsed: Parsed, heads: Any) -> pa.RecordBatch:
        try:
            batch = columns(parsed, self._reading.fields)
        except RecordError as error:
            place = int(heads[error.row or 0])
            raise RecordError(f"{plain(self._file.url)}, byte {place}: {error}", corrupt=False) from None
        rows = parsed.rows
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
        if parsed.bad:
            keep = pa.array(np.setdiff1d(np.arange(rows), list(parsed.bad)))
            arrays = {name: array.take(keep) for name, array in arrays.items()}
            rows = len(keep)
        return self._whole(arrays, rows)

    def _told(self) -> Iterator[pa.RecordBatch]:
        """Yield a row for each damage."""
        texts = [f"{plain(self._file.url)}, byte {place}: {why}" for place, why in self._bad]
        self._bad.clear()
        nothing = {one.name: pa.nulls(len(texts), one.arrow) for one in self._reading.fields}
        yield self._whole({**nothing, self._reading.bad_column: pa.array(texts)}, len(texts))

    def _whole(self, arrays: dict[str, pa.Array], rows: int) -> pa.RecordBatch:
        """Add the partition's values, and put the columns in order."""
        values = dict(self._file.partition)
        for name, kind in self._reading.partition:
            text = pa.array([values.get(name)], pa.string())
            arrays[name] = text.cast(DIRECTORIES[kind]).take(pa.array(np.zeros(rows, dtype=np.int64)))
        if self._reading.bad_column:
            arrays.setdefault(self._reading.bad_column, pa.nulls(rows, pa.string()))
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch that says as little of nulls as a schema does: the same values, under its types.

    Raises
    ------
    RecordError
        If a column that the schema declares not to be null has a null.
    """
    for name in schema.names:
        if batch.column(name).null_count and not schema.field(name).nullable:
            raise RecordError(f"column {name!r} is declared not null, and a record has no such feature")
    arrays = [_typed(batch.column(name), schema.field(name).type) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _typed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return array
    inside = [_typed(array.values, kind.value_type)]
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:2], array.null_count, array.offset, inside)


def shares(files: Sequence[DataFile], parallelism: int) -> tuple[tuple[DataFile, ...], ...]:
    """Deal files out to tasks, in their order: about as many bytes to each, at most 128 MiB where files allow it."""
    total = sum(file.size for file in files)
    limit = min(_SHARE, max(_SMALL, -(-total // max(1, parallelism))))
    dealt: list[list[DataFile]] = []
    weight = limit
    for file in files:
        if weight + file.size > limit:
            dealt.append([])
            weight = 0
        dealt[-1].append(file)
        weight += file.size
    return tuple(tuple(share) for share in dealt)


@dataclass(frozen=True)
class ReadTask:
    """Reads shares of the files; what it is given (``mapInArrow``) are the numbers of the shares."""

    reading: Reading
    shares: tuple[tuple[DataFile, ...], ...] = field(repr=False)

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the files."""
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for file in self.shares[number]:
                    with open_file(file.url) as stream:
                        yield from read_batches(self.reading, file, stream)


@dataclass(frozen=True)
class ContentTask:
    """Reads files whose path and content Spark itself has read (``binaryFile``), through Hadoop's file systems."""

    reading: Reading
    files: dict[str, DataFile] = field(repr=False)

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the files."""
        from io import BytesIO

        from tfos_nb.runtime.tfrecord.files import inflated

        for batch in rows:
            for path, content in zip(batch.column(0), batch.column(1), strict=True):
                file = self.files.get(path.as_py()) or DataFile(path.as_py(), len(content.as_py()))
                yield from read_batches(self.reading, file, inflated(BytesIO(content.as_py())))
