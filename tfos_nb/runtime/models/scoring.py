"""Rows through a model, on the executors: what Spark runs.

::

    LookTask     one task, before there is a DataFrame: what does the model take and give?
    ScoreTask    every partition: batches of batch_size rows, whatever the size in which Spark hands them over
      .outputs     as an Arrow UDF: Spark sends the inputs alone, and keeps the other columns itself
      __call__     as mapInArrow, where Spark has no Arrow UDFs: all columns travel to and fro
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.models.inputs import Feed, Fill, Where, incomplete_rows
from tfos_nb.runtime.models.model import Model, ModelUnusable, Signature, described
from tfos_nb.runtime.models.model_cache import ModelAbsent, ModelCache, Share, Source
from tfos_nb.runtime.models.outputs import arrow_type, column_of
from tfos_nb.runtime.rows.ragged import Output

__all__ = ["LOOK_SCHEMA", "LookTask", "ModelLook", "ScoreTask", "partition_id", "rebatched", "take_model"]

Array = np.ndarray[Any, Any]

LOOK_SCHEMA = "answer binary"

_model_cache = ModelCache()
"""This process' one model: a Spark Python worker is used by one task after another."""


@message
@dataclass(frozen=True)
class ModelLook:
    """What a look at a model found: its signature, or why there is none, seen from which host."""

    host: str
    signature: Signature | None = None
    problem: str = ""
    absent: bool = False


@dataclass(frozen=True)
class LookTask:
    """Loads a model where it will be used, and tells what it takes and gives."""

    source: Source

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Give one row."""
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"answer": pa.array([wire.encode(self._look())], pa.binary())})

    def _look(self) -> ModelLook:
        host = socket.gethostname()
        try:
            return ModelLook(host, _model_cache.take(self.source, Share.of_task()).signature)
        except ModelUnusable as error:
            return ModelLook(host, problem=str(error), absent=isinstance(error, ModelAbsent))


@dataclass(frozen=True)
class ScoreTask:
    """Gives a model's outputs for the rows of a partition.

    Parameters
    ----------
    source : Source
        The model.
    signature : Signature
        What it took and gave when the driver looked.
    feeds : tuple of Feed or None
        One for each input, in the signature's order. None: the columns are the inputs, in order.
    batch_size : int
        Rows that the model takes at once; the last batch of a partition may have fewer.
    skip : bool
        Rows with a null in an input get no output, and are left out.
    single : bool
        As a UDF: give the only output itself, not a struct.
    fill : number, text or None
        Without feeds: what stands in place of a null.
    names : tuple of str
        As a UDF: what the outputs are called in the struct.
    """

    source: Source
    signature: Signature
    feeds: tuple[Feed, ...] | None
    batch_size: int
    skip: bool = False
    single: bool = False
    fill: Fill = None
    names: tuple[str, ...] = ()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Append the outputs to the columns."""
        for batch, added, there in self._scored(batches):
            rows = batch if there is None else batch.take(pa.array(there))
            columns = added if there is None else [column.take(pa.array(there)) for column in added]
            # Spark takes columns by position, but two of one name it would mix up.
            fields = [pa.field(f"output {index}", column.type) for index, column in enumerate(columns)]
            yield pa.RecordBatch.from_arrays([*rows.columns, *columns], schema=pa.schema([*rows.schema, *fields]))

    def outputs(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Give the outputs alone, for each row: a struct, or the only one itself."""
        for batch, added, there in self._scored(_as_batches(batches)):
            if self.single:
                yield added[0]
                continue
            left_out = None
            if there is not None:
                mask = np.ones(batch.num_rows, bool)
                mask[there] = False
                left_out = pa.array(mask)
            yield pa.StructArray.from_arrays(
                added, names=self.names or [f"f{i}" for i in range(len(added))], mask=left_out
            )

    def _scored(
        self, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[tuple[pa.RecordBatch, list[pa.Array], Array | None]]:
        """Give each batch with its outputs, and which of its rows have some; None: all."""
        model: Model | None = None
        where = Where(partition_id())
        for batch in rebatched(batches, self.batch_size):
            feeds = self.feeds if self.feeds is not None else self._feeds_by_place(batch.num_columns)
            rows, there = batch.columns, self._complete(batch, feeds)
            if there is not None:
                rows = [column.take(pa.array(there)) for column in rows]
            if there is not None and not len(there):
                yield batch, [pa.nulls(batch.num_rows, arrow_type(t)) for t in self.signature.outputs], there
            else:
                here = Where(where.partition, where.start, there)
                arrays = [feed.array(rows, here) for feed in feeds]  # a bad row is told of before TensorFlow starts
                model = model or take_model(self.source, self.signature)
                added = self._columns(model.apply(arrays), len(arrays[0]) if arrays else batch.num_rows)
                yield batch, added if there is None else _spread(added, there, batch.num_rows), there
            where = Where(where.partition, where.start + batch.num_rows)

    def _feeds_by_place(self, columns: int) -> tuple[Feed, ...]:
        inputs = self.signature.inputs
        names = tuple(f"argument {index + 1}" for index in range(columns))
        if len(inputs) == 1 and columns:
            self._refuse_width(columns)
            return (Feed(inputs[0], tuple(range(columns)), names, self.fill),)
        if len(inputs) != columns:
            raise FeedFailed(f"the model takes {len(inputs)} arguments, {described(inputs)}; it was given {columns}")
        return tuple(Feed(tensor, (i,), (names[i],), self.fill) for i, tensor in enumerate(inputs))

    def _refuse_width(self, columns: int) -> None:
        (tensor,) = self.signature.inputs
        if columns > 1 and (len(tensor.shape) != 1 or tensor.shape[0] not in (None, columns)):
            raise FeedFailed(f"the model takes {described([tensor])}; it was given {columns} arguments side by side")

    def _complete(self, batch: pa.RecordBatch, feeds: Sequence[Feed]) -> Array | None:
        if not self.skip:
            return None
        missing = incomplete_rows([batch.column(position) for feed in feeds for position in feed.positions])
        return None if missing is None else np.flatnonzero(~missing)

    def _columns(self, outputs: Sequence[Output], rows: int) -> list[pa.Array]:
        pairs = zip(outputs, self.signature.outputs, strict=True)
        return [column_of(output, tensor, rows) for output, tensor in pairs]


def take_model(source: Source, signature: Signature) -> Model:
    """Return this process' model, loaded if it is another one.

    Raises
    ------
    FeedFailed
        If it cannot be loaded, or is not what it was.
    """
    try:
        model = _model_cache.take(source, Share.of_task())
    except ModelUnusable as error:
        raise FeedFailed(f"the model cannot be loaded on {socket.gethostname()}: {error}") from error
    if model.signature != signature:
        raise FeedFailed("the model's inputs or outputs changed after it was loaded; call transform() again")
    return model


def partition_id() -> int:
    """Return the number of the partition that this task works on."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _as_batches(batches: Iterator[Any]) -> Iterator[pa.RecordBatch]:
    for given in batches:
        columns = given if isinstance(given, tuple) else (given,)  # Spark gives the only one itself
        if not columns:
            raise FeedFailed("the model needs arguments: name the columns, as in name(column)")
        yield pa.RecordBatch.from_arrays(list(columns), names=[f"c{index}" for index in range(len(columns))])


def _spread(columns: Sequence[pa.Array], there: Array, rows: int) -> list[pa.Array]:
    """Give each row its own value again, and null to those that were left out."""
    places = np.zeros(rows, np.int64)
    missing = np.ones(rows, bool)
    places[there] = np.arange(len(there))
    missing[there] = False
    indices = pa.array(places, mask=missing)
    return [column.take(indices) for column in columns]


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
