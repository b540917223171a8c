"""Saved model as a function of arrays, and checks that are common to all kinds of model files.

TensorFlow is imported inside functions. It must not be imported in Spark's Python daemon, which forks the workers, nor
on the driver.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfos_nb.errors import TfosError
from tfos_nb.runtime.models.classifier_outputs import ClassifierOutput
from tfos_nb.runtime.models.signature import ModelUnusable, Signature, Tensor
from tfos_nb.runtime.rows.ragged import Output

__all__ = [
    "SERVING",
    "WHOLE",
    "Model",
    "Traced",
    "Use",
    "check_directory",
    "check_file",
    "constant",
    "is_saved_model",
    "why_not_loaded",
]

Array = np.ndarray[Any, Any]

SERVING = "serving_default"
"""Default key of a SavedModel's signature (TensorFlow's ``DEFAULT_SERVING_SIGNATURE_DEF_KEY``)."""

_KERAS_FILE = b"PK\x03\x04"
_HDF5_FILE = b"\x89HDF\r\n\x1a\n"
_OWN_CODE = re.compile(r"(?:Could not locate (?:class|function)|Unknown (?:layer|object|\w+ function)):? '(\w+)'")
_OTHERS = (
    ("PyTorch", re.compile(r"\.(pt|pth|safetensors)$|^pytorch_model\.bin$")),
    ("ONNX", re.compile(r"\.onnx$")),
    ("TensorFlow Lite", re.compile(r"\.tflite$")),
    ("MLflow", re.compile(r"^MLmodel$")),
    ("Spark ML", re.compile(r"^(stages|metadata)$")),
    ("scikit-learn", re.compile(r"\.(pkl|joblib)$")),
)


@dataclass(frozen=True)
class Use:
    """Part of a model that is used, and options for loading it.

    Parameters
    ----------
    signature : str or None
        A SavedModel's signature. None: ``serving_default``, or the only one.
    tags : tuple of str
        A SavedModel's tags. Empty: ``serve``, or those of the only graph in it.
    inputs, outputs : tuple of str
        Names in a signature, of a graph's tensors, or of a Keras model's inputs, outputs and layers. Empty: all of the
        signature's.
    layer : str, int or None
        Layer of a Keras model, by name or index, whose output is returned instead of the model's.
    classifier_outputs : tuple of ClassifierOutput
        Conversion of the outputs to Spark ML's columns: one for all, or one for each. Empty: no conversion.
    code : bytes
        User code that the model needs, from :func:`tfos_nb.runtime.code.custom_objects.pack`. It is sent with Spark's
        task.
    trusted : bool
        Whether Python code in the file (``Lambda`` layers) may run, because the file was made from a model object in
        the user's session.
    """

    signature: str | None = None
    tags: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    layer: str | int | None = None
    classifier_outputs: tuple[ClassifierOutput, ...] = ()
    code: bytes = field(default=b"", repr=False)
    trusted: bool = False


WHOLE = Use()
"""The default: all inputs and outputs of the default signature."""


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes
    ----------
    signature : Signature
        Its inputs and outputs.
    apply : callable
        Takes an array for each input. Returns an array, or a :class:`~tfos_nb.runtime.rows.ragged.Ragged`, for each
        output.
    close : callable
        Releases sessions and processes. Memory is released by the garbage collector.
    """

    signature: Signature
    apply: Callable[[Sequence[Array]], list[Output]]
    close: Callable[[], object] = lambda: None


def check_file(path: str) -> None:
    """Check by a file's suffix and its first bytes that it is a Keras file.

    Raises
    ------
    ModelUnusable
        If it is not. The message names the framework to which the suffix belongs, if it is known.
    """
    suffix = os.path.splitext(path)[1].lower()
    with open(path, "rb") as file:
        head = file.read(8)
    expected = {".keras": _KERAS_FILE, ".h5": _HDF5_FILE, ".hdf5": _HDF5_FILE}.get(suffix)
    if expected is None:
        raise ModelUnusable("a model is a .keras or .h5 file, or the directory of a SavedModel" + _other_kind([path]))
    if not head.startswith(expected):
        raise ModelUnusable(f"its name ends with {suffix}, but it is not such a file: save the model again")


def is_saved_model(path: str) -> bool:
    """Return whether a directory is a SavedModel."""
    return any(os.path.exists(os.path.join(path, name)) for name in ("saved_model.pb", "saved_model.pbtxt"))


def check_directory(path: str) -> None:
    """Check that a directory has a SavedModel or a checkpoint.

    Raises
    ------
    ModelUnusable
        If it has neither. The message lists what it has.
    """
    names = sorted(os.listdir(path))
    if is_saved_model(path) or any(re.search(r"\.(index|keras|h5|hdf5)$", name) for name in names):
        return
    if not names:
        raise ModelUnusable("the directory is empty: the model is in another place, or not written yet")
    versions = [name for name in names if is_saved_model(os.path.join(path, name))]
    below = f"; there is one in its {', '.join(versions[:5])}: give that directory" if versions else ""
    there = ", ".join(names[:8]) + ", …" * (len(names) > 8)
    raise ModelUnusable(
        f"the directory has no saved_model.pb in it, and no checkpoint (it has: {there}){below or _other_kind(names)}: "
        "model.export(DIRECTORY) makes a SavedModel"
    )


def _other_kind(names: Iterable[str]) -> str:
    for framework, pattern in _OTHERS:
        found = next((name for name in names if pattern.search(os.path.basename(name))), None)
        if found is not None:
            return f"; {os.path.basename(found)} is {framework}'s"
    return ""


def constant(array: Array, tensor: Tensor) -> Any:
    """Return an array as a TensorFlow tensor of the type of an input."""
    import tensorflow as tf

    if tensor.dtype == "string":
        return tf.constant(array, tf.string)
    made = tf.constant(array)
    return made if made.dtype.name == tensor.dtype else tf.cast(made, tensor.dtype)


class Traced:
    """``tf.function`` with a fixed signature, which removes AutoGraph's temporary files after tracing.

    AutoGraph writes the source that it generates into the temporary directory and removes it when Python exits
    (``tensorflow/python/autograph/pyct/loader.py``). Spark kills its Python workers, so the files would remain. They
    are not read after the function is traced.

    Parameters
    ----------
    function : callable
        Takes one tensor per parameter.
    specs : sequence of tf.TensorSpec
        Types and shapes of the tensors.
    """

    def __init__(self, function: Callable[..., Any], specs: Sequence[Any]) -> None:
        import tensorflow as tf

        self._function = tf.function(function, input_signature=specs)
        self._traced = False

    def outputs(self) -> list[Any]:
        """Trace the function and return the specs of its outputs."""
        with _leaving_no_sources():
            return list(self._function.get_concrete_function().structured_outputs)

    def __call__(self, *tensors: Any) -> Any:
        """Call the function."""
        if self._traced:
            return self._function(*tensors)
        self._traced = True
        with _leaving_no_sources():
            return self._function(*tensors)


@contextlib.contextmanager
def _leaving_no_sources() -> Iterator[None]:
    others = set(sys.modules)
    try:
        yield
    finally:
        generated = [name for name in sys.modules.keys() - others if name.startswith("__autograph_generated_file")]
        for name in generated:
            with contextlib.suppress(OSError):
                os.remove(sys.modules[name].__file__ or "")


def why_not_loaded(error: BaseException) -> str:
    """Return in one sentence why a model could not be loaded. Keras' own messages contain its whole configuration."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, TfosError):
        return text  # our own messages are short and complete
    unknown = _OWN_CODE.search(text)
    if unknown:
        own = unknown[1]
        return (
            f"it needs your own {own}, which a file has only by its name: give custom_objects={{{own!r}: {own}}}, or "
            "export it with model.export(DIRECTORY) and give that directory, which needs no code of yours"
        )
    if "`Lambda` layer" in text or "Lambda layer" in text:
        return (
            "it has a Lambda layer, whose Python code Keras does not load from a file: export it with "
            "model.export(DIRECTORY) and give that directory, which needs no code of yours"
        )
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing in ("tensorflow", "keras", "h5py"):
        return f"the executors' Python ({sys.executable}) has no {missing}: install it there, or set PYSPARK_PYTHON"
    lines = [line for line in text.rpartition("Exception encountered:")[2].strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:400]}"
