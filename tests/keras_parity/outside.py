"""Calls in the strategy's scope outside of a step, as one worker of several or in one process.

Usage: ``python -m tests.keras_parity.outside OUT``. The result of each case is written to ``OUT``, as a line of JSON.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from tests.keras_parity.workers import as_worker, write_results


def apply_an_optimizer() -> dict[str, Any]:
    """Apply gradients by hand, and return the steps that the optimizer counts."""
    variable = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=1.0)
    for _ in range(2):
        optimizer.apply([tf.constant([3.0, 4.0])], [variable])
    return {
        "weights": np.asarray(variable).tolist(),
        "steps": int(optimizer.iterations),
        "rate": float(np.asarray(optimizer.learning_rate.value)),
    }


def apply_two_optimizers() -> dict[str, Any]:
    """Apply gradients by an optimizer that is made of others."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return {}
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, "relu"), keras.layers.Dense(1)])
    for weight in model.weights:
        weight.assign(tf.ones(weight.shape))
    which = keras.optimizers.OptimizerMap(default_optimizer=keras.optimizers.SGD(0.1))
    which[f".*{model.layers[1].name}.*"] = keras.optimizers.Adam(0.1)
    optimizer = keras.optimizers.MultiOptimizer(which)
    optimizer.apply([tf.ones(weight.shape) for weight in model.weights], model.trainable_variables)
    return {"weights": [np.asarray(weight).tolist() for weight in model.weights]}


def predict_a_batch() -> dict[str, Any]:
    """Predict a batch and train on it, in a graph and eagerly."""
    results = []
    for eagerly in (False, True):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=eagerly)
        x, y = np.arange(6.0).reshape(3, 2), np.ones((3, 1))
        results += [model.predict_on_batch(x).tolist()]
        results += [float(model.train_on_batch(x, y)), float(model.test_on_batch(x, y))]  # Keras 3.12 returns arrays
        results += [model.predict_on_batch(x).tolist()]
    return {"results": results}


def predict_ragged_rows() -> dict[str, Any]:
    """Predict ragged rows with a model that returns ragged rows."""
    inputs = keras.Input((None,), ragged=True)
    model = keras.Model(inputs, keras.layers.Lambda(lambda x: x * 2.0)(inputs))
    rows = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0]])
    return {"values": model.predict(rows, verbose=0).flat_values.numpy().tolist()}


def predict_values_of_any_type() -> dict[str, Any]:
    """Predict by a model whose outputs have types that TensorFlow's collectives do not take."""
    inputs, results = keras.Input((2,)), {}
    rows = tf.data.Dataset.from_tensor_slices(np.arange(6.0, dtype="float32").reshape(3, 2)).batch(3)
    for kind in ("bool", "int8", "uint8", "int16", "uint16", "uint32", "bfloat16", "float16", "float64", "int64"):
        model = keras.Model(inputs, keras.layers.Lambda(lambda x, kind=kind: keras.ops.cast(x > 2.0, kind))(inputs))
        predicted = model.predict_on_batch(next(iter(rows)))
        gathered = model.predict(rows, verbose=0)
        assert str(gathered.dtype) == kind
        results[kind] = [predicted.astype("float64").tolist(), gathered.astype("float64")[:3].tolist()]
    return results


def make_variables_of_any_type() -> dict[str, Any]:
    """Make variables of the types of a quantized model, or of a policy of fewer bits."""
    kinds = ("bool", "int8", "uint8", "int16", "uint16", "uint32", "bfloat16", "float16", "float64", "int64")
    made = {kind: keras.Variable([[0, 1], [1, 0]], dtype=kind, trainable=False) for kind in kinds}
    return {kind: keras.ops.convert_to_numpy(variable).astype("float64").tolist() for kind, variable in made.items()}


def take_a_loss() -> dict[str, Any]:
    """Compute the loss of two rows."""
    return {"loss": float(keras.losses.MeanSquaredError()([[1.0], [3.0]], [[2.0], [5.0]]))}


def count_in_whole_numbers() -> dict[str, Any]:
    """Count rows with a metric whose state is whole numbers, and copy that state to another one."""
    metric = keras.metrics.MeanIoU(num_classes=3)
    metric.update_state([0, 1, 1, 2, 2], [0, 1, 2, 2, 2])
    metric.update_state([0], [1])
    another = keras.metrics.MeanIoU(num_classes=3)
    another.result()
    for mine, theirs in zip(another.variables, metric.variables, strict=True):
        mine.assign(theirs)
    counts = np.asarray(metric.variables[0]).tolist()
    return {"counts": counts, "result": float(metric.result()), "another": float(another.result())}


def begin_with_a_count() -> dict[str, Any]:
    """Make metrics whose state does not begin at zero, and update them."""
    counts = keras.metrics.MeanIoU(num_classes=2)
    counts.total_cm = counts.add_variable((2, 2), keras.ops.convert_to_tensor([[3, 1], [0, 5]]), "int", name="counts")
    counts.update_state([0, 1], [0, 0])
    total = keras.metrics.Metric()
    total.state = total.add_variable((3,), keras.initializers.Constant(2.5), name="state")
    before = np.asarray(total.state).tolist()
    total.state.assign_add([1.0, 2.0, 3.0])
    return {"counts": np.asarray(counts.total_cm).tolist(), "before": before, "after": np.asarray(total.state).tolist()}


CASES = (
    apply_an_optimizer,
    apply_two_optimizers,
    predict_a_batch,
    predict_ragged_rows,
    predict_values_of_any_type,
    make_variables_of_any_type,
    take_a_loss,
    count_in_whole_numbers,
    begin_with_a_count,
)


def within(scope: Callable[[], Any], case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a case in a scope."""
    with scope():
        return case()


def train_under_several_strategies(worker: int, workers: int) -> dict[str, Any]:
    """Make a strategy for each model; the first worker makes it later, so that the other one waits."""
    losses = []
    for units in (1, 2):
        threading.Event().wait(2.0 if worker == 0 and workers > 1 else 0.0)
        keras.utils.set_random_seed(units)
        strategy = tf.distribute.MultiWorkerMirroredStrategy() if workers > 1 else tf.distribute.get_strategy()
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(units), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.arange(12.0).reshape(6, 2) / 12
        losses += model.fit(x, x.sum(1), batch_size=6, epochs=2, shuffle=False, verbose=0).history["loss"]
    return {"losses": losses}


def main(out: str) -> None:
    """Run each case."""
    worker, workers, strategy = as_worker()
    cases = [(case.__name__, partial(within, strategy.scope, case)) for case in CASES]
    more = partial(train_under_several_strategies, worker, workers)
    write_results(out, [*cases, (train_under_several_strategies.__name__, more)])


if __name__ == "__main__":
    main(*sys.argv[1:])
