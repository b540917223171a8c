"""Run one worker of a synchronous strategy: reports, a stop requested on only one worker, restored backups.

Usage: ``progress_cases.py OUT BACKUPS [keras|tf_keras]``, with ``TF_CONFIG``. Writes its results to ``OUT.<index>``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FLAVOUR = sys.argv[3] if len(sys.argv) > 3 else "keras"
os.environ["TF_USE_LEGACY_KERAS"] = str(int(FLAVOUR == "tf_keras"))

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfos_nb.runtime.datasets.tuning import as_fed  # noqa: E402
from tfos_nb.runtime.program import setup as node  # noqa: E402

REPORTS: list[dict[str, Any]] = []
STOP = threading.Event()
NOTES = [node.patch_keras_fit(), node.autolog(lambda **report: REPORTS.append(report), STOP)]
keras = importlib.import_module(FLAVOUR)
INDEX = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def dataset(rows: int) -> tf.data.Dataset:
    def generate() -> Any:
        rng = np.random.default_rng(INDEX)
        for at in range(0, rows, 16):
            size = min(16, rows - at)
            yield rng.normal(size=(size, 4)).astype("float32"), np.ones((size, 1), "float32")

    signature = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
    return as_fed(tf.data.Dataset.from_generator(generate, output_signature=signature))


def make_model() -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return model


class Counter(keras.callbacks.Callback):
    """Counts the steps, and sets the stop flag at one of them on the second worker only."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.steps = 0
        self.epochs: list[int] = []
        self.stop_at = stop_at

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == self.stop_at and INDEX == 1:
            STOP.set()


def reports(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = make_model()
        history = model.fit(dataset(128 if INDEX else 83), epochs=2, verbose=0, validation_data=dataset(20 * INDEX))
    return {"reports": list(REPORTS), "history": history.history}


def stop(strategy: Any) -> dict[str, Any]:
    counter = Counter(stop_at=5)
    with strategy.scope():
        model = make_model()
        model.fit(dataset(64000), epochs=3, verbose=0, callbacks=[counter])
    STOP.clear()
    return {"steps": counter.steps, "epochs": counter.epochs}


class EndsAlone(keras.callbacks.Callback):
    """Ends the training at the end of the second epoch, on the second worker only."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == 1 and INDEX == 1


def ended_by_one(strategy: Any) -> list[int]:
    counter = Counter()
    with strategy.scope():
        make_model().fit(dataset(32), epochs=4, verbose=0, callbacks=[counter, EndsAlone()])
    return counter.epochs


class KeepOldBackup(keras.callbacks.Callback):
    """Keeps the backup of the first epoch, as if this worker had died before it saved the second one."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.directory = directory

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            shutil.copytree(self.directory, f"{self.directory}-old")

    def on_train_end(self, logs: Any = None) -> None:
        shutil.rmtree(self.directory)
        shutil.move(f"{self.directory}-old", self.directory)


def backup(strategy: Any, directory: str) -> dict[str, Any]:
    first, again = Counter(), Counter()
    with strategy.scope():
        model = make_model()
        saver = keras.callbacks.BackupAndRestore(directory, delete_checkpoint=False)
        keep = [KeepOldBackup(saver.backup_dir)] if INDEX else []
        model.fit(dataset(32), epochs=2, verbose=0, callbacks=[saver, first, *keep])
        before = [np.asarray(w).tolist() for w in model.get_weights()]
        model = make_model()
        saver = keras.callbacks.BackupAndRestore(directory)
        restored = Restored()
        model.fit(dataset(32), epochs=4, verbose=0, callbacks=[saver, restored, again])
    return {
        "directory": saver.backup_dir,
        "first": first.epochs,
        "again": again.epochs,
        "weights_before": before,
        "weights_restored": restored.weights,
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def damaged(strategy: Any, directory: str) -> list[int] | None:
    """Resume when the newest state cannot be read; return the epochs done, if this Keras keeps two states."""
    if "double_checkpoint" not in inspect.signature(keras.callbacks.BackupAndRestore).parameters:
        return None
    again = Counter()
    with strategy.scope():
        saver = keras.callbacks.BackupAndRestore(directory, double_checkpoint=True, delete_checkpoint=False)
        make_model().fit(dataset(32), epochs=3, verbose=0, callbacks=[saver])
        Path(saver._weights_path).write_text("0")
        saver = keras.callbacks.BackupAndRestore(directory, double_checkpoint=True)
        make_model().fit(dataset(32), epochs=4, verbose=0, callbacks=[saver, again])
    return again.epochs


class Restored(keras.callbacks.Callback):
    """Records the weights at the beginning of training."""

    weights: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.weights is None:
            self.weights = [np.asarray(w).tolist() for w in self.model.get_weights()]


def main() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    done: dict[str, Any] = {"notes": NOTES, **reports(strategy), "stop": stop(strategy)}
    done["ended_by_one"] = ended_by_one(strategy)
    if FLAVOUR == "keras":
        done["backup"] = backup(strategy, sys.argv[2])
        done["damaged"] = damaged(strategy, f"{sys.argv[2]}-damaged")
    with open(f"{sys.argv[1]}.{INDEX}", "w") as file:
        json.dump(done, file)
    strategy.reduce("SUM", 0.0, axis=None)  # no worker exits before all have written
    os._exit(0)  # TensorFlow's own shutdown of a worker takes up to half a minute


if __name__ == "__main__":
    main()
