"""Rows through a model, on the executors: Arrow's columns become tensors, and what the model gives becomes columns.

::

    LookTask    one task, before there is a DataFrame: what does the model take and give?
    ScoreTask   every partition: batches of batch_size rows, whatever the size in which Spark hands them over
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime import wire
from tfos_nb.runtime.models import Model, ModelUnusable, Signature, Tensor
from tfos_nb.runtime.shelf import ModelAbsent, Parcel, Place, Share, Shelf
from tfos_nb.runtime.wire import message

__all__ = ["LOOK_SCHEMA", "SPARK_TYPES", "Feed", "LookTask", "Looked", "ScoreTask", "rebatched"]

Array = np.ndarray[Any, Any]

LOOK_SCHEMA = "answer binary"

SPARK_TYPES = {
    "bool": "boolean",
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "uint8": "short",
    "uint16": "integer",
    "uint32": "long",
    "uint64": "decimal(20,0)",
    "float16": "float",
    "bfloat16": "float",
    "float32": "float",
    "float64": "double",
    "string": "string",
}
"""TensorFlow's types, and the types in which Spark holds all of their values, as its schemas in JSON name them."""

_ARROW_TYPES = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "decimal(20,0)": pa.decimal128(20, 0),
    "string": pa.string(),
}

_shelf = Shelf()
"""This process' one model: a Spark Python worker is used by one task after another."""


@dataclass(frozen=True)
class Feed:
    """Which columns become an input: one, or several numeric ones side by side.

    ``positions`` are the columns' places in a batch, ``names`` what the user calls them.
    """

    tensor: Tensor
    positions: tuple[int, ...]
    names: tuple[str, ...]

    def array(self, batch: pa.RecordBatch) -> Array:
        """Return the input's array for some rows.

        Raises
        ------
        FeedFailed
            For a null, a list of a wrong length, or a value that the input's type cannot hold; it names the column.
        """
        shape = self.tensor.shape if len(self.positions) == 1 else ()
        parts = [
            _as_type(_values(batch.column(position), name, shape), self.tensor, name)
            for position, name in zip(self.positions, self.names, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)


# --- columns become tensors ---------------------------------------------------------------------------------------


def _values(values: pa.Array, name: str, shape: tuple[int | None, ...]) -> Array:
    """Turn a column into an array of one ``shape`` a row; a flat list may be laid into several axes."""
    rows, depth = len(values), _depth(values.type)
    flat = depth != len(shape)  # a number for an input of one value, or one list for several axes
    lengths: tuple[int | None, ...] = shape
    if flat:
        lengths = (math.prod(size or 1 for size in shape),) if depth else ()
    array = _vectors(values, name, lengths[0]) if pa.types.is_struct(values.type) else _lists(values, name, lengths)
    return array.reshape((rows, *(size or 1 for size in shape))) if flat else array


def _depth(kind: pa.DataType) -> int:
    depth = int(pa.types.is_struct(kind))  # an ML vector, in the form that Spark stores it in
    while _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _lists(values: pa.Array, name: str, lengths: Sequence[int | None]) -> Array:
    sizes = [len(values)]
    for wanted in lengths:
        _refuse_nulls(values, name, "" if len(sizes) == 1 else "in its lists")
        size = _same_length(values.value_lengths().to_numpy(zero_copy_only=False), wanted, name)
        values = values.flatten()
        sizes.append(size)
    _refuse_nulls(values, name, "" if len(sizes) == 1 else "in its lists")
    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        values = values.cast(pa.large_binary() if pa.types.is_large_string(values.type) else pa.binary())
    array: Array = values.to_numpy(zero_copy_only=False)
    return array.reshape(sizes)


def _vectors(values: pa.Array, name: str, wanted: int | None) -> Array:
    """Turn ML vectors, dense (type 1) and sparse (type 0), into a dense array."""
    _refuse_nulls(values, name)
    dense = values.field(0).to_numpy() == 1
    entries = values.field(3)
    counts = entries.value_lengths().fill_null(0).to_numpy()
    sizes = values.field(1).fill_null(0).to_numpy()
    size = _same_length(np.where(dense, counts, sizes), wanted, name)
    numbers = entries.flatten().to_numpy()
    if dense.all():
        return np.asarray(numbers).reshape((len(values), size))
    array = np.zeros((len(values), size))
    row = np.repeat(np.arange(len(values)), counts)
    place = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    place[~dense[row]] = values.field(2).filter(pa.array(~dense)).flatten().to_numpy()
    array[row, place] = numbers
    return array


def _same_length(lengths: Array, wanted: int | None, name: str) -> int:
    """Return the one length that all lists have.

    Raises
    ------
    FeedFailed
        If one has another.
    """
    size = wanted if wanted is not None else int(lengths[0]) if len(lengths) else 0
    wrong = lengths[lengths != size]
    if len(wrong):
        expected = f"the model takes {size}" if wanted is not None else f"another row of its batch has {size}"
        raise FeedFailed(
            f"column {name!r} has a list of {int(wrong[0])} values where {expected}: pad or cut it in Spark, or leave "
            "such rows out"
        )
    return size


def _refuse_nulls(values: pa.Array, name: str, where: str = "") -> None:
    if values.null_count:
        raise FeedFailed(
            f"column {name!r} has a null{' ' * bool(where)}{where}, and a tensor has none: fill it, for example with "
            f"df.fillna or coalesce, or drop such rows with df.dropna(subset=[{name!r}])"
        )


def _as_type(array: Array, tensor: Tensor, name: str) -> Array:
    """Give an array its input's type; a whole-number type must hold each value as it is."""
    if tensor.dtype == "string":
        return array
    wanted = np.dtype("float32" if tensor.dtype == "bfloat16" else tensor.dtype)
    if array.dtype == wanted:
        return array
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(wanted)
    if wanted.kind in "iub" and not np.can_cast(array.dtype, wanted) and not np.array_equal(cast, array):
        culprit = array[cast != array].flat[0]
        raise FeedFailed(
            f"column {name!r} has the value {culprit}, which input {tensor.name!r}, {tensor.dtype}, cannot hold: "
            "round or filter it in Spark"
        )
    return cast


# --- tensors become columns ---------------------------------------------------------------------------------------


def _column(array: Array, tensor: Tensor, rows: int) -> pa.Array:
    """Turn an output into a column: a value a row, or a list, or lists of lists."""
    if array.ndim != len(tensor.shape) + 1 or len(array) != rows:
        shape = "x".join(map(str, array.shape))
        raise FeedFailed(
            f"output {tensor.name!r} came as {shape} for {rows} rows: a model gives one value of the declared shape "
            "for each row"
        )
    sizes = () if tensor.shape == (1,) else array.shape[1:]
    column = _flat_column(array.reshape(-1), tensor)
    for level in reversed(range(len(sizes))):
        lists = rows * math.prod(sizes[:level])
        offsets = pa.array(np.arange(lists + 1, dtype=np.int64) * sizes[level]).cast(pa.int32())
        column = pa.ListArray.from_arrays(offsets, column)
    return column


def _flat_column(flat: Array, tensor: Tensor) -> pa.Array:
    kind = _ARROW_TYPES[SPARK_TYPES[tensor.dtype]]
    if tensor.dtype == "string":
        try:
            return pa.array(flat, pa.binary()).cast(kind)
        except pa.ArrowInvalid:
            raise FeedFailed(
                f"output {tensor.name!r} has bytes that are no UTF-8 text: let the model encode them, for example with "
                "tf.io.encode_base64"
            ) from None
    if tensor.dtype in ("float16", "bfloat16"):
        flat = flat.astype(np.float32)
    return pa.array(flat).cast(kind)


# --- tasks --------------------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True)
class Looked:
    """What a look at a model found: its signature, or why there is none, seen from which host."""

    host: str
    signature: Signature | None = None
    problem: str = ""
    absent: bool = False


@dataclass(frozen=True)
class LookTask:
    """Loads a model where it will be used, and tells what it takes and gives."""

    source: Parcel | Place

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Give one row."""
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"answer": pa.array([wire.encode(self._look())], pa.binary())})

    def _look(self) -> Looked:
        host = socket.gethostname()
        try:
            return Looked(host, _shelf.take(self.source, Share.of_task()).signature)
        except ModelUnusable as error:
            return Looked(host, problem=str(error), absent=isinstance(error, ModelAbsent))


@dataclass(frozen=True)
class ScoreTask:
    """Appends a model's outputs to the rows of a partition.

    Parameters
    ----------
    source : Parcel or Place
        The model.
    signature : Signature
        What it took and gave when the driver looked.
    feeds : tuple of Feed
        One for each input, in the signature's order.
    batch_size : int
        Rows that the model takes at once; the last batch of a partition may have fewer.
    """

    source: Parcel | Place
    signature: Signature
    feeds: tuple[Feed, ...]
    batch_size: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Score a partition; without rows the model is not loaded."""
        model: Model | None = None
        for batch in rebatched(batches, self.batch_size):
            arrays = [feed.array(batch) for feed in self.feeds]  # a bad row is told of before TensorFlow starts
            if model is None:
                model = self._model()
            yield self._appended(batch, model.apply(arrays))

    def _model(self) -> Model:
        try:
            model = _shelf.take(self.source, Share.of_task())
        except ModelUnusable as error:
            raise FeedFailed(f"the model cannot be loaded on {socket.gethostname()}: {error}") from error
        if model.signature != self.signature:
            raise FeedFailed("the model takes or gives something else than when predict() was called: call it anew")
        return model

    def _appended(self, batch: pa.RecordBatch, outputs: Sequence[Array]) -> pa.RecordBatch:
        added = [
            _column(np.asarray(array), tensor, batch.num_rows)
            for array, tensor in zip(outputs, self.signature.outputs, strict=True)
        ]
        # Spark takes columns by position, but two of one name it would mix up.
        fields = [pa.field(f"output {index}", column.type) for index, column in enumerate(added)]
        return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=pa.schema([*batch.schema, *fields]))


def rebatched(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """Cut a stream of batches into batches of ``size`` rows, the last perhaps smaller; only seams are copied."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        start = 0
        while rows + batch.num_rows - start >= size:
            taken = size - rows
            yield _joined([*waiting, batch.slice(start, taken)])
            start, waiting, rows = start + taken, [], 0
        if start < batch.num_rows:
            waiting.append(batch.slice(start))
            rows += batch.num_rows - start
    if rows:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays([batch.column(i) for batch in batches]) for i in range(batches[0].num_columns)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)
