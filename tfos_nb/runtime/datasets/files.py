"""List the files that the nodes read themselves, and divide their rows among the nodes.

::

    pattern ──list──▶ files, sorted ──count──▶ units (rows of one file) ──cut into even shares──▶ this node's spans
                                                │ shuffle: permute the units, in the same way on every node
                                                ▼
                                            reading.batches(spans) ──▶ Arrow record batches ──▶ ctx.read(…)

Every node lists the files and counts the rows itself. All nodes get the same result, so they exchange no messages.
Paths are local, or URLs of a scheme that fsspec supports.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed.messages import FeedSchema
from tfos_nb.runtime.feed.passes import Pass, Readers, Shares
from tfos_nb.runtime.rows.columns import first_lengths
from tfos_nb.runtime.storage.paths import is_hidden
from tfos_nb.runtime.storage.remote import Unreachable, file_system

__all__ = ["File", "FileSource", "Reading", "Span", "list_files", "naming", "share_of_files"]

_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class File:
    """File of an fsspec file system: its full name, its path in the file system, and the file system."""

    url: str
    path: str
    system: Any

    @property
    def local(self) -> bool:
        """Whether fsspec opens it as a local file."""
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self.system, LocalFileSystem)

    @property
    def compression(self) -> str | None:
        """The compression that the suffix of its name stands for, if fsspec knows it."""
        from fsspec.utils import infer_compression

        found: str | None = infer_compression(self.path)
        return found

    def open(self) -> Any:
        """Open the file for reading. If its suffix is that of a compression, its content is decompressed."""
        return self.system.open(self.path, "rb", compression="infer")


@contextlib.contextmanager
def naming(file: File) -> Iterator[None]:
    """Context manager that raises read errors as FeedFailed with the name of the file."""
    try:
        yield
    except (OSError, EOFError, ValueError, pa.ArrowException) as error:
        said = str(error).strip().splitlines()
        raise FeedFailed(f"{file.url}: {said[0] if said else type(error).__name__}") from error


def list_files(pattern: str | Sequence[str]) -> list[File]:
    """Return the files that match one or several patterns, sorted by name, without duplicates.

    A directory stands for all files in it and below it. As in Spark, those that :func:`is_hidden` names are left
    out there.

    Raises
    ------
    FeedFailed
        If a pattern matches nothing, or its file system cannot be reached.
    """
    patterns = [pattern] if isinstance(pattern, (str, os.PathLike)) else list(pattern)
    found: dict[str, File] = {}
    for one in patterns:
        matching = _matching(os.fspath(one))
        if not matching:
            raise FeedFailed(
                f"{one} matches no file, seen from {socket.gethostname()}. The nodes read it, not the notebook: it "
                "must be a path that is the same on every host, or a URL"
            )
        found.update((file.url, file) for file in matching)
    if not found:
        raise FeedFailed("no pattern was given: ctx.read('dir/*.parquet', 64)")
    return sorted(found.values(), key=lambda file: file.url)


def _matching(pattern: str) -> list[File]:
    try:
        system, path = file_system(pattern)
        if glob.has_magic(path):
            paths = [str(name) for name, info in system.glob(path, detail=True).items() if info["type"] == "file"]
        elif system.isdir(path):
            paths = [name for name in system.find(path) if not any(map(is_hidden, name[len(path) :].split("/")))]
        else:
            paths = [path] if system.exists(path) else []
        return [File(system.unstrip_protocol(name) if "://" in pattern else name, name, system) for name in paths]
    except Unreachable as error:
        raise FeedFailed(str(error)) from error
    except (OSError, ValueError) as error:
        raise FeedFailed(
            f"{pattern} cannot be listed from {socket.gethostname()}, and every node must be able to read it: {error}"
        ) from error


def share_of_files(pattern: str | Sequence[str], rank: int, count: int) -> list[str]:
    """Return the names of every ``count``-th file, beginning with number ``rank`` (from 0)."""
    return [file.url for file in list_files(pattern)][rank::count]


@dataclass(frozen=True)
class Span:
    """Rows ``start`` to ``stop`` of a file, without ``stop``. None: to the end of the file."""

    file: File
    start: int = 0
    stop: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows. ``stop`` must not be None."""
        assert self.stop is not None, "a span that was counted"
        return self.stop - self.start


class Reading(Protocol):
    """Files of one format.

    Attributes
    ----------
    files : list of File
        The files.
    decode : callable or None
        Converts the columns of a batch inside TensorFlow's pipeline. None: they need no conversion.
    """

    files: list[File]
    decode: Any

    def units(self) -> list[Span]:
        """Return all rows of all files, as spans that can be read independently. Their rows are counted."""
        ...

    def batches(self, spans: Sequence[Span], columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of spans. ``columns`` are the columns that are needed; None: all. More may be returned."""
        ...

    def first(self) -> pa.RecordBatch:
        """Return the first rows of the first file that has rows.

        If no file has rows, return a batch without rows, or raise FeedFailed if the schema is then unknown.
        """
        ...


class FileSource:
    """Source of a dataset: this node's share of the rows of files, for any number of passes.

    Parameters
    ----------
    reading : Reading
        The files and their format.
    place : tuple of int
        Number of this node among the nodes that read, from 0, and their number.
    shuffle : int
        Size in rows of the window within which rows are shuffled; the units are shuffled too. 0: no shuffling.
    seed : int
        Seed of the orders. Each pass has another order.
    share : {"rows", "files"}
        Divide rows, so that no two nodes differ by more than one row, or whole files.

    Raises
    ------
    ValueError
        If ``shuffle``, ``seed`` or ``share`` is wrong.
    """

    def __init__(self, reading: Reading, place: tuple[int, int], *, shuffle: int, seed: int, share: str) -> None:
        if share not in ("rows", "files"):
            raise ValueError(f"share must be 'rows' or 'files', got {share!r}")
        if type(shuffle) is not int or shuffle < 0 or type(seed) is not int or seed < 0:
            raise ValueError(f"shuffle and seed must be whole numbers, 0 or more, got {shuffle!r} and {seed!r}")
        self.reading = reading
        self.wanted: Sequence[str] | None = None
        self._rank, self._count = place
        self._shuffle = shuffle
        self._seed = seed
        self._share = share
        self._units: list[Span] | None = None
        self._passes = 0

    def schema(self) -> FeedSchema | None:
        """Return the schema of the rows, from the first ones."""
        first = self.reading.first()
        return FeedSchema(0, first.schema.serialize().to_pybytes(), first_lengths(first))

    def next_pass(self, readers: Readers | None = None) -> Pass | None:
        """Return the rows of the share for the next pass."""
        number, self._passes = self._passes, self._passes + 1
        batches = self.reading.batches(self.spans(number), self.wanted)
        return Pass(self._mixed(batches, number) if self._shuffle else batches, self._shares)

    def _shares(self) -> Shares | None:
        """Return the nodes' numbers of rows; None if whole files are divided, because their rows are not counted."""
        if self._share == "files" or self._units is None:
            return None
        total = sum(unit.rows for unit in self._units)
        bounds = [total * rank // self._count for rank in range(self._count + 1)]
        sizes = [last - first for first, last in itertools.pairwise(bounds)]
        return Shares(sizes[self._rank], total, max(sizes))

    def spans(self, number: int) -> list[Span]:
        """Return the spans that this node reads in a pass. Passes are counted from 0."""
        if self._units is None:
            self._units = self._all_units()
        order = np.arange(len(self._units))
        if self._shuffle:
            order = np.random.default_rng((self._seed, number)).permutation(len(order))
        units = [self._units[index] for index in order]
        return units if self._share == "files" else _cut(units, self._rank, self._count)

    def _all_units(self) -> list[Span]:
        if self._share == "files":
            return [Span(file) for file in self.reading.files[self._rank :: self._count]]
        return self.reading.units()

    def _mixed(self, batches: Iterator[pa.RecordBatch], number: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows shuffled within windows of at least ``shuffle`` rows."""
        chance = np.random.default_rng((self._seed, number, 1 + self._rank))
        window: list[pa.RecordBatch] = []
        for batch in batches:
            window.append(batch)
            if sum(part.num_rows for part in window) >= self._shuffle:
                yield from _permuted(window, chance)
                window = []
        yield from _permuted(window, chance)


def _cut(units: Sequence[Span], rank: int, count: int) -> list[Span]:
    """Return the spans of share ``rank`` of ``count`` shares, which differ by at most one row."""
    total = sum(unit.rows for unit in units)
    first, last = total * rank // count, total * (rank + 1) // count
    share, at = [], 0
    for unit in units:
        low, high = max(first - at, 0), min(last - at, unit.rows)
        if low < high:
            share.append(Span(unit.file, unit.start + low, unit.start + high))
        at += unit.rows
    return share


def _permuted(window: Sequence[pa.RecordBatch], chance: np.random.Generator) -> Iterator[pa.RecordBatch]:
    if not window:
        return
    table = pa.Table.from_batches(window).combine_chunks()
    yield from table.take(pa.array(chance.permutation(table.num_rows))).to_batches(max_chunksize=_BLOCK_ROWS)
