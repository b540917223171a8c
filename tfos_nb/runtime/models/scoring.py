"""Spark tasks that apply a model to rows.

::

    SignatureTask     one task before the DataFrame exists: load the model and return its signature
    ScoreTask    one task per partition: apply the model to batches of batch_size rows, whatever Spark's batches are
      .outputs     for an Arrow UDF: Spark sends only the inputs to Python
      __call__     for mapInArrow, where Spark has no Arrow UDFs: Spark sends and receives all columns
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
from tfos_nb.runtime.models.model import Model
from tfos_nb.runtime.models.model_cache import ModelAbsent, ModelCache, Source, TaskResources
from tfos_nb.runtime.models.outputs import arrow_type, column_of
from tfos_nb.runtime.models.signature import ModelUnusable, Signature, described
from tfos_nb.runtime.rows.batches import rebatched
from tfos_nb.runtime.rows.ragged import Output

__all__ = ["LOOK_SCHEMA", "ModelLook", "ScoreTask", "SignatureTask", "partition_id", "take_model"]

Array = np.ndarray[Any, Any]

LOOK_SCHEMA = "answer binary"

_model_cache = ModelCache()
"""Cache of this process. Spark reuses a Python worker for one task after another."""


@message
@dataclass(frozen=True)
class ModelLook:
    """Result of loading a model on an executor.

    Parameters
    ----------
    host : str
        Host of the executor.
    signature : Signature or None
        The model's signature. None: it could not be loaded.
    problem : str
        Why it could not be loaded.
    absent : bool
        Whether the reason is that no model exists there.
    """

    host: str
    signature: Signature | None = None
    problem: str = ""
    absent: bool = False


@dataclass(frozen=True)
class SignatureTask:
    """Spark task that loads a model on an executor and returns its signature."""

    source: Source

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return one row with an encoded :class:`ModelLook`. The input's rows are ignored."""
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"answer": pa.array([wire.encode(self._look())], pa.binary())})

    def _look(self) -> ModelLook:
        host = socket.gethostname()
        try:
            return ModelLook(host, _model_cache.take(self.source, TaskResources.of_task()).signature)
        except ModelUnusable as error:
            return ModelLook(host, problem=str(error), absent=isinstance(error, ModelAbsent))


@dataclass(frozen=True)
class ScoreTask:
    """Spark task that applies a model to the rows of a partition.

    Parameters
    ----------
    source : Source
        The model.
    signature : Signature
        The model's signature on the driver. Another signature on the executor is an error.
    feeds : tuple of Feed or None
        One for each input, in the signature's order. None: the columns are the inputs, in the same order.
    batch_size : int
        Rows per call of the model. The last batch of a partition may have fewer.
    skip : bool
        Whether rows with a null in an input are skipped: left out by :meth:`__call__`, null in :meth:`outputs`.
    single : bool
        In :meth:`outputs`: return the only output itself, not a struct.
    fill : number, text or None
        Without feeds: value that replaces a null.
    names : tuple of str
        In :meth:`outputs`: names of the struct's fields.
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
        """Return the partition's batches with the outputs appended to their columns."""
        for batch, added, there in self._scored(batches):
            rows = batch if there is None else batch.take(pa.array(there))
            columns = added if there is None else [column.take(pa.array(there)) for column in added]
            # Spark takes columns by position, but confuses two columns with the same name.
            fields = [pa.field(f"output {index}", column.type) for index, column in enumerate(columns)]
            yield pa.RecordBatch.from_arrays([*rows.columns, *columns], schema=pa.schema([*rows.schema, *fields]))

    def outputs(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Return only the outputs: for each row a struct, or the only output itself."""
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
        """Yield each batch, its outputs (null for skipped rows), and the indices of its other rows (None: all)."""
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
                arrays = [feed.array(rows, here) for feed in feeds]  # before the model, so that bad rows fail fast
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
            raise FeedFailed(
                f"the model takes {len(inputs)} arguments, {described(inputs)}, got {columns}; give one for each, "
                "in this order"
            )
        return tuple(Feed(tensor, (i,), (names[i],), self.fill) for i, tensor in enumerate(inputs))

    def _refuse_width(self, columns: int) -> None:
        (tensor,) = self.signature.inputs
        if columns > 1 and (len(tensor.shape) != 1 or tensor.shape[0] not in (None, columns)):
            raise FeedFailed(
                f"the model takes {described([tensor])}, got {columns} arguments side by side; give one array, or a "
                "number for each place of the input"
            )

    def _complete(self, batch: pa.RecordBatch, feeds: Sequence[Feed]) -> Array | None:
        if not self.skip:
            return None
        missing = incomplete_rows([batch.column(position) for feed in feeds for position in feed.positions])
        return None if missing is None else np.flatnonzero(~missing)

    def _columns(self, outputs: Sequence[Output], rows: int) -> list[pa.Array]:
        pairs = zip(outputs, self.signature.outputs, strict=True)
        return [column_of(output, tensor, rows) for output, tensor in pairs]


def take_model(source: Source, signature: Signature) -> Model:
    """Return a model from this process' cache, where it is loaded if it is another one.

    Raises
    ------
    FeedFailed
        If it cannot be loaded, or its signature is not ``signature``.
    """
    try:
        model = _model_cache.take(source, TaskResources.of_task())
    except ModelUnusable as error:
        raise FeedFailed(f"the model cannot be loaded on {socket.gethostname()}: {error}") from error
    if model.signature != signature:
        raise FeedFailed("the model's inputs or outputs changed after it was loaded; call transform() again")
    return model


def partition_id() -> int:
    """Return the number of the current task's partition; 0 outside a task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


def _as_batches(batches: Iterator[Any]) -> Iterator[pa.RecordBatch]:
    for given in batches:
        columns = given if isinstance(given, tuple) else (given,)  # Spark passes a single argument without a tuple
        if not columns:
            raise FeedFailed("the model needs arguments: name the columns, as in name(column)")
        yield pa.RecordBatch.from_arrays(list(columns), names=[f"c{index}" for index in range(len(columns))])


def _spread(columns: Sequence[pa.Array], there: Array, rows: int) -> list[pa.Array]:
    """Return columns of ``rows`` entries: the given ones at the indices ``there``, null elsewhere."""
    places = np.zeros(rows, np.int64)
    missing = np.ones(rows, bool)
    places[there] = np.arange(len(there))
    missing[there] = False
    indices = pa.array(places, mask=missing)
    return [column.take(indices) for column in columns]
