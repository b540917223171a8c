"""Load a model and log it to MLflow: ``python -m tfos_nb.mlflow.log_model``, with a ModelJob on its standard input."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import sys
from typing import Any

from tfos_nb.mlflow.models import NO_EXAMPLE, ModelJob

_NAME = "model"
_PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy")


def main() -> None:
    """Do what standard input says."""
    job = ModelJob.from_json(sys.stdin.read())
    import mlflow.tensorflow
    from mlflow.models import Model, infer_signature

    mlflow.set_tracking_uri(job.tracking_uri)
    mlflow.set_experiment(experiment_id=mlflow.get_run(job.run_id).info.experiment_id)
    model = _load(job.model)
    found: dict[str, Any] = {"pip_requirements": _requirements()}
    if job.example:
        try:
            example = _read_example(job)
            found |= {"input_example": example, "signature": infer_signature(example, _applied(model, example))}
        except Exception as error:  # noqa: BLE001 - a model without an example is better than none
            sys.stdout.write(f"{NO_EXAMPLE}{str(error).splitlines()[0] if str(error) else type(error).__name__}\n")
    named = "name" in inspect.signature(Model.log).parameters  # since MLflow 3
    place: dict[str, Any] = {"name": _NAME, "artifact_path": None} if named else {"artifact_path": _NAME}
    Model.log(flavor=mlflow.tensorflow, run_id=job.run_id, model=model, **place, **found)


def _load(path: str) -> Any:
    if os.path.isdir(path):
        return _served(path)
    if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
        import tf_keras

        return tf_keras.models.load_model(path, compile=False)
    import keras

    return keras.models.load_model(path, compile=False)


def _served(path: str) -> Any:
    """Return a SavedModel as a ``tf.Module``, which is what MLflow saves: a call is its serving signature."""
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    serve = loaded.signatures["serving_default"]
    specs = serve.structured_input_signature[1]
    (only,) = specs if len(specs) == 1 else (None,)

    class Served(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.loaded = loaded

        @tf.function(input_signature=[specs if only is None else specs[only]])  # type: ignore[untyped-decorator]
        def __call__(self, inputs: Any) -> Any:
            return serve(**(inputs if only is None else {only: inputs}))

    return Served()


def _read_example(job: ModelJob) -> Any:
    """Return the example as the model takes it: an array, or for several inputs a dictionary of arrays."""
    import numpy as np

    with np.load(job.example, allow_pickle=False) as file:
        arrays = [file[f"arr_{number}"] for number in range(len(job.inputs))]
    arrays = [array.astype(str) if array.dtype.kind == "S" else array for array in arrays]
    return arrays[0] if len(arrays) == 1 else dict(zip(job.inputs, arrays, strict=True))


def _applied(model: Any, example: Any) -> Any:
    """Return the model's output for the example."""
    import tensorflow as tf

    given = tf.nest.map_structure(tf.constant, example)
    found = model.predict(given, verbose=0) if hasattr(model, "predict") else model(given)
    if isinstance(found, list):
        return {str(place): one for place, one in enumerate(found)}
    return tf.nest.map_structure(lambda one: one.numpy() if hasattr(one, "numpy") else one, found)


def _requirements() -> list[str]:
    """Return the versions that the model needs. MLflow would find them by loading the model once more."""
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package}=={importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
