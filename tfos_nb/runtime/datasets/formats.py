"""Read Parquet, CSV and image files as Arrow record batches.

TFRecord files are read by :mod:`tfos_nb.runtime.datasets.record_files`.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.datasets.files import File, Reading, Span, list_files, naming
from tfos_nb.runtime.datasets.record_files import TFRecords

__all__ = ["Csv", "Images", "Parquet", "reading"]

_ENDINGS = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".tsv"),
    "images": (".png", ".jpg", ".jpeg", ".gif", ".bmp"),
    "tfrecord": (".tfrecord", ".tfrecords", ".tfr"),
}
_ONLY_FOR = {"features": "tfrecord", "types": "csv", "image_size": "images"}
_IMAGES_AT_ONCE = 64
_THREADS = 8


def reading(pattern: str | Sequence[str], kind: str | None, **options: Any) -> Reading:
    """List the files of a pattern and return the reader for their format.

    Parameters
    ----------
    pattern : str or sequence of str
        Paths, URLs, directories or glob patterns.
    kind : str or None
        ``"parquet"``, ``"csv"``, ``"images"`` or ``"tfrecord"``. None: chosen by the files' suffixes.
    **options
        ``features``, ``types`` and ``image_size``; None if not given.

    Raises
    ------
    FeedFailed
        If nothing matches, or the suffixes do not determine one format.
    ValueError
        If the format is not known, or an option belongs to another format.
    """
    if kind is not None and kind not in _ENDINGS:
        raise ValueError(f"format must be one of {', '.join(sorted(_ENDINGS))}, got {kind!r}")
    files = list_files(pattern)
    kind = kind or _format_of(files)
    for name, value in options.items():
        if value is not None and _ONLY_FOR[name] != kind:
            raise ValueError(f"{name}= is for format={_ONLY_FOR[name]!r}, and these files are {kind}: leave it out")
    made: dict[str, Any] = {
        "parquet": lambda: Parquet(files),
        "csv": lambda: Csv(files, dict(options["types"] or {})),
        "images": lambda: Images(files, options["image_size"]),
        "tfrecord": lambda: TFRecords(files, options["features"]),
    }
    chosen: Reading = made[kind]()
    return chosen


def _format_of(files: Sequence[File]) -> str:
    kinds: dict[str, str] = {}
    for file in files:
        name = file.path.lower().removesuffix(".gz")
        kind = next((kind for kind, endings in _ENDINGS.items() if name.endswith(endings)), "")
        kinds.setdefault(kind, file.url)
    if "" in kinds:
        raise FeedFailed(
            f"{kinds['']}: its name has no known ending; give format='tfrecord', 'parquet', 'csv' or 'images'"
        )
    if len(kinds) > 1:
        told = ", ".join(f"{url} is {kind}" for kind, url in kinds.items())
        raise FeedFailed(
            f"the pattern matches files of several formats: {told}; give one that matches a single format, such as "
            "'dir/*.parquet'"
        )
    return next(iter(kinds))


def _check_like_first(first: File, ours: pa.Schema, file: File, theirs: pa.Schema) -> None:
    """Raise FeedFailed if a file's columns or types are not those of the first file."""
    for name in dict.fromkeys([*ours.names, *theirs.names]):
        kinds = [schema.field(name).type if name in schema.names else None for schema in (ours, theirs)]
        if kinds[0] != kinds[1]:
            is_now, was = (str(kind) if kind is not None else "missing" for kind in (kinds[1], kinds[0]))
            raise FeedFailed(
                f"{file.url}: column {name!r} is {is_now}, and in {first.url} it is {was}; write all files with the "
                "same columns and types, or leave this one out of the pattern"
            )


class Parquet:
    """Parquet files. Their units are row groups, whose rows are counted by the files' footers."""

    decode = None

    def __init__(self, files: list[File]) -> None:
        self.files = files
        self._schema: pa.Schema | None = None

    def _open(self, file: File) -> Any:
        import pyarrow.parquet as pq

        with naming(file):
            opened = pq.ParquetFile(file.path, memory_map=True) if file.local else pq.ParquetFile(file.open())
        if self._schema is None:
            self._schema = opened.schema_arrow if file == self.files[0] else self._open(self.files[0]).schema_arrow
        _check_like_first(self.files[0], self._schema, file, opened.schema_arrow)
        return opened

    def units(self) -> list[Span]:
        """Return one span per row group."""
        spans = []
        for file in self.files:
            ends = _ends_of_groups(self._open(file))
            spans += [Span(file, start, end) for start, end in itertools.pairwise([0, *ends])]
        return spans

    def batches(self, spans: Sequence[Span], columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of spans, with only the given columns."""
        for file, group in itertools.groupby(spans, key=lambda span: span.file):
            yield from self._batches_of(file, group, columns)

    def _batches_of(self, file: File, spans: Iterable[Span], columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        opened = self._open(file)
        names = opened.schema_arrow.names
        known = None if columns is None else [name for name in dict.fromkeys(columns) if name in names]
        ends = _ends_of_groups(opened)
        for span in spans:
            stop = opened.metadata.num_rows if span.stop is None else span.stop
            for number in _groups_with(ends, span.start, stop):
                with naming(file):
                    rows = opened.iter_batches(row_groups=[number], columns=known)
                    yield from _sliced(rows, ends[number - 1] if number else 0, span.start, stop)

    def first(self) -> pa.RecordBatch:
        """Return the first batch of rows, without rows if no file has any."""
        for batch in self.batches([Span(file) for file in self.files], None):
            if batch.num_rows:
                return batch
        assert self._schema is not None, "a file was opened"
        return pa.RecordBatch.from_pylist([], schema=self._schema)


def _ends_of_groups(opened: Any) -> list[int]:
    about = opened.metadata
    return list(itertools.accumulate(about.row_group(number).num_rows for number in range(about.num_row_groups)))


def _groups_with(ends: Sequence[int], start: int, stop: int) -> range:
    """Return the numbers of the row groups with rows from ``start`` to ``stop``, given where each group ends."""
    if start >= stop:
        return range(0)
    return range(bisect.bisect_right(ends, start), bisect.bisect_left(ends, stop) + 1)


def _sliced(batches: Iterable[pa.RecordBatch], at: int, start: int, stop: int | None) -> Iterator[pa.RecordBatch]:
    """Yield only the rows from ``start`` to ``stop`` of batches. The first batch begins with row ``at``."""
    for batch in batches:
        low = max(start - at, 0)
        high = batch.num_rows if stop is None else min(stop - at, batch.num_rows)
        if low < high:
            yield batch.slice(low, high - low)
        at += batch.num_rows
        if stop is not None and at >= stop:
            return


@dataclass
class Csv:
    """CSV files with a header line. Counting their rows reads them completely.

    Parameters
    ----------
    files : list of File
        The files.
    types : mapping of str to str
        Arrow's names of types, by column. The types of other columns are inferred from the first rows.
    """

    files: list[File]
    types: Mapping[str, str] = field(default_factory=dict)
    decode: Any = None
    _schema: pa.Schema | None = None
    _typical: File | None = None  # the file from which _schema was taken

    def _read(self, file: File) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file; none if it is empty or has only a header line."""
        with _advising(file), file.open() as stream:
            reader = self._reader(file, stream)
            if reader is None:
                return
            if self._schema is not None and reader.schema != self._schema:
                _check_like_first(self._typical or file, self._schema, file, reader.schema)
            for batch in reader:
                if self._schema is None and batch.num_rows:
                    self._learn(file, reader.schema)
                yield batch

    def _reader(self, file: File, stream: Any) -> Any:
        from pyarrow import csv

        known = {name: _arrow_type(name, kind) for name, kind in self.types.items()}
        if self._schema is not None:
            known = dict(zip(self._schema.names, self._schema.types, strict=True))
        parse = csv.ParseOptions(delimiter="\t" if ".tsv" in file.path.lower() else ",", newlines_in_values=True)
        try:
            return csv.open_csv(stream, parse_options=parse, convert_options=csv.ConvertOptions(column_types=known))
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return None
            raise

    def _learn(self, file: File, schema: pa.Schema) -> None:
        for name in self.types:
            if name not in schema.names:
                raise FeedFailed(f"{file.url}: types= names {name!r}, and the columns are {', '.join(schema.names)}")
        self._schema, self._typical = schema, file

    def units(self) -> list[Span]:
        """Return one span per file."""
        return [Span(file, 0, sum(batch.num_rows for batch in self._read_as_first(file))) for file in self.files]

    def _read_as_first(self, file: File) -> Iterator[pa.RecordBatch]:
        if self._schema is None:
            self.first()
        return self._read(file)

    def batches(self, spans: Sequence[Span], columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of spans, with only the given columns."""
        for span in spans:
            for batch in _sliced(self._read_as_first(span.file), 0, span.start, span.stop):
                yield (
                    batch if columns is None else batch.select([name for name in batch.schema.names if name in columns])
                )

    def first(self) -> pa.RecordBatch:
        """Return the first rows of the first file that has rows. They determine the types of the columns.

        Raises
        ------
        FeedFailed
            If no file has rows.
        """
        for file in self.files:
            for batch in self._read(file):
                if batch.num_rows:
                    return batch
        raise FeedFailed(f"none of the {len(self.files)} files has a row; the first is {self.files[0].url}")


@contextlib.contextmanager
def _advising(file: File) -> Iterator[None]:
    """Context manager like :func:`naming` that adds advice about a value of another type."""
    try:
        with naming(file):
            yield
    except FeedFailed as error:
        if "CSV conversion error" not in str(error):
            raise
        raise FeedFailed(
            f"{error}. The types are those of the first rows: set others with types=, as in types={{'x': 'float64'}}"
        ) from error


def _arrow_type(name: str, kind: str) -> pa.DataType:
    try:
        return pa.type_for_alias(kind)
    except ValueError:
        raise ValueError(
            f"types={{{name!r}: {kind!r}}}: Arrow has no such type; 'float32', 'int64', 'string' are"
        ) from None


class Images:
    """Image files, one row each.

    The columns are ``image`` (uint8, height x width x 3), ``label`` (number of the file's directory in the sorted list
    of directories) and ``path``.

    Parameters
    ----------
    files : list of File
        The files.
    size : (int, int) or None
        Height and width to which the images are resized. None: all must have one size.
    """

    decode = None

    def __init__(self, files: list[File], size: Any) -> None:
        if size is not None and (not isinstance(size, (tuple, list)) or len(size) != 2):
            raise ValueError(f"image_size must be (height, width), got {size!r}")
        self.files = files
        self._size = size
        self._found: tuple[int, ...] = ()
        names = sorted({os.path.basename(os.path.dirname(file.path)) for file in files})
        self._classes = {name: number for number, name in enumerate(names)}

    def units(self) -> list[Span]:
        """Return one span of one row per file."""
        return [Span(file, 0, 1) for file in self.files]

    def batches(self, spans: Sequence[Span], columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Yield the images of spans, 64 per batch, read and decoded by 8 threads. All columns are returned."""
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(spans), _IMAGES_AT_ONCE):
                files = [span.file for span in spans[start : start + _IMAGES_AT_ONCE]]
                pixels = list(pool.map(self._pixels, files))
                self._check_sizes(files, pixels)
                yield self._batch(files, np.stack(pixels))

    def _check_sizes(self, files: Sequence[File], pixels: Sequence[np.ndarray[Any, Any]]) -> None:
        for file, array in zip(files, pixels, strict=True):
            self._found = self._found or array.shape[:2]
            if array.shape[:2] != self._found:
                sizes = ["x".join(map(str, shape)) for shape in (array.shape[:2], self._found)]
                raise FeedFailed(
                    f"{file.url} is {sizes[0]}, and the first image {sizes[1]}: give image_size=(height, width), "
                    "to which all are resized"
                )

    def _batch(self, files: Sequence[File], pixels: np.ndarray[Any, Any]) -> pa.RecordBatch:
        images = pa.array(pixels.reshape(-1))
        for length in reversed(pixels.shape[1:]):
            images = pa.FixedSizeListArray.from_arrays(images, int(length))
        labels = [self._classes[os.path.basename(os.path.dirname(file.path))] for file in files]
        columns = {
            "image": images,
            "label": pa.array(labels, pa.int64()),
            "path": pa.array([file.url for file in files]),
        }
        return pa.RecordBatch.from_pydict(columns)

    def _pixels(self, file: File) -> np.ndarray[Any, Any]:
        import tensorflow as tf

        with naming(file), tf.device("cpu"):
            data = file.system.cat_file(file.path)
            try:
                image = tf.io.decode_image(data, channels=3, expand_animations=False)
            except tf.errors.InvalidArgumentError as error:
                raise FeedFailed(
                    f"{file.url} is not an image that TensorFlow can read: {error.message.splitlines()[0]}"
                ) from None
            if self._size is not None:
                image = tf.cast(tf.round(tf.image.resize(image, self._size)), tf.uint8)
            array: np.ndarray[Any, Any] = image.numpy()
        return array

    def first(self) -> pa.RecordBatch:
        """Return the first image as a batch of one row."""
        pixels = self._pixels(self.files[0])
        self._check_sizes(self.files[:1], [pixels])
        return self._batch(self.files[:1], pixels[None])
