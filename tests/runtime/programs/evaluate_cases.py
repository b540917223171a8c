"""Record the reports of fit and evaluate, alone or as one worker of a synchronous strategy.

Usage: ``evaluate_cases.py OUT [keras|tf_keras]``; with ``TF_CONFIG`` a worker. Writes its results to ``OUT.<index>``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FLAVOUR = sys.argv[2]
os.environ["TF_USE_LEGACY_KERAS"] = str(int(FLAVOUR == "tf_keras"))

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfos_nb.runtime.datasets.tuning import as_fed  # noqa: E402
from tfos_nb.runtime.keras import progress  # noqa: E402
from tfos_nb.runtime.program import setup  # noqa: E402

REPORTS: list[dict[str, Any]] = []
STOP = threading.Event()
NOTES = [setup.patch_keras_fit(), setup.autolog(lambda **report: REPORTS.append(report), STOP)]
progress._REPORTS_PER_SECOND = 1e9
keras = importlib.import_module(FLAVOUR)
CONFIG = os.environ.get("TF_CONFIG")
INDEX = json.loads(CONFIG)["task"]["index"] if CONFIG else 0


def dataset(batches: int) -> tf.data.Dataset:
    """Return a dataset of unknown length."""

    def generate() -> Any:
        for batch in range(batches):
            rows = np.full((4, 2), batch + 1, "float32")
            yield rows, rows[:, :1]

    signature = (tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1)))
    return as_fed(tf.data.Dataset.from_generator(generate, output_signature=signature))


def make_model() -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001), "mse", metrics=["mae"])
    return model


def reported() -> list[dict[str, Any]]:
    found = list(REPORTS)
    REPORTS.clear()
    return found


class Hooks(keras.callbacks.Callback):
    """Counts the calls of each kind; sets the stop flag at a batch of an evaluation, on the last worker."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.stop_at = stop_at
        self.counts = {"train": 0, "test": 0}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.counts["train"] += 1

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.counts["test"] += 1
        if self.counts["test"] == self.stop_at and (INDEX == 1 or not CONFIG):
            STOP.set()


class Strange(keras.callbacks.CallbackList):
    """A container with a different constructor."""

    def __init__(self, only: Any, model: Any) -> None:
        super().__init__([only], add_history=True, model=model, epochs=1, steps=None, verbose=0)


def validation() -> dict[str, Any]:
    model = make_model()
    history = model.fit(dataset(6), epochs=2, verbose=0, validation_data=dataset(4))
    known = tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones((8, 1)))).batch(4)
    result = {"history": history.history, "reports": reported()}
    model.fit(known, verbose=0, validation_data=known)
    arrays = np.ones((70, 2)), np.ones((70, 1))
    model.fit(known, verbose=0, validation_data=arrays)
    steps = [report["steps"] for report in reported() if report["phase"] == "evaluate"]
    return {**result, "known_steps": steps}


def evaluation() -> dict[str, Any]:
    model = make_model()
    values = model.evaluate(dataset(5), verbose=0, return_dict=True)
    return {"values": values, "reports": reported()}


def callbacks() -> dict[str, Any]:
    model, own = make_model(), []
    mine = progress.progress_callback(lambda **report: own.append(report), flavour=FLAVOUR)
    model.fit(dataset(3), verbose=0, validation_data=dataset(2), callbacks=[mine])
    model.evaluate(dataset(2), verbose=0, callbacks=(mine,))
    doubled = reported()
    hooks = Hooks()
    container = keras.callbacks.CallbackList([hooks], add_history=True, model=model, epochs=1, steps=None, verbose=0)
    history = model.fit(dataset(3), verbose=0, validation_data=dataset(2), callbacks=container)
    contained = reported()
    strange = Hooks()
    model.fit(dataset(3), verbose=0, validation_data=dataset(2), callbacks=Strange(strange, model))
    return {
        "own": [report["phase"] for report in own],
        "doubled": doubled,
        "contained": contained,
        "hooks": hooks.counts,
        "history": sorted(history.history),
        "strange": [strange.counts, reported()],
    }


def stop() -> dict[str, Any]:
    model, alone, amid = make_model(), Hooks(stop_at=7), Hooks(stop_at=7)
    model.evaluate(dataset(3000), verbose=0, callbacks=[alone])
    STOP.clear()
    model.fit(dataset(5), epochs=3, verbose=0, validation_data=dataset(3000), callbacks=[amid])
    STOP.clear()
    reported()
    return {"alone": alone.counts, "amid": amid.counts}


class Asks(keras.callbacks.Callback):
    """Requests a stop at a training batch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            STOP.set()


def left() -> dict[str, Any]:
    last = {}
    for name, at in (("later", 24 + 24 + 2), ("first", 2)):
        make_model().fit(dataset(24), epochs=400, verbose=0, callbacks=[Asks(at)])
        STOP.clear()
        last[name] = reported()[-1]
    return last


def main() -> None:
    done: dict[str, Any] = {"notes": NOTES}
    distribution = tf.distribute.MultiWorkerMirroredStrategy() if CONFIG else tf.distribute.get_strategy()
    with distribution.scope():
        done |= {"validation": validation(), "evaluation": evaluation()}
        if not CONFIG:
            done |= {"callbacks": callbacks(), "left": left()}
        if not CONFIG or FLAVOUR == "keras":
            done["stop"] = stop()
    with open(f"{sys.argv[1]}.{INDEX}", "w") as file:
        json.dump(done, file)
    if CONFIG:
        distribution.reduce("SUM", 0.0, axis=None)  # no worker exits before all have written
    os._exit(0)  # TensorFlow's own shutdown of a worker takes up to half a minute


if __name__ == "__main__":
    main()
