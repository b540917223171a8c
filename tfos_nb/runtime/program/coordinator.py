"""Asynchronous training: datasets on the workers, fed from Spark there, for a coordinator's steps.

::

    chief                                              worker (ctx.serve())
      coordinator.schedule(step, iterator) ──gRPC──▶     iterator of a tf.data pipeline
                                                           └─ PyFunc, by name ──▶ LocalFeed ──▶ RowQueue ◀── Spark

A dataset function of ``ClusterCoordinator.create_per_worker_dataset`` becomes a graph that runs on each worker, where
no Python code of the coordinator can be called. But TensorFlow's PyFunc operation finds its function by a token in the
process that executes it, and our workers are Python processes. A worker registers its rows under fixed tokens before
its server starts, and the coordinator's dataset uses these tokens.

The operation is public (``tf.raw_ops.PyFunc``); the registry, ``tensorflow.python.ops.script_ops._py_funcs``, is not.
It is used only here, and a worker tests it before it serves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tfos_nb.errors import FeedFailed, TfosError
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.datasets.dataset import NO_ROWS, Blocks, DatasetOptions, Pairs, chosen_columns
from tfos_nb.runtime.datasets.tuning import as_fed
from tfos_nb.runtime.feed.messages import FeedSchema
from tfos_nb.runtime.feed.passes import Readers
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.feed.spill import Spill
from tfos_nb.runtime.rows.columns import Column

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["FedDataset", "LocalFeed", "cut", "fed_columns", "idle", "take_step"]

logger = logging.getLogger(__name__)

_TOKEN = "tfos_nb_"  # noqa: S105 - a name in TensorFlow's registry, not a secret
_ASKED_EVERY = 0.5  # seconds after which a worker answers "not yet" and the coordinator asks again
_LONGEST_REST = 1.0  # seconds: the end of a pass waits for resting workers
_MANY = 1 << 62


@message
@dataclass(frozen=True)
class Described:
    """A worker's answer to the question for its rows' schema: not known yet, known, or no rows will come."""

    schema: FeedSchema | None = None
    none_will_come: bool = False


@message
@dataclass(frozen=True)
class Wanted:
    """Options of a coordinator's dataset: the columns, the replacements of nulls, and whether it never ends."""

    columns: tuple[str, ...]
    fill: dict[str, Any] = field(default_factory=dict)
    repeat: bool = False


class LocalFeed:
    """A worker's rows, available by token to TensorFlow operations that run in this process.

    TensorFlow's registry has only weak references to its functions: keep the object while the process serves.

    Parameters
    ----------
    passes : RowQueue
        The worker's rows.
    task : int
        The worker's index.
    stopping : threading.Event
        Set when the user has asked the cluster to stop.
    """

    def __init__(self, passes: RowQueue, task: int, stopping: threading.Event) -> None:
        self._passes = passes
        self._task = task
        self._stopping = stopping
        self._turn = threading.Lock()
        self._number = 0
        self._turn_of = 0  # the coordinator's last known pass, counted from 1
        self._live: Generator[dict[str, Any], None, None] | None = None
        self._columns: tuple[Column, ...] = ()
        self._known = threading.Event()
        self._described = Described()
        self._entries = {
            "describe": _Entry(self.describe),
            "open": _Entry(self.open),
            "next": _Entry(self.next),
            "take": _Entry(self.take),
            "idle": _Entry(self.idle),
            "cut": _Entry(self.cut),
        }

    def register(self) -> None:
        """Register the rows' tokens for the operations of this process, and test them.

        Raises
        ------
        TfosError
            If this TensorFlow does not keep its functions as TensorFlow 2.16 to 2.21 do.
        """
        import tensorflow as tf

        self._passes.leave_to_another()
        try:
            from tensorflow.python.ops import script_ops

            for name, entry in self._entries.items():
                script_ops._py_funcs._funcs[_TOKEN + name] = entry
            told = take_step(np.int64(0))
        except (ImportError, AttributeError, TypeError, tf.errors.OpError) as error:
            raise TfosError(_unlike(tf.__version__, error)) from error
        if int(told) != self._task:
            raise TfosError(_unlike(tf.__version__, f"its token must be of task {self._task}, got {int(told)}"))
        threading.Thread(target=self._learn, name="tfos_nb feed's schema", daemon=True).start()

    def _learn(self) -> None:
        schema = self._passes.schema()
        self._described = Described(schema, schema is None)
        self._known.set()

    def describe(self) -> bytes:
        """Return the rows' schema, or after a moment the answer that it is not known yet."""
        self._known.wait(_ASKED_EVERY)
        return wire.encode(self._described)

    def open(self, wanted: Any) -> Any:
        """Begin a pass and return its number. A previous pass that has not ended is closed."""
        asked = wire.expect(Wanted, wanted)
        self._known.wait()  # a worker that joined late may get the schema later than the coordinator
        described = self._described.schema
        assert described is not None, "the coordinator has asked for it"
        with self._turn:
            if self._live is not None:
                self._live.close()
            self._columns = chosen_columns(described, DatasetOptions(1, columns=asked.columns, fill=asked.fill))
            self._number += 1
            if 0 < self._turn_of <= self._passes.passes_before:
                self._live = None  # this worker's predecessor has finished this pass
                return np.int64(self._number)
            passes: Any = self._passes
            if asked.repeat:
                self._passes.repeat()
                passes = _Repeated(self._passes, self._stopping)
            self._live = Blocks(passes, self._columns, asked.fill, _log_failure)()  # type: ignore[assignment]
            return np.int64(self._number)

    def next(self, number: Any) -> list[Any]:
        """Return the next block of a pass: whether one exists, and the columns' arrays."""
        with self._turn:
            block = next(self._live, None) if self._live is not None and number == self._number else None
            if block is None:
                empty = [np.empty((0, *column.shape), column.dtype) for column in self._columns]
                return [np.bool_(False), *empty]
            return [np.bool_(True), *(block[column.name] for column in self._columns)]

    def take(self, turn: Any) -> Any:
        """Record the number of the pass of the coordinator's next step; return this worker's number."""
        self._turn_of = int(turn)
        return np.int64(self._task)

    def cut(self) -> Any:
        """Drop later passes over delivered rows, since workers that joined late get a share of them.

        Return this worker's number.
        """
        self._passes.cut()
        return np.int64(self._task)

    def idle(self, rest: Any) -> Any:
        """Wait ``rest`` seconds, at most one, because this worker has finished its rows and others have not.

        Return this worker's number.
        """
        self._stopping.wait(min(float(rest), _LONGEST_REST))
        return np.int64(self._task)


def _log_failure(error: FeedFailed) -> None:
    logger.error("%s", error)


@dataclass(frozen=True, eq=False)
class _Entry:
    """Function for the registry, which needs an object that can be weakly referenced, unlike a bound method."""

    function: Callable[..., Any]

    def __call__(self, *values: Any) -> Any:
        return self.function(*values)


@dataclass(frozen=True)
class _Repeated:
    """Endless pass: all passes that Spark delivers, and then the rows of the last one repeatedly."""

    passes: RowQueue
    stopping: threading.Event

    def next_pass(self, readers: Readers | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows."""
        kept: Spill | None = None
        try:
            while (batches := self.passes.next_pass()) is not None:
                if kept is not None:
                    kept.close()
                kept = self.passes.new_spill()
                for batch in batches:
                    kept.write(batch)
                    yield batch
                kept.seal()
            if kept is not None and not kept.whole:
                raise FeedFailed("the rows could not be kept on disk, so they cannot be repeated: raise spill_bytes")
            while kept is not None and kept.bytes and not self.stopping.is_set():
                yield from kept.batches()
        finally:
            if kept is not None:
                kept.close()


def _unlike(version: str, why: object) -> str:
    return (
        f"a coordinator cannot reach a worker's rows: TensorFlow {version} registers Python functions in another way "
        f"than 2.16 to 2.21 ({why}). Launch with input_mode='tensorflow' and let the workers read files"
    )


def fed_columns(options: DatasetOptions, stopping: threading.Event) -> tuple[Column, ...]:
    """Ask a worker for the rows' schema and return the chosen columns; waits for the first row on any worker.

    Raises
    ------
    FeedFailed
        If no rows will come, or a column does not exist or cannot become a tensor.
    """
    import tensorflow as tf

    described = Described()
    while described.schema is None:
        if described.none_will_come or stopping.is_set():
            raise FeedFailed(NO_ROWS)
        with tf.device("/job:worker/replica:0/task:0/device:CPU:0"):
            (answer,) = tf.raw_ops.PyFunc(input=[], token=_TOKEN + "describe", Tout=[tf.string])
        described = wire.decode(answer.numpy())
    return chosen_columns(described.schema, options)


@dataclass(frozen=True)
class FedDataset:
    """A coordinator's dataset function: on a worker it returns that worker's rows, one pass for each iteration."""

    options: DatasetOptions
    columns: tuple[Column, ...]
    repeat: bool = False

    def __call__(self, input_context: Any = None) -> tf.data.Dataset:
        """Build the dataset; ``input_context``, which tf_keras' ``DatasetCreator`` passes, is not used."""
        import tensorflow as tf

        # The coordinator traces it, and AutoGraph would warn that it cannot read its source.
        made: tf.data.Dataset = tf.autograph.experimental.do_not_convert(self._made)()
        return made

    def _made(self) -> tf.data.Dataset:
        import tensorflow as tf

        options = self.options
        wanted = wire.encode(Wanted(tuple(c.name for c in self.columns), dict(options.fill), self.repeat))
        dataset = tf.data.Dataset.from_tensors(wanted).flat_map(_Pass(self.columns))
        if options.shuffle:
            dataset = dataset.unbatch().shuffle(options.shuffle, seed=options.seed)
            dataset = dataset.batch(options.batch_size, drop_remainder=options.drop_remainder)
        else:
            dataset = dataset.rebatch(options.batch_size, drop_remainder=options.drop_remainder)
        if options.x is not None:
            dataset = dataset.map(Pairs(options.x, options.y, options.sample_weight))
        return as_fed(dataset.prefetch(options.prefetch))


@dataclass(frozen=True)
class _Pass:
    """Function of ``flat_map``: open a pass with the encoded options, and return a dataset of its blocks."""

    columns: tuple[Column, ...]

    def __call__(self, wanted: Any) -> tf.data.Dataset:
        import tensorflow as tf

        (number,) = tf.raw_ops.PyFunc(input=[wanted], token=_TOKEN + "open", Tout=[tf.int64])
        number.set_shape(())
        blocks = tf.data.Dataset.range(_MANY).map(_Block(self.columns, number))
        return blocks.take_while(lambda more, _: more).map(lambda _, block: block)


@dataclass(frozen=True)
class _Block:
    """Function of ``map``: return the next block of a pass, as whether it exists and its columns."""

    columns: tuple[Column, ...]
    number: Any

    def __call__(self, _: Any) -> tuple[Any, dict[str, Any]]:
        import tensorflow as tf

        types = [tf.string if column.dtype.hasobject else tf.as_dtype(column.dtype) for column in self.columns]
        more, *tensors = tf.raw_ops.PyFunc(input=[self.number], token=_TOKEN + "next", Tout=[tf.bool, *types])
        more.set_shape(())
        for tensor, column in zip(tensors, self.columns, strict=True):
            tensor.set_shape((None, *column.shape))
        return more, {column.name: tensor for column, tensor in zip(self.columns, tensors, strict=True)}


def take_step(turn: Any) -> Any:
    """Begin, on a worker, a step of pass ``turn``; return a tensor with the worker's number."""
    import tensorflow as tf

    (task,) = tf.raw_ops.PyFunc(input=[turn], token=_TOKEN + "take", Tout=[tf.int64])
    return task


def cut(worker: int) -> None:
    """Make a worker drop all passes but the first over the rows that it has. A lost worker has no rows to drop."""
    import tensorflow as tf

    try:
        with tf.device(f"/job:worker/replica:0/task:{worker}/device:CPU:0"):
            tf.raw_ops.PyFunc(input=[], token=_TOKEN + "cut", Tout=[tf.int64])
    except tf.errors.UnavailableError:
        logger.info("worker:%d is lost; the driver will tell its replacement how often to repeat its rows", worker)


def idle(rest: Any) -> Any:
    """Return operations that wait on a worker without rows, while other workers have some."""
    import tensorflow as tf

    return tf.raw_ops.PyFunc(input=[rest], token=_TOKEN + "idle", Tout=[tf.int64])
