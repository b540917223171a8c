"""Check that the patched Keras computes the same numbers on several replicas as on one.

The patches look for the code that they replace, and refuse a Keras that does not have all of it. A Keras that has all
of it may still use it differently, and only a training shows that. So a separate process (``python -m``) trains a small
model twice: on two devices that are parts of one CPU, and on one device. Both train on the same batches, one of which
has fewer rows than devices. The process prints the first difference, or nothing.

If the installed Keras version is not in :data:`tfos_nb.runtime.keras.versions.TESTED`, the versions with which all
tests were run, the driver runs this check on an executor, once per application, before a launch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tfos_nb.runtime.control.processes import run_apart
from tfos_nb.runtime.feed.messages import FeedSchema
from tfos_nb.runtime.feed.passes import Pass, Readers, Shares
from tfos_nb.runtime.keras.versions import installed_keras, is_tested
from tfos_nb.runtime.rows.columns import first_lengths

__all__ = ["CHECK_SCHEMA", "KerasProbe"]

CHECK_SCHEMA = "version string, unlike string"
_CHECK_SECONDS = 300.0
_SAID = "unlike: "


@dataclass(frozen=True)
class KerasProbe:
    """Spark task that checks an executor's Keras and yields one row: the version, and what is wrong with it or ''."""

    python_path: tuple[str, ...] = ()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Check in a separate process, since Spark continues to use this one, and yield the row."""
        for _ in batches:
            pass
        version = installed_keras()
        unlike = "" if not version or is_tested(version) else self._checked()
        yield pa.RecordBatch.from_pydict(
            {"version": pa.array([version], pa.string()), "unlike": pa.array([unlike], pa.string())}
        )

    def _checked(self) -> str:
        module = ("-m", "tfos_nb.runtime.program.keras_check")
        ended = run_apart(*module, path=self.python_path, seconds=_CHECK_SECONDS)
        said = [line for line in ended.stdout.splitlines() if line.startswith(_SAID)]
        if said:
            return said[-1].removeprefix(_SAID)
        return (ended.stderr.strip().splitlines() or [f"ended with {ended.returncode}"])[-1] if ended.returncode else ""


# --- the process that checks ------------------------------------------------------------------------------------------

_STEPS = ((5, 5), (3, 2))  # rows, and rows per step: uneven shares, and a step with a row for only one device
_EPOCHS = 2
_NEAR = 1e-4


class _Rows:
    """Rows in the form in which a node receives them."""

    def __init__(self, rows: int) -> None:
        import numpy as np

        self._rows = rows
        numbers = np.random.default_rng(7)
        features = numbers.normal(size=(rows, 3)).astype("float32")
        columns = {
            "x": pa.array(features.tolist(), pa.list_(pa.float32())),
            "y": pa.array(features.sum(axis=1)),
            "w": pa.array(numbers.uniform(size=rows).astype("float32")),
        }
        self._batch = pa.RecordBatch.from_pydict(columns)

    def schema(self) -> FeedSchema:
        return FeedSchema(1, self._batch.schema.serialize().to_pybytes(), first_lengths(self._batch))

    def next_pass(self, readers: Readers | None = None) -> Pass:
        return Pass(iter([self._batch]), lambda: Shares(self._rows, self._rows, self._rows))


def _trained(strategy: Any, rows: int, batch: int) -> dict[str, Any]:
    """Train a small model; return its history, evaluation, variables and number of steps by name."""
    import keras
    import tensorflow as tf

    from tfos_nb.runtime.datasets.dataset import DatasetOptions, build_dataset

    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    dataset = build_dataset(_Rows(rows), DatasetOptions(batch, "x", "y", "w"), print, alone=False)
    if strategy.num_replicas_in_sync == 1:  # with an unknown number of steps, Keras counts one more at an epoch's end
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(-(-rows // batch)))
    with strategy.scope():
        inputs = keras.Input((3,))
        hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs)
        hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(0.05, clipnorm=0.5), "mse", metrics=["mae"], weighted_metrics=["mse"])
    history = model.fit(dataset, epochs=_EPOCHS, verbose=0, validation_data=dataset).history
    return {
        **{f"fit's {name}": values for name, values in history.items()},
        **{f"evaluate's {k}": v for k, v in model.evaluate(dataset, verbose=0, return_dict=True).items()},
        **{variable.path: keras.ops.convert_to_numpy(variable) for variable in model.variables},
        "the number of steps": float(model.optimizer.iterations.numpy()),
    }


def check() -> str:
    """Train on two devices and on one in this process; return a line about the first difference, or ''."""
    import numpy as np
    import tensorflow as tf

    from tfos_nb.runtime.program.setup import patch_keras_fit

    parts = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    told = patch_keras_fit()
    if told.startswith("WARNING"):
        return told
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for size in _STEPS:
        alone, together = _trained(tf.distribute.get_strategy(), *size), _trained(strategy, *size)
        for name, value in alone.items():
            if not np.allclose(together[name], value, _NEAR, _NEAR):
                return f"{name} is {_short(together[name])} on two devices and {_short(value)} on one"
    return ""


def _short(value: Any) -> str:
    import numpy as np

    return np.array2string(np.asarray(value, float).ravel()[:3], precision=4, separator=", ")


def main() -> None:
    """Run the check, and print one line that says what is wrong, if anything is."""
    try:
        unlike = check()
    except Exception as error:  # noqa: BLE001 - a program would get the same error
        unlike = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if unlike:
        sys.stdout.write(f"{_SAID}{unlike}\n")


if __name__ == "__main__":
    main()
