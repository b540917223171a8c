"""Train the cases of :mod:`tests.keras_parity.models` as one worker of several, or in one process.

Usage: ``python -m tests.keras_parity.train OUT ROWS[/BATCH][:NAME,NAME…] …``. Without ``BATCH`` a step has all rows,
without names all cases are trained. With ``TF_CONFIG`` it is one worker and has its share of the rows. Without, it has
all. The results are written to ``OUT``, one line of JSON per case.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pyarrow as pa
import tensorflow as tf

from tests.keras_parity import models
from tests.keras_parity.workers import as_worker, write_results
from tfos_nb.runtime.datasets.dataset import DatasetOptions, build_dataset
from tfos_nb.runtime.feed.messages import FeedSchema
from tfos_nb.runtime.feed.passes import Pass, Readers, Shares
from tfos_nb.runtime.rows.columns import first_lengths


class Share:
    """The rows of a worker: they are dealt one by one, so that shares differ by one row at most."""

    def __init__(self, columns: dict[str, np.ndarray], worker: int, workers: int, streamed: bool) -> None:
        self.batch = _record_batch({name: column[worker::workers] for name, column in columns.items()})
        self.first = _record_batch({name: column[:1] for name, column in columns.items()})
        total = len(columns["x"])
        self.shares = Shares(self.batch.num_rows, total, -(-total // workers))
        self.streamed = streamed

    def schema(self) -> FeedSchema:
        """Return the schema of the rows."""
        return FeedSchema(1, self.first.schema.serialize().to_pybytes(), first_lengths(self.first))

    def next_pass(self, readers: Readers | None = None) -> Pass:
        """Return the rows; if they are streamed, the shares are known at the end."""
        known: list[Shares] = [] if self.streamed else [self.shares]

        def blocks() -> Iterator[pa.RecordBatch]:
            for start in range(0, self.batch.num_rows, 5):
                yield self.batch.slice(start, 5)
            known.append(self.shares)

        return Pass(blocks(), lambda: known[0] if known else None)


def _record_batch(columns: dict[str, np.ndarray]) -> pa.RecordBatch:
    def column(values: np.ndarray) -> pa.Array:
        if values.dtype == object:
            return pa.array([value.decode() for value in values], pa.string())
        if values.ndim == 1:
            return pa.array(values)
        kind = pa.from_numpy_dtype(values.dtype)
        for _ in values.shape[1:]:
            kind = pa.list_(kind)
        return pa.array(values.tolist(), kind)

    return pa.RecordBatch.from_pydict({name: column(values) for name, values in columns.items()})


def _by_name(results: dict[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield results by name; Keras 3.12 nests the results of metrics if a custom step returns them."""
    for name, value in results.items():
        if isinstance(value, dict):
            yield from _by_name(value, f"{outer}{name}/")
        else:
            yield outer + name, value


def train(case: models.Case, share: Share, batch: int, strategy: Any) -> dict[str, Any]:
    """Train one case; return its weights, history, and what evaluate and predict give."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_global_policy(case.policy)
    try:
        with strategy.scope():
            model = case.build()
        options = DatasetOptions(batch, case.x, case.y, case.sample_weight)
        dataset = build_dataset(share, options, print, alone=False)
        if strategy.num_replicas_in_sync == 1:  # if their number is unknown, Keras counts one step more each epoch
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(-(-share.shares.total // batch)))
        history = model.fit(dataset, epochs=case.epochs, verbose=0, validation_data=dataset, **case.fit).history
        predicted = keras.tree.flatten(model.predict(dataset, verbose=0))
        evaluated = model.evaluate(dataset, verbose=0, return_dict=True)
        weights = [np.asarray(w, "float64") for w in model.get_weights()]
        steps = int(model.optimizer.iterations.numpy())
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return {
        "weights": [w.tolist() for w in weights],
        "history": {name: np.asarray(values, "float64").tolist() for name, values in history.items()},
        "evaluate": {name: np.asarray(value, "float64").tolist() for name, value in _by_name(evaluated)},
        "predict": [np.sort(np.asarray(of_output, "float64"), axis=0).tolist() for of_output in predicted],
        "steps": steps,
        "near": case.near,
        "per_replica": case.per_replica,
    }


def main(out: str, plans: list[str]) -> None:
    """Train all cases of each plan, or those whose names contain one of its words."""
    worker, workers, strategy = as_worker()
    cases = []
    for plan in plans:
        size, _, names = plan.partition(":")
        rows, _, batch = size.partition("/")
        shares = [Share(models.rows(int(rows)), worker, workers, streamed) for streamed in (True, False)]
        for number, case in enumerate(models.all_cases()):
            if not names or any(name in case.name for name in names.split(",")):
                how = partial(train, case, shares[number % 2], int(batch or rows), strategy)
                cases.append((f"{size} rows: {case.name}", how))
    write_results(out, cases)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
