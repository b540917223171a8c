"""Train on shuffled rows of the program's own, as one worker of several or in one process.

Usage: ``python -m tests.keras_parity.shuffled OUT``. Each result is written to ``OUT``, as a line of JSON. The model
has one weight for each row. A step adds the row's sample weight to it, so that the weights say how often each row was
used.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tests.keras_parity.workers import as_worker, write_results

if os.environ.get("TF_USE_LEGACY_KERAS"):
    import tf_keras as keras
else:
    import keras

ROWS, BATCH, EPOCHS = 37, 8, 3
X, Y = np.eye(ROWS, dtype="float32"), np.arange(ROWS) % 2
WEIGHTS = (1 + np.arange(ROWS) % 4).astype("float32")


class Used(keras.callbacks.Callback):
    """Note the rows of each step: those whose weights have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[int]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.before = used(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = used(self.model)
        self.steps.append(np.flatnonzero(now != self.before).tolist())
        self.before = now


def used(model: Any) -> np.ndarray[Any, Any]:
    """Return the weights: how often each row was used, times its sample weight."""
    return np.ravel(model.get_weights()[0])


def made(inputs: Any = None) -> Any:
    """Return the model; ``inputs`` are several inputs whose first one is the row."""
    row = keras.Input((ROWS,), name="row")
    output = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(row)
    if inputs is not None:
        other = keras.Input((1,), name="other")
        output = keras.layers.Lambda(lambda both: both[0] + 0 * both[1])([output, other])
    model = keras.Model(row if inputs is None else inputs(row, other), output)

    class Less(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return -y_pred[:, 0]

    model.compile(keras.optimizers.SGD(1.0), Less(reduction="sum"))
    return model


def trained(x: Any, y: Any = None, model: Any = None, epochs: int = EPOCHS, **options: Any) -> dict[str, Any]:
    """Train the model; return how often each row was used, and the rows of each step."""
    model = model or made()
    steps = Used()
    model.fit(x, y, epochs=epochs, verbose=0, callbacks=[steps], **options)
    return {"used": used(model).tolist(), "steps": steps.steps}


def arrays(**options: Any) -> dict[str, Any]:
    """Train on NumPy's arrays."""
    return trained(X, Y, batch_size=BATCH, **options)


def two_fits() -> dict[str, Any]:
    """Train twice: the second ``fit`` has another order."""
    one, other = (arrays(epochs=1) for _ in range(2))
    return {"used": other["used"], "steps": one["steps"] + other["steps"]}


def as_tensors() -> dict[str, Any]:
    """Train on tensors."""
    return trained(tf.constant(X), tf.constant(Y), batch_size=BATCH)


def as_frame() -> dict[str, Any]:
    """Train on a DataFrame of pandas."""
    import pandas as pd

    return trained(pd.DataFrame(X), pd.Series(Y), batch_size=BATCH)


def by_name() -> dict[str, Any]:
    """Train on a dictionary of arrays."""
    model = made(lambda row, other: {"row": row, "other": other})
    return trained({"row": X, "other": Y[:, None]}, Y, model, batch_size=BATCH)


def by_place() -> dict[str, Any]:
    """Train on a list of arrays."""
    return trained([X, Y[:, None].astype("float32")], Y, made(lambda *both: list(both)), batch_size=BATCH)


def as_batches(**options: Any) -> dict[str, Any]:
    """Train on a ``PyDataset``, whose batches Keras shuffles; it may make them by threads."""

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return -(-ROWS // BATCH)

        def __getitem__(self, number: int) -> Any:
            rows = slice(number * BATCH, (number + 1) * BATCH)
            return X[rows], Y[rows]

    return trained(Batches(**options), shuffle=True)


def dataset(make: Callable[[Any], Any]) -> dict[str, Any]:
    """Train on a dataset of ``tf.data``."""
    return trained(make(tf.data.Dataset.from_tensor_slices((X, Y))))


def dataset_of_one_worker() -> dict[str, Any]:
    """Let one worker shuffle a dataset that the others do not make."""
    if number_of_worker() == 0:
        next(iter(tf.data.Dataset.range(9).shuffle(9)))
    return dataset(lambda rows: rows.shuffle(ROWS).batch(BATCH))


def datasets_again() -> dict[str, Any]:
    """Make the same dataset for each of several fits: each has an order of its own."""
    model, steps = made(), []
    for _ in range(EPOCHS):
        steps += trained(tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(BATCH), model=model, epochs=1)[
            "steps"
        ]
    return {"used": used(model).tolist(), "steps": steps}


def with_seed(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Train with the program's own seed; the order is that of one process."""
    from tensorflow.python.eager import context

    keras.utils.set_random_seed(3)
    try:
        return make()
    finally:
        context.context()._seed = None  # there is no public way to unset it


def number_of_worker() -> int:
    """Return this worker's number."""
    return int(json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0))


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": arrays,
    "two fits": two_fits,
    "tensors": as_tensors,
    "pandas": as_frame,
    "a dictionary": by_name,
    "a list": by_place,
    "sample weights": partial(arrays, sample_weight=WEIGHTS),
    "class weights": partial(arrays, class_weight={0: 1.0, 1: 3.0}),
    "validation split": partial(arrays, validation_split=0.25),
    "within batches": partial(arrays, shuffle="batch"),
    "steps per epoch": partial(arrays, steps_per_epoch=5),
    "not shuffled": partial(arrays, shuffle=False),
    "rows, then batches": partial(dataset, lambda rows: rows.shuffle(ROWS).batch(BATCH)),
    "a small window": partial(dataset, lambda rows: rows.shuffle(5).batch(BATCH)),
    "batches shuffled": partial(dataset, lambda rows: rows.batch(BATCH).shuffle(9)),
    "mapped and prefetched": partial(
        dataset, lambda rows: rows.shuffle(ROWS).map(lambda *row: row).batch(BATCH).prefetch(2)
    ),
    "a dataset of one worker": dataset_of_one_worker,
    "datasets again": datasets_again,
    "seeded arrays": partial(with_seed, arrays),
    "seeded dataset": partial(with_seed, partial(dataset, lambda rows: rows.shuffle(ROWS, seed=5).batch(BATCH))),
}
OF_KERAS_3: dict[str, Callable[[], dict[str, Any]]] = {
    "batches by number": as_batches,
    "batches by threads": partial(as_batches, workers=2),
}


def within(scope: Callable[[], Any], case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a case in a scope."""
    with scope():
        return case()


def main(out: str) -> None:
    """Train each case."""
    worker, _, strategy = as_worker()
    random.seed(worker)
    np.random.seed(worker)
    cases = CASES if os.environ.get("TF_USE_LEGACY_KERAS") else {**CASES, **OF_KERAS_3}
    write_results(out, [(name, partial(within, strategy.scope, case)) for name, case in cases.items()])


if __name__ == "__main__":
    main(*sys.argv[1:])
