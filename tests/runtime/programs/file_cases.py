"""Save models and logs in every way that Keras offers, as one worker, and read them back at once.

Usage: ``file_cases.py OUT FOLDER KERAS``, with ``TF_CONFIG``. Each worker writes its results to ``OUT.<index>``.
``KERAS`` is ``keras`` or ``tf_keras``. The last case kills the chief while it writes.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_USE_LEGACY_KERAS"] = str(int(sys.argv[3] == "tf_keras"))

import numpy as np
import tensorflow as tf

from tfos_nb.runtime.datasets.tuning import as_fed
from tfos_nb.runtime.keras.fit import NODE_VARIABLE
from tfos_nb.runtime.program.setup import patch_keras_fit

OUT, FOLDER, FLAVOUR = sys.argv[1:]
keras = importlib.import_module(FLAVOUR)
INDEX = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
EPOCHS = 2
PATHS = ["best.keras", "m{epoch:02d}.keras", "w{epoch:02d}.weights.h5", "full.h5"]
PATHS += ["tf.weights-{epoch}"] if FLAVOUR == "tf_keras" else []  # TensorFlow's format, of several files
WRITTEN: list[str] = []  # what this process has renamed or created in the users' folder


def note_writes(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("os.rename", "os.mkdir") and str(arguments[event == "os.rename"]).startswith(FOLDER):
        WRITTEN.append(os.path.relpath(str(arguments[event == "os.rename"]), FOLDER))


def make_model() -> Any:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.layers.Dense(64, input_shape=(3,)), keras.layers.BatchNormalization()])
    model.add(keras.layers.Dense(1))
    ema = {"use_ema": True, "ema_momentum": 0.5} if FLAVOUR == "keras" else {}
    model.compile(keras.optimizers.SGD(0.01, **ema), "mse", metrics=["mae"])
    return model


def rows() -> tf.data.Dataset:
    rng = np.random.default_rng(INDEX)
    x = rng.normal(size=(48, 3)).astype("float32")
    return as_fed(tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(8))


def weights(model: Any) -> list[Any]:
    return [np.asarray(value).tolist() for value in model.get_weights()]


def load(path: str) -> Any:
    return keras.models.load_model(path, compile=False)  # Keras 3 finds no "mse" in an .h5


class ReadsBack(keras.callbacks.Callback):
    """Reads, after each epoch, what ModelCheckpoint has just saved."""

    def __init__(self) -> None:
        super().__init__()
        self.same: list[bool] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for path in PATHS:
            whole = f"{FOLDER}/checkpoints/{path.format(epoch=epoch + 1)}"
            if "weights" in path:
                loaded = make_model()
                loaded.load_weights(whole)
            else:
                loaded = load(whole)
            self.same.append(weights(loaded) == weights(self.model))


def checkpoints(model: Any) -> dict[str, Any]:
    """Run fit with every callback that writes files."""
    place = f"{FOLDER}/checkpoints"
    callbacks = [
        keras.callbacks.ModelCheckpoint(
            f"{place}/{path}", monitor="loss", save_best_only="best" in path, save_weights_only="weights" in path
        )
        for path in PATHS
    ]
    reads = ReadsBack()
    callbacks += [
        reads,
        keras.callbacks.ModelCheckpoint(f"{place}/b{{epoch}}-{{batch}}.keras", save_freq=4),
        keras.callbacks.CSVLogger(f"{FOLDER}/log.csv"),
        keras.callbacks.TensorBoard(f"{FOLDER}/board", histogram_freq=1),
        keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True),
    ]
    history = model.fit(rows(), epochs=EPOCHS, verbose=0, callbacks=callbacks).history
    return {"same": reads.same, "loss": history["loss"]}


def averages(model: Any) -> bool:
    """Save the moving averages of the weights."""
    path = f"{FOLDER}/averages.keras"
    ema = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), keras.callbacks.ModelCheckpoint(path)]
    model.fit(rows(), epochs=2, verbose=0, callbacks=ema)
    return weights(load(path)) == weights(model)


def direct(model: Any) -> dict[str, bool]:
    """Save and export outside of fit, and read each file at once."""
    found = {}
    for name in ("saved.keras", "saved.h5", "saved.keras"):
        model.save(f"{FOLDER}/{name}")
        found[name] = weights(load(f"{FOLDER}/{name}")) == weights(model)
    keras.models.save_model(model, f"{FOLDER}/function.keras")
    found["function"] = weights(load(f"{FOLDER}/function.keras")) == weights(model)
    model.save_weights(f"{FOLDER}/alone.weights.h5")
    model.load_weights(f"{FOLDER}/alone.weights.h5")
    x = np.ones((2, 3), "float32")
    expected = np.asarray(model(x))
    for name in ("exported", "exported"):
        model.export(f"{FOLDER}/{name}")
        pathlib.Path(FOLDER, name, "labels.txt").touch()
        served = tf.saved_model.load(f"{FOLDER}/{name}")
        found[name] = bool(np.allclose(served.serve(x), expected, atol=1e-5))
    found["labels"] = os.path.exists(f"{FOLDER}/exported/labels.txt")
    tf.saved_model.save(model, f"{FOLDER}/saved_model")
    found["saved_model"] = tf.saved_model.load(f"{FOLDER}/saved_model") is not None
    return found


def alone(model: Any) -> dict[str, Any]:
    """Save files that only one worker saves, or that each worker saves for itself."""
    began = time.monotonic()
    if INDEX == 0:
        model.save(f"{FOLDER}/chiefs.keras")
    waited = time.monotonic() - began
    own = f"{FOLDER}/own-{INDEX}.keras"
    model.save(own)
    guide = f"{FOLDER}/guide/workertemp_{INDEX}/model.keras" if INDEX else f"{FOLDER}/guide/model.keras"
    os.makedirs(os.path.dirname(guide), exist_ok=True)
    model.save(guide)
    os.makedirs(f"{FOLDER}/directory-{INDEX}", exist_ok=True)
    os.chdir(f"{FOLDER}/directory-{INDEX}")
    model.save("relative.keras")
    there = [os.path.exists(path) for path in (own, guide, "relative.keras")]
    return {"waited": waited, "there": there}


def refused(model: Any) -> str:
    """Save to a path that cannot be written."""
    os.makedirs(f"{FOLDER}/taken.keras", exist_ok=True)
    try:
        model.save(f"{FOLDER}/taken.keras")
    except OSError as error:
        return str(error)
    return ""


def backups(model: Any) -> list[str]:
    backup = keras.callbacks.BackupAndRestore(f"{FOLDER}/backup", delete_checkpoint=False)
    model.fit(rows(), epochs=1, verbose=0, callbacks=[backup])
    return sorted(os.listdir(f"{FOLDER}/backup/worker-{INDEX}"))


def removed_backups(model: Any) -> bool:
    """Return whether the backups' directory is removed when fit returns, although another worker ends later."""
    late = keras.callbacks.LambdaCallback(on_train_end=lambda logs: time.sleep(1.0 * INDEX))
    backup = keras.callbacks.BackupAndRestore(f"{FOLDER}/removed")
    model.fit(rows(), epochs=1, verbose=0, callbacks=[late, backup])
    return not os.path.exists(f"{FOLDER}/removed")


def killed(model: Any, report: dict[str, Any]) -> dict[str, Any]:
    """Kill the chief while it overwrites a file; the other worker then reads the file."""
    from keras.src.saving import saving_lib

    path = f"{FOLDER}/kept.keras"
    model.save(path)
    before = weights(model)
    model.set_weights([np.zeros_like(value) for value in model.get_weights()])
    if INDEX == 0:
        write(report)
        saving_lib._save_state = lambda *of, **named: os.kill(os.getpid(), signal.SIGKILL)
    model.save(path)
    return {"whole": weights(load(path)) == before}


def write(report: dict[str, Any]) -> None:
    pathlib.Path(f"{OUT}.{INDEX}").write_text(json.dumps({**report, "written": WRITTEN}))


def main() -> None:
    os.environ[NODE_VARIABLE] = f"worker:{INDEX}"
    print(patch_keras_fit())
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
    sys.addaudithook(note_writes)
    report: dict[str, Any] = {"checkpoints": checkpoints(model)}
    report["once"] = list(WRITTEN)
    if FLAVOUR == "keras":
        report |= {"averages": averages(model), "direct": direct(model)}
        report |= {"alone": alone(model), "refused": refused(model), "backups": backups(model)}
        report["removed"] = removed_backups(model)
        report["killed"] = killed(model, report)
    write(report)
    os._exit(0)  # TensorFlow's servers wait for each other


if __name__ == "__main__":
    main()
