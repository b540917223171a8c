"""Load a model and log it to MLflow: ``python -m tfos_nb.mlflow.log_model``, with a ModelJob on its standard input."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import sys
from typing import Any

from tfos_nb.mlflow.models import ModelJob

_NAME = "model"
_PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy")


def main() -> None:
    """Do what standard input says."""
    job = ModelJob.from_json(sys.stdin.read())
    import mlflow.tensorflow
    from mlflow.models import Model, infer_signature

    mlflow.set_tracking_uri(job.tracking_uri)
    model = _load(job.model)
    found: dict[str, Any] = {"pip_requirements": _requirements()}
    if job.example:
        example = _read_example(job)
        found |= {"input_example": example, "signature": infer_signature(example, _applied(model, example))}
    named = "name" in inspect.signature(Model.log).parameters  # since MLflow 3
    place: dict[str, Any] = {"name": _NAME, "artifact_path": None} if named else {"artifact_path": _NAME}
    Model.log(flavor=mlflow.tensorflow, run_id=job.run_id, model=model, **place, **found)


def _load(path: str) -> Any:
    if os.path.isdir(path):
        import tensorflow as tf

        return tf.saved_model.load(path)
    if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
        import tf_keras

        return tf_keras.models.load_model(path, compile=False)
    import keras

    return keras.models.load_model(path, compile=False)


def _read_example(job: ModelJob) -> Any:
    """Return the example as the model takes it: an array, or for several inputs a dictionary of arrays."""
    import numpy as np

    with np.load(job.example, allow_pickle=False) as file:
        arrays = [file[f"arr_{number}"] for number in range(len(job.inputs))]
    arrays = [array.astype(str) if array.dtype.kind == "S" else array for array in arrays]
    return arrays[0] if len(arrays) == 1 else dict(zip(job.inputs, arrays, strict=True))


def _applied(model: Any, example: Any) -> Any:
    """Return the model's output for the example."""
    if hasattr(model, "predict"):
        found = model.predict(example, verbose=0)
        return {str(place): one for place, one in enumerate(found)} if isinstance(found, list) else found
    serve = model.signatures["serving_default"]
    names = list(serve.structured_input_signature[1])
    given = example if isinstance(example, dict) else {names[0]: example}
    import tensorflow as tf

    found = serve(**{name: tf.constant(value) for name, value in given.items()})
    return {name: value.numpy() for name, value in found.items()}


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
