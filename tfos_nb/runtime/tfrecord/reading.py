"""Read files as Arrow batches, block by block. A damaged record is an error, or is skipped and counted.

::

    ReadTask (a Spark task): its share of the files ─▶ blocks ─▶ parse ─▶ columns ─▶ RecordBatch
"""

from __future__ import annotations

import itertools
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
"""Bytes of a file that are read at once: many enough for work by column, few enough for a processor's cache."""

_SHARE = 128 * 1024 * 1024
_SMALL = 4 * 1024 * 1024
_SKIP = "mode='skip' skips such records"


@dataclass(frozen=True)
class Damage:
    """Damage that was skipped in a file. Positions are in bytes of the decompressed content.

    Attributes
    ----------
    records : int
        Number of damaged records. The unreadable end of a file counts as one.
    first : int
        Start of the first damaged record.
    why : str
        What is wrong with it.
    cut : int or None
        Position after which nothing could be read. None: the file was read to its end.
    """

    records: int
    first: int
    why: str
    cut: int | None = None


class Tally(Protocol):
    """Receiver of the damage that was skipped, such as a Spark accumulator."""

    def add(self, term: dict[str, Damage]) -> Any:
        """Add the damage of a file, by its URL."""


@dataclass(frozen=True)
class Block:
    """Complete records of a file.

    Attributes
    ----------
    data : bytes
        Bytes of the file, with padding after them.
    offset : int
        Position of ``data`` in the file, in bytes.
    scan : Scan
        Positions of the records in ``data``.
    broken : str
        Why the file cannot be read after this block; empty if it can, or if it ends here.
    """

    data: bytes
    offset: int
    scan: Scan
    broken: str = ""


def blocks(file: BinaryIO, size: int = BLOCK) -> Iterator[Block]:
    """Yield the blocks of a file. If the file cannot be read to its end, ``broken`` of the last block says why."""
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
    """Description of how files are read.

    Parameters
    ----------
    fields : tuple of Field
        Columns that are features.
    record_type : RecordType
        Message in which the records are encoded.
    order : tuple of str
        Names of all columns in their order: features, partition columns and ``bad_column``.
    partition : tuple of (str, str)
        Partition columns and their types.
    skip : bool
        Whether damaged records are skipped. False: they are an error.
    bad_column : str
        Column of text. Each skipped record becomes a row that has only this text. Empty: no such column.
    tally : Tally or None
        Receives the damage that was skipped.
    """

    fields: tuple[Field, ...]
    record_type: RecordType
    order: tuple[str, ...]
    partition: tuple[tuple[str, str], ...] = ()
    skip: bool = False
    bad_column: str = ""
    tally: Any = field(default=None, repr=False)

    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the batches."""
        kinds = {one.name: one.arrow for one in self.fields}
        kinds.update({name: DIRECTORIES[kind] for name, kind in self.partition})
        if self.bad_column:
            kinds[self.bad_column] = pa.string()
        return pa.schema([pa.field(name, kinds[name]) for name in self.order])


def read_batches(reading: Reading, file: DataFile, stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a file.

    Parameters
    ----------
    reading : Reading
        How it is read.
    file : DataFile
        Its URL and partition values.
    stream : file
        Its decompressed content.

    Raises
    ------
    RecordError
        For a damaged record, unless these are skipped, and for a record that does not fit the schema. The message has
        the file and the byte at which the record begins.
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
        """Count a damaged record, or raise RecordError if records are not skipped."""
        if not place and "length" in why:
            why = "it is not a TFRecord file"
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
        """Yield a batch with one row for each damage that was found since the last call."""
        texts = [f"{plain(self._file.url)}, byte {place}: {why}" for place, why in self._bad]
        self._bad.clear()
        nothing = {one.name: pa.nulls(len(texts), one.arrow) for one in self._reading.fields}
        yield self._whole({**nothing, self._reading.bad_column: pa.array(texts)}, len(texts))

    def _whole(self, arrays: dict[str, pa.Array], rows: int) -> pa.RecordBatch:
        """Return a batch of the arrays and the partition's values, with the columns in order."""
        values = dict(self._file.partition)
        for name, kind in self._reading.partition:
            text = pa.array([values.get(name)], pa.string())
            arrays[name] = text.cast(DIRECTORIES[kind]).take(pa.array(np.zeros(rows, dtype=np.int64)))
        if self._reading.bad_column:
            arrays.setdefault(self._reading.bad_column, pa.nulls(rows, pa.string()))
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the same values and a schema that may declare columns or elements as not nullable.

    Raises
    ------
    RecordError
        If a column that the schema declares as not nullable has a null.
    """
    for name in schema.names:
        if batch.column(name).null_count and not schema.field(name).nullable:
            raise RecordError(
                f"column {name!r} is declared not null, but a record has no such feature; declare it nullable"
            )
    arrays = [_typed(batch.column(name), schema.field(name).type) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _typed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return array
    inside = [_typed(array.values, kind.value_type)]
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:2], array.null_count, array.offset, inside)


def shares(files: Sequence[DataFile], parallelism: int) -> tuple[tuple[DataFile, ...], ...]:
    """Divide files among tasks, in order.

    A share has about ``1 / parallelism`` of all bytes, but at least 4 MiB and at most 128 MiB. A larger file is a share
    of its own, because files are not split.
    """
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
    """Task for ``mapInArrow`` that reads shares of the files. It receives the numbers of the shares as rows."""

    reading: Reading
    shares: tuple[tuple[DataFile, ...], ...] = field(repr=False)

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the files."""
        shares = (self.shares[number] for batch in numbers for number in batch.column(0).to_pylist())
        for file in itertools.chain.from_iterable(shares):
            with open_file(file.url) as stream:
                yield from read_batches(self.reading, file, stream)


@dataclass(frozen=True)
class ContentTask:
    """Task for ``mapInArrow`` that reads files from rows of path and content.

    Spark's source ``binaryFile`` reads such rows through Hadoop's file systems.
    """

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
