"""Train small models with ``model.fit`` as one worker, or as the single process that workers are compared with.

Usage: ``fit_cases.py OUT WORKERS CASE…``. With ``TF_CONFIG`` it is one worker, has only its own rows, and writes its
results to ``OUT.<index>``. Without, it trains alone on the same global batches and writes to ``OUT.single``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from tfos_nb.runtime.datasets.tuning import as_fed
from tfos_nb.runtime.program.setup import patch_keras_fit

BATCH = 16  # global, as in Keras
# Rows of each worker, for each epoch: enough that no step has zero rows, which gives NaN in a single process.
ROWS: dict[str, list[list[int]]] = {
    "uneven": [[128, 83, 40], [128, 83, 40]],
    "no_row_on_the_chief": [[0, 48, 0], [0, 48, 0]],
    "no_row_on_one": [[70, 0, 30], [70, 0, 30]],
    "synchronized_batch_norm": [[40, 9, 0], [40, 9, 0]],
    "epochs_of_different_length": [[0, 0, 0], [40, 24, 8], [0, 0, 0], [96, 8, 0], [3, 1, 0]],
    "class_weight": [[40, 9, 0], [40, 9, 0]],
    "sample_weight": [[40, 9, 3], [40, 9, 3]],
    "sum_loss": [[40, 9, 3], [40, 9, 3]],
    "steps_per_execution": [[61, 30, 7], [61, 30, 7]],
    "known_length": [[61, 30, 0], [61, 30, 0]],
    "own_train_step": [[61, 30, 7], [61, 30, 7]],
}
VALIDATION = [30, 0, 5]


def rows_of(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows that depend only on the seed; the first feature identifies the row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 8)).astype("float32")
    y = (x[:, 1] + x[:, 2] > 0).astype("int32") + (x[:, 3] > 0.5)
    return x, y.astype("int32"), rng.uniform(0.2, 3.0, size=count).astype("float32")


class Source:
    """A dataset in which each iteration is the next epoch; it records how it is used."""

    def __init__(self, epochs: list[list[np.ndarray]], weighted: bool, counted: bool = False) -> None:
        self.epochs = epochs
        self.counted = counted
        self.weighted = weighted
        self.passes = 0
        self.given = 0

    def _generate(self) -> Any:
        batches = self.epochs[min(self.passes, len(self.epochs) - 1)]
        self.passes += 1
        for batch in batches:
            self.given += len(batch[0])
            yield batch if self.weighted else batch[:2]

    def dataset(self) -> tf.data.Dataset:
        specs = [tf.TensorSpec((None, 8)), tf.TensorSpec((None,), tf.int32), tf.TensorSpec((None,))]
        signature = tuple(specs if self.weighted else specs[:2])
        made = tf.data.Dataset.from_generator(self._generate, output_signature=signature)
        if self.counted:
            made = made.apply(tf.data.experimental.assert_cardinality(len(self.epochs[0])))
        return as_fed(made)


def batches_of(rows: tuple[np.ndarray, ...]) -> list[tuple[np.ndarray, ...]]:
    return [tuple(part[at : at + BATCH] for part in rows) for at in range(0, len(rows[0]), BATCH)]


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return self.compute_metrics(x, y, self(x), None)


def make_model(name: str) -> keras.Model:
    keras.utils.set_random_seed(7)
    normal = []
    if name.startswith("no_row"):
        normal = [keras.layers.BatchNormalization(name="bn")]
    if name == "synchronized_batch_norm":
        normal = [keras.layers.BatchNormalization(name="bn", synchronized=True)]
    inputs = keras.Input((8,))
    outputs = inputs
    hidden = keras.layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    for layer in [*normal, hidden, keras.layers.Dense(3, activation="softmax")]:
        outputs = layer(outputs)
    model = (OwnStep if name == "own_train_step" else keras.Model)(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum" if name == "sum_loss" else "sum_over_batch_size")
    model.compile(
        keras.optimizers.SGD(0.02 if name == "sum_loss" else 0.1, momentum=0.9),
        loss,
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(name="ce")],
        steps_per_execution=4 if name == "steps_per_execution" else 1,
        run_eagerly=False,
    )
    return model


class LastBatch(keras.callbacks.Callback):
    """Keeps the last metrics that a progress bar shows within the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, float] = {}
        self.steps: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.steps.append(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps[-1] += 1
        if len(self.steps) == 1:
            self.logs = dict(logs or {})


def train(name: str, train_epochs: list, validation: list | None) -> dict[str, Any]:
    model = make_model(name)
    weighted = name == "sample_weight"
    source = Source(train_epochs, weighted, counted=name == "known_length")
    held_out = Source([validation], False) if validation is not None else None
    last = LastBatch()
    history = model.fit(
        source.dataset(),
        epochs=len(train_epochs),
        verbose=0,
        callbacks=[last],
        class_weight={0: 1.0, 1: 5.0, 2: 0.5} if name == "class_weight" else None,
        validation_data=held_out.dataset() if held_out else None,
    )
    done: dict[str, Any] = {
        "history": history.history,
        "last_batch": last.logs,
        "batch_ends": last.steps,
        "given": source.given,
        "passes": source.passes,
        "weights": [w.value.numpy().tolist() for w in model.weights],
        "iterations": int(model.optimizer.iterations.numpy()),
    }
    if held_out:
        done["evaluate"] = [float(v) for v in model.evaluate(held_out.dataset(), verbose=0)]
        done["predict"] = np.asarray(model.predict(held_out.dataset().map(lambda x, y: x), verbose=0)).tolist()
    return done


def dealt(batches: list[tuple[np.ndarray, ...]], replicas: int) -> list[int]:
    """Return the rows per step of a worker with one replica: TensorFlow splits each batch into equal parts."""
    sizes = []
    for batch in batches:
        left, part = len(batch[0]), -(-len(batch[0]) // replicas)
        for _ in range(replicas):
            sizes.append(min(part, left))
            left -= sizes[-1]
    return sizes


def epochs_of(name: str, index: int) -> list[list[tuple[np.ndarray, ...]]]:
    return [batches_of(rows_of(100 * e + index, epoch[index])) for e, epoch in enumerate(ROWS[name])]


def validation_of(name: str, index: int) -> list[tuple[np.ndarray, ...]] | None:
    return batches_of(rows_of(900 + index, VALIDATION[index])) if name == "uneven" else None


def as_worker(out: str, names: list[str]) -> None:
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    results: dict[str, Any] = {}
    for name in names:
        with strategy.scope():
            results[name] = train(name, epochs_of(name, index), validation_of(name, index))
    with open(f"{out}.{index}", "w") as file:
        json.dump(results, file)
    strategy.reduce("SUM", 0.0, axis=None)  # no worker exits before all have written
    os._exit(0)  # TensorFlow's own shutdown of a worker takes up to half a minute


def as_single(out: str, workers: int, names: list[str]) -> None:
    results = {}
    for name in names:
        parts = [epochs_of(name, index) for index in range(workers)]
        epochs = [merged([part[e] for part in parts]) for e in range(len(ROWS[name]))]
        held_out = [validation_of(name, index) for index in range(workers)]
        validation = merged([part or [] for part in held_out]) if held_out[0] is not None else None
        results[name] = train(name, epochs, validation)
        results[name]["steps"] = [len(epoch) for epoch in epochs]
        results[name]["rows"] = [sum(epoch[index] for epoch in ROWS[name]) for index in range(workers)]
    with open(f"{out}.single", "w") as file:
        json.dump(results, file)


def merged(workers: list[list[tuple[np.ndarray, ...]]]) -> list[tuple[np.ndarray, ...]]:
    """Return the global batch of each step: the parts of all workers, concatenated."""
    sizes = [dealt(batches, len(workers)) for batches in workers]
    steps = max(len(of_worker) for of_worker in sizes)
    whole = [
        tuple(np.concatenate(column) for column in zip(rows_of(0, 0), *batches, strict=True)) for batches in workers
    ]
    ends = [np.cumsum([0, *of_worker, *[0] * (steps - len(of_worker))]) for of_worker in sizes]
    made = []
    for step in range(steps):
        parts = [[c[end[step] : end[step + 1]] for c in rows] for rows, end in zip(whole, ends, strict=True)]
        made.append(tuple(np.concatenate(column) for column in zip(*parts, strict=True)))
    return made


if __name__ == "__main__":
    print(patch_keras_fit())
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if "TF_CONFIG" in os.environ:
        as_worker(sys.argv[1], sys.argv[3:])
    else:
        as_single(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
