"""Models of which a part was made outside of the strategy's scope, as one worker of several or in one process.

Usage: ``python -m tests.keras_parity.scope OUT``. The result of each case, or its error, is written to ``OUT``, as a
line of JSON.
"""

from __future__ import annotations

import logging.handlers
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from tests.keras_parity.models import rows
from tests.keras_parity.train import Share
from tests.keras_parity.workers import as_worker, write_results
from tfos_nb.runtime.datasets.dataset import DatasetOptions, build_dataset

ROWS = 37


def model(*layers: Any) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])


def trained(made: Any) -> dict[str, Any]:
    """Train a model; each step has all rows."""
    x = np.random.default_rng(1).normal(size=(ROWS, 4)).astype("float32")
    history = made.fit(
        tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(ROWS), epochs=2, verbose=0
    )
    return {"history": history.history, "weights": [weight.tolist() for weight in made.get_weights()]}


def metric(strategy: Any) -> dict[str, Any]:
    mine = keras.metrics.MeanAbsoluteError(name="mine")
    with strategy.scope():
        made = model()
        made.compile("sgd", "mse", metrics=["mse", mine])
    return trained(made)


def optimizer(strategy: Any) -> dict[str, Any]:
    mine = keras.optimizers.SGD(0.1)
    with strategy.scope():
        made = model()
        made.compile(mine, "mse")
    return trained(made)


def layer(strategy: Any) -> dict[str, Any]:
    mine = keras.layers.Dense(3, name="mine")
    mine.build((None, 4))
    with strategy.scope():
        made = model(keras.Sequential([keras.Input((4,)), mine]))
        made.compile("sgd", "mse")
    return trained(made)


def frozen_layer(strategy: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(2)
    mine = keras.layers.Dense(3, trainable=False)
    mine.build((None, 4))
    with strategy.scope():
        made = model(mine)
        made.compile("sgd", "mse")
    return trained(made)


def compiled(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        made = model()
    made.compile("sgd", "mse", metrics=["mae"])
    return trained(made)


def model_alone(strategy: Any) -> dict[str, Any]:
    made = model()
    with strategy.scope():
        made.compile(keras.optimizers.Adam(0.1), "mse")
    return trained(made)


def nothing_within(strategy: Any) -> dict[str, Any]:
    said = logging.handlers.BufferingHandler(10)
    logging.getLogger("tfos_nb").addHandler(said)
    made = model()
    made.compile("sgd", "mse")
    result = trained(made)
    return {**result, "said": [record.getMessage() for record in said.buffer]}


def loss_by_row(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        made = model()
        made.compile("sgd", keras.losses.MeanSquaredError(reduction="none"))
    return trained(made)


def reads_numbers(strategy: Any) -> dict[str, Any]:
    def off(y: Any, p: Any) -> Any:
        return float(np.abs(y.numpy() - p.numpy()).mean())

    def loss(y: Any, p: Any) -> Any:
        assert y.numpy().size
        return keras.ops.mean(keras.ops.square(y - p), axis=-1)

    with strategy.scope():
        made = model()
        made.compile("sgd", loss, metrics=[off], run_eagerly=True)
    return trained(made)


class ByInputs(keras.Model):
    """A model whose step takes the gradient of a loss with respect to its input and its variables."""

    def __init__(self, loss_of: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.loss_of = loss_of

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.loss_of(tf.square(y - self(x, training=True)))
        _, *gradients = tape.gradient(loss, [x, *self.trainable_variables])
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def sums(strategy: Any) -> dict[str, Any]:
    said = logging.handlers.BufferingHandler(10)
    logging.getLogger("tfos_nb").addHandler(said)
    told = []
    for loss_of in (tf.reduce_mean, tf.reduce_sum):
        with strategy.scope():
            inputs = keras.Input((4,))
            made = ByInputs(loss_of, inputs=inputs, outputs=keras.layers.Dense(2)(inputs))
            made.compile("sgd")
        trained(made)
        told.append([record.getMessage() for record in said.buffer])
    return {"said": told}


def stateful(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        layers = [keras.layers.Reshape((4, 1)), keras.layers.LSTM(2, stateful=True, name="mine"), keras.layers.Dense(1)]
        made = keras.Sequential([keras.Input(batch_shape=(ROWS, 4)), *layers])
        made.compile("sgd", "mse")
    return trained(made)


def fixed_batch(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        inputs = keras.Input(batch_shape=(ROWS, 4), name="mine")
        made = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.reshape(inputs, (ROWS, 4))))
        made.compile("sgd", "mse")
    return trained(made)


def fixed_batch_that_does_not_matter(strategy: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        made = keras.Sequential([keras.Input(batch_shape=(ROWS, 4)), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
    return trained(made)


def of_fed_rows(strategy: Any, x: Any, y: str, loss: str, after: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Train on the columns of fed rows."""
    worker, workers = getattr(strategy.extended, "_id_in_cluster", 0), strategy.num_replicas_in_sync
    with strategy.scope():
        made = model()
        made.compile("sgd", loss)
    share = Share(rows(ROWS), worker, workers, streamed=False)
    dataset = build_dataset(share, DatasetOptions(ROWS, x, y), print, alone=False)
    return {"history": made.fit(dataset if after is None else dataset.map(after), verbose=0).history}


def text_as_labels(strategy: Any) -> dict[str, Any]:
    return of_fed_rows(strategy, "x", "word", "binary_crossentropy")


def text_as_mapped_labels(strategy: Any) -> dict[str, Any]:
    return of_fed_rows(strategy, "x", "word", "binary_crossentropy", lambda x, y: (x * 2, y))


def text_as_input(strategy: Any) -> dict[str, Any]:
    return of_fed_rows(strategy, "word", "y", "mse")


def text_made_numbers(strategy: Any) -> dict[str, Any]:
    return of_fed_rows(strategy, "x", "word", "mse", lambda x, y: (x, tf.strings.length(y)))


CASES: tuple[Callable[[Any], dict[str, Any]], ...] = (
    metric,
    optimizer,
    layer,
    frozen_layer,
    compiled,
    model_alone,
    nothing_within,
    loss_by_row,
    reads_numbers,
    sums,
    stateful,
    fixed_batch,
    fixed_batch_that_does_not_matter,
    text_as_labels,
    text_as_mapped_labels,
    text_as_input,
    text_made_numbers,
)


def main(out: str) -> None:
    """Run each case."""
    _, _, strategy = as_worker()
    write_results(out, [(case.__name__, partial(case, strategy)) for case in CASES])


if __name__ == "__main__":
    main(*sys.argv[1:])
