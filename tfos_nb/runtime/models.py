"""A saved model as a function of arrays: what it takes and gives, and how each kind of file becomes one.

::

    .keras, .h5      Keras 3; tf_keras where Keras 2 wrote it
    a directory      one signature of a SavedModel

TensorFlow is imported here inside functions: in Spark's Python worker, never before that was forked, and never on the
driver.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfos_nb.runtime.wire import message

__all__ = [
    "SERVING",
    "Model",
    "ModelUnusable",
    "Signature",
    "Tensor",
    "check_directory",
    "check_file",
    "load",
    "why_not_loaded",
]

Array = np.ndarray[Any, Any]

SERVING = "serving_default"
"""The signature that everybody's SavedModels have."""

_KERAS_FILE = b"PK\x03\x04"
_HDF5_FILE = b"\x89HDF\r\n\x1a\n"
_NEEDS_NO_CODE = "export it with model.export(DIRECTORY) and give that directory, which needs no code of yours"
_OWN_CODE = re.compile(r"(?:Could not locate (?:class|function)|Unknown (?:layer|object|\w+ function)):? '(\w+)'")


class ModelUnusable(Exception):
    """The model cannot be used; the message says why and what to do."""


@message
@dataclass(frozen=True)
class Tensor:
    """An input or output: its name, TensorFlow's name of its type, and the shape of one row's value."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@message
@dataclass(frozen=True)
class Signature:
    """What a model takes and gives."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes
    ----------
    signature : Signature
        What it takes and gives.
    apply : callable
        Takes an array for each input, returns one for each output.
    close : callable
        Frees what it holds beside memory.
    """

    signature: Signature
    apply: Callable[[Sequence[Array]], list[Array]]
    close: Callable[[], object] = lambda: None


def load(path: str, signature: str = SERVING) -> Model:
    """Load a Keras file, or a signature of a SavedModel.

    Raises
    ------
    ModelUnusable
        If it is neither, or does not say what it takes and gives.
    """
    if os.path.isdir(path):
        return _load_saved_model(path, signature)
    check_file(path)
    return _load_keras(path)


def check_file(path: str) -> None:
    """Raise ModelUnusable if a path is no Keras file by its name and its first bytes."""
    suffix = os.path.splitext(path)[1].lower()
    with open(path, "rb") as file:
        head = file.read(8)
    expected = {".keras": _KERAS_FILE, ".h5": _HDF5_FILE, ".hdf5": _HDF5_FILE}.get(suffix)
    if expected is None:
        raise ModelUnusable("a model is a .keras or .h5 file, or the directory of a SavedModel")
    if not head.startswith(expected):
        raise ModelUnusable(f"it is called {suffix}, and is no such file inside: save the model anew")


def check_directory(path: str) -> None:
    """Raise ModelUnusable if a directory is no SavedModel."""
    if not os.path.exists(os.path.join(path, "saved_model.pb")):
        raise ModelUnusable("the directory has no saved_model.pb in it: model.export(DIRECTORY) makes such a directory")


def _load_saved_model(path: str, name: str) -> Model:
    import tensorflow as tf

    check_directory(path)
    loaded = tf.saved_model.load(path)
    if name not in loaded.signatures:
        there = ", ".join(loaded.signatures) or "none"
        raise ModelUnusable(f"it has no signature {name!r} (it has: {there}): model.export(DIRECTORY) makes one")
    function = loaded.signatures[name]
    given, returned = function.structured_input_signature[1], function.structured_outputs
    inputs, outputs = sorted(given), sorted(returned)
    signature = Signature(
        tuple(_tensor("input", key, given[key]) for key in inputs),
        tuple(_tensor("output", key, returned[key]) for key in outputs),
    )

    def apply(arrays: Sequence[Array], _owner: Any = loaded) -> list[Array]:  # its variables live as long as it does
        tensors = {t.name: _constant(a, t) for t, a in zip(signature.inputs, arrays, strict=True)}
        result = function(**tensors)
        return [result[key].numpy() for key in outputs]

    return Model(signature, apply)


def _load_keras(path: str) -> Model:
    version = _keras_version(path)
    flavour = "tf_keras" if version.startswith("2.") and importlib.util.find_spec("tf_keras") else "keras"
    keras = importlib.import_module(flavour)
    try:
        model = keras.models.load_model(path, compile=False)
    except Exception as error:
        written = f" (written by Keras {version or 'of unknown version'}, read by {flavour} {keras.__version__})"
        raise ModelUnusable(why_not_loaded(error) + written) from error
    return _keras_model(model)


def _keras_version(path: str) -> str:
    if path.endswith(".keras"):
        with zipfile.ZipFile(path) as archive:
            return str(json.loads(archive.read("metadata.json")).get("keras_version", ""))
    h5py = importlib.import_module("h5py")  # it comes with Keras
    with h5py.File(path) as file:
        if "model_config" not in file.attrs:
            raise ModelUnusable("it holds weights alone, not a model: save the whole model with model.save(PATH.keras)")
        version = file.attrs.get("keras_version", "")
    return version.decode() if isinstance(version, bytes) else str(version)


def _keras_model(model: Any) -> Model:
    import tensorflow as tf

    given, returned = (_flat(getattr(model, name, None)) for name in ("inputs", "outputs"))
    if not given or not returned:
        raise ModelUnusable(f"a {type(model).__name__} does not say what it takes: {_NEEDS_NO_CODE}")
    structure = _structure(model, "input", given)
    signature = Signature(
        tuple(map(functools.partial(_tensor, "input"), _names(structure, [t.name for t in given]), given)),
        tuple(map(functools.partial(_tensor, "output"), _output_names(model, returned), returned)),
    )

    def call(*tensors: Any) -> Any:
        return tf.nest.flatten(model(tf.nest.pack_sequence_as(structure, list(tensors)), training=False))

    traced = tf.function(call, input_signature=[tf.TensorSpec(t.shape, t.dtype) for t in given])

    def apply(arrays: Sequence[Array]) -> list[Array]:
        tensors = [_constant(a, t) for t, a in zip(signature.inputs, arrays, strict=True)]
        return [tensor.numpy() for tensor in traced(*tensors)]

    return Model(signature, apply)


def _flat(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [] if tensors is None else [tensors]


def _structure(model: Any, name: str, flat: list[Any]) -> Any:
    """Return how a model's inputs or outputs are nested; a Sequential may not say, and has one."""
    try:
        return getattr(model, name)
    except (AttributeError, ValueError):
        return flat[0] if len(flat) == 1 else flat


def _names(structure: Any, otherwise: Sequence[str]) -> list[str]:
    """Name tensors by the keys of the dictionary that holds them, where there is one."""
    keys = sorted(structure) if isinstance(structure, dict) else []
    names = keys if len(keys) == len(otherwise) else list(otherwise)
    twice = {name for name in names if names.count(name) > 1}
    return [f"{name}_{index}" if name in twice else name for index, name in enumerate(names)]


def _output_names(model: Any, returned: list[Any]) -> list[str]:
    # Not the tensors' own names: those count what the process has made, and are others elsewhere.
    own = getattr(model, "output_names", None) or [f"output_{index}" for index in range(len(returned))]
    return _names(_structure(model, "output", returned), own)


def _tensor(role: str, name: str, spec: Any) -> Tensor:
    """Describe one input or output.

    Raises
    ------
    ModelUnusable
        If its first axis is not one of any number of rows.
    """
    import tensorflow as tf

    if getattr(spec, "sparse", False) or getattr(spec, "ragged", False) or not hasattr(spec, "shape"):
        raise ModelUnusable(f"{role} {name!r} is no dense tensor")
    shape = tf.TensorShape(spec.shape)
    if shape.rank is None:
        raise ModelUnusable(f"{role} {name!r} does not say how many axes it has: export the model with its shapes")
    sizes = shape.as_list()
    if not sizes or sizes[0] is not None:
        has = f"exactly {sizes[0]} rows" if sizes else "no axis for rows"
        raise ModelUnusable(f"{role} {name!r} has {has}: save the model with a first axis of None")
    return Tensor(name, str(tf.as_dtype(spec.dtype).name), tuple(sizes[1:]))


def _constant(array: Array, tensor: Tensor) -> Any:
    import tensorflow as tf

    return tf.cast(tf.constant(array), tensor.dtype) if tensor.dtype != "string" else tf.constant(array, tf.string)


def why_not_loaded(error: BaseException) -> str:
    """Say in a sentence why a model could not be loaded; Keras puts its whole configuration around it."""
    text = str(error).strip() or type(error).__name__
    unknown = re.search(
        r"(?:Could not locate (?:class|function)|Unknown (?:layer|object|\w+ function)):? '(\w+)'", text
    )
    if unknown:
        return f"it needs your own {unknown[1]}, which a file has only by its name: {_NEEDS_NO_CODE}"
    if "`Lambda` layer" in text or "Lambda layer" in text:
        return f"it has a Lambda layer, whose Python code Keras does not load from a file: {_NEEDS_NO_CODE}"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing in ("tensorflow", "keras", "h5py"):
        return f"the executors' Python ({sys.executable}) has no {missing}: install it there, or set PYSPARK_PYTHON"
    lines = [line for line in text.rpartition("Exception encountered:")[2].strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:400]}"
