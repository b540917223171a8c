"""Custom training loops over fed rows, as one worker of several, or in one process.

Usage: ``python -m tests.keras_parity.loops OUT ROWS/BATCH …``. With ``TF_CONFIG`` it is one worker and has its share of
the rows. The results are written to ``OUT``, one line of JSON per loop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from tests.keras_parity import models
from tests.keras_parity.train import Share
from tests.keras_parity.workers import as_worker, write_results
from tfos_nb.runtime.datasets.dataset import DatasetOptions, build_dataset

EPOCHS = 2


def in_a_function(step: Callable[..., Any], strategy: Any) -> Callable[..., Any]:
    """Call the strategy in a graph, as TensorFlow's guide does."""
    return tf.function(lambda batch: strategy.run(step, args=(batch,)))


def eagerly(step: Callable[..., Any], strategy: Any) -> Callable[..., Any]:
    """Do all of it eagerly."""
    return lambda batch: strategy.run(step, args=(batch,))


def train(way: Callable[..., Callable[..., Any]], share: Share, batch: int, strategy: Any) -> dict[str, Any]:
    """Train with a convolution, which fails on a batch without rows; return all numbers."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Input((4,)),
                layers.Reshape((4, 1)),
                layers.Conv1D(8, 3, padding="same", activation="tanh"),
                layers.BatchNormalization(momentum=0.5, synchronized=True),
                layers.GlobalAveragePooling1D(),
                layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adam(0.05)
        mae = keras.metrics.MeanAbsoluteError()
        seen = tf.Variable(
            0.0, aggregation=tf.VariableAggregation.SUM, synchronization=tf.VariableSynchronization.ON_READ
        )
    loss_of = keras.losses.MeanSquaredError(reduction="none")

    def step(given: Any) -> tuple[Any, Any, Any]:
        x, y = given
        y = tf.reshape(y, (-1, 1))
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            # A program that relies on rows may do this: the log of a batch without rows is -inf.
            loss = tf.nn.compute_average_loss(loss_of(y, predicted), global_batch_size=batch)
            loss += 0.0 * tf.math.log(tf.reduce_sum(tf.ones_like(y)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mae.update_state(y, predicted)
        seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return loss, tf.shape(x)[0], predicted

    columns = DatasetOptions(batch, "x", "y")
    dataset = strategy.experimental_distribute_dataset(build_dataset(share, columns, print, alone=False))
    one = way(step, strategy)
    losses, rows, sizes = [], 0, []
    for _ in range(EPOCHS):
        for given in dataset:
            loss, count, predicted = one(given)
            losses.append(float(strategy.reduce("SUM", loss, axis=None)))
            rows += int(strategy.reduce("SUM", count, axis=None))
            sizes.append(int(strategy.gather(predicted, axis=0).shape[0]))
    return {
        "weights": [np.asarray(w, "float64").tolist() for w in model.get_weights()],
        "losses": losses,
        "rows": rows,
        "sizes": sizes,
        "seen": float(seen.numpy()),
        "mae": float(mae.result()),
        "steps": int(optimizer.iterations),
    }


def main(out: str, plans: list[str]) -> None:
    """Run each loop with each plan."""
    worker, workers, strategy = as_worker()
    cases = []
    for plan in plans:
        rows, _, batch = plan.partition("/")
        for way in (in_a_function, eagerly):
            share = Share(models.rows(int(rows)), worker, workers, False)
            cases.append((f"{plan} rows, {way.__name__}", partial(train, way, share, int(batch), strategy)))
    write_results(out, cases)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
