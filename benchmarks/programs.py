"""Programs of the executors and the nodes. Executors import this module; nothing here is a closure."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "PRIME",
    "count_batches",
    "count_rows",
    "fit_and_tell",
    "lineage_count_rows",
    "no_rows",
    "train_tiny_model",
]

PRIME = 1_000_003
"""Modulo which :func:`fit_and_tell` sums the rows' ids."""


def count_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Only count rows: the most that Spark can deliver to Python."""
    import pyarrow as pa

    rows = sum(batch.num_rows for batch in batches)
    yield pa.RecordBatch.from_pydict({"rows": [rows]})


def no_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read all rows and yield none: the body of the empty Spark job."""
    for _ in batches:
        pass
    yield from ()


def count_rows(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Read every row as tensors, ``args["passes"]`` times; return the times and counts of each pass."""
    import tensorflow as tf

    tf.constant(0.0)  # the runtime starts at the first operation; its start is not part of feeding
    ctx.report(step=1)  # tells the driver that this node is ready for rows
    dataset = ctx.dataset(batch_size=args["batch_size"])
    return {"passes": [_one_pass(dataset) for _ in range(args["passes"])]}


def _one_pass(dataset: Any) -> dict[str, float]:
    """Iterate once, in a graph, as training does. The first batch starts the clock and does not count in the rate."""
    begin = time.time()
    iterator = iter(dataset)
    first_rows = _rows(next(iterator))
    first = time.time()
    rows = first_rows + int(_rest(iterator))
    return {"begin": begin, "first": first, "last": time.time(), "rows": rows, "first_rows": first_rows}


def _rows(batch: dict[str, Any]) -> int:
    return int(next(iter(batch.values())).shape[0])


def _rest(iterator: Any) -> Any:
    """Count the remaining rows of an iterator. Every column of every batch is a tensor here."""
    import tensorflow as tf

    @tf.function
    def count(batches: Any) -> Any:
        rows = tf.constant(0, tf.int64)
        for batch in batches:
            rows += tf.shape(next(iter(batch.values())), tf.int64)[0]
        return rows

    return count(iterator)


def train_tiny_model(args: dict[str, Any], ctx: Any) -> dict[str, float]:
    """Fit a tiny Keras model under MultiWorkerMirroredStrategy; return the time at which its first step was done."""
    import keras
    import tensorflow as tf

    class FirstStep(keras.callbacks.Callback):
        """Records the time at which the first step was done."""

        done: float | None = None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.done is None:
                self.done = time.time()

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((args["width"],)), keras.layers.Dense(10)])
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = ctx.dataset(batch_size=args["batch_size"], x="features", y="label")
    noted = FirstStep()
    model.fit(rows, epochs=1, verbose=0, callbacks=[noted])
    if noted.done is None:
        raise RuntimeError("the node trained no step")
    return {"first_step": noted.done}


def sum_forever(args: Any, ctx: Any) -> None:
    """Sum rows in step with the other workers until the cluster stops, in place of training; save each epoch."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    epoch = ctx.resume(total=total).epoch
    rows = strategy.experimental_distribute_dataset(ctx.dataset(256))

    @tf.function
    def step(batch: Any) -> Any:
        def on_replica(ids: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(ids))

        return strategy.experimental_local_results(strategy.run(on_replica, (batch["id"],)))[0]

    steps = _Steps(ctx)
    while not ctx.should_stop:
        for batch in rows:
            total.assign_add(step(batch))
            steps.one_more()
        epoch += 1
        ctx.checkpoint(total=total, epoch=epoch)


def fit_and_tell(args: dict[str, Any], ctx: Any) -> None:
    """Fit a model that also sums the rows' ids; record each step that was done, and the sum after each epoch."""
    import keras
    import tensorflow as tf

    class Count(keras.layers.Layer):
        """Passes its input on, and adds up the ids of all rows."""

        def build(self, shape: Any) -> None:
            self.total = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

        def call(self, ids: Any, training: bool = False) -> Any:
            if training:
                context = tf.distribute.get_replica_context()
                seen = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(tf.cast(ids, tf.int64)))
                self.total.value.assign((self.total.value + seen) % PRIME)
            return tf.cast(ids, tf.float32) / 40_000.0

    class Tell(keras.callbacks.Callback):
        """Writes each line at once, since the process may be killed at any moment."""

        def __init__(self) -> None:
            super().__init__()
            folder, process = Path(args["folder"]), f"{ctx.generation}-{ctx.task_index}-{time.time():.3f}"
            self._steps = (folder / f"steps-{process}").open("a", buffering=1)
            self._epochs = (folder / f"epochs-{process}").open("a", buffering=1)
            self._epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            print(f"{time.time():.4f}", ctx.generation, self._epoch, batch, file=self._steps)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            print(epoch, int(self.model.layers[0].total.numpy()), file=self._epochs)

    with ctx.strategy().scope():
        wide = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((1,), dtype="int64"), Count(), *wide, keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer=keras.optimizers.Adam(1e-4))
    model.fit(ctx.dataset(args["batch_size"], x="id", y="y"), epochs=args["epochs"], verbose=0, callbacks=[Tell()])


def step_forever(args: Any, ctx: Any) -> None:
    """Sum rows by a coordinator that gives steps to free workers, with the sum on a parameter server."""
    if not ctx.is_chief:
        return ctx.serve()
    import tensorflow as tf

    coordinator = ctx.coordinator()
    with coordinator.strategy.scope():
        total = tf.Variable(0, dtype=tf.int64)
    rows = ctx.coordinator_dataset(256)

    def step(batch: Any) -> Any:
        total.assign_add(tf.reduce_sum(batch["id"]))
        return tf.size(batch["id"])

    steps = _Steps(ctx)
    while not ctx.should_stop:
        for _ in rows.steps(step):
            steps.one_more()
    return None


class _Steps:
    """Reports each step of a process with the time of its first one, since only the latest report is sent."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._count, self._first = 0, 0.0

    def one_more(self) -> None:
        self._count, self._first = self._count + 1, self._first or time.time()
        self._ctx.report(step=self._count, first_step=self._first)


def lineage_count_rows(args: Any, ctx: Any) -> None:
    """Count rows as a TensorFlowOnSpark 2.2.5 program, which cannot return results and writes them to a file."""
    import numpy as np
    import tensorflow as tf

    tf.constant(0.0)
    folder = Path(args.folder)
    node = f"{ctx.job_name}-{ctx.task_index}"
    (folder / f"{node}.ready").touch()
    feed = ctx.get_data_feed()
    first = last = 0.0
    rows = first_rows = 0
    while not feed.should_stop():
        batch = feed.next_batch(100)
        if not batch:
            continue
        for column in zip(*batch):  # noqa: B905 - every row has the same columns
            tf.constant(np.asarray(column))
        last = time.time()
        if not rows:
            first, first_rows = last, len(batch)
        rows += len(batch)
    times = {"first": first, "last": last, "rows": rows, "first_rows": first_rows}
    written = folder / f"{node}.json.part"
    written.write_text(json.dumps(times))
    written.rename(folder / f"{node}.json")
