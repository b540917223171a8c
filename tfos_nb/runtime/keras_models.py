"""Keras models as functions of arrays: whole, up to a layer, with the user's own classes."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfos_nb.runtime import baggage
from tfos_nb.runtime.models import (
    Model,
    ModelUnusable,
    Signature,
    Tensor,
    Traced,
    Use,
    constant,
    described,
    near,
    tensor_of,
    why_not_loaded,
)

__all__ = ["keras_model", "load_keras", "read_keras"]

Array = np.ndarray[Any, Any]

_EXPORT = "export it with model.export(DIRECTORY) and give that directory, which needs no code of yours"


def load_keras(path: str, use: Use) -> Model:
    """Load a ``.keras`` or ``.h5`` file.

    Raises
    ------
    ModelUnusable
        If Keras cannot read it, or it has no such layer or output.
    """
    return keras_model(read_keras(path, use), use)


def read_keras(path: str, use: Use) -> Any:
    """Return the Keras model of a file."""
    try:
        version = _keras_version(path)
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise ModelUnusable(f"the file is damaged or not whole ({error}): copy it again, or save it anew") from error
    flavour = "tf_keras" if version.startswith("2.") and importlib.util.find_spec("tf_keras") else "keras"
    keras = importlib.import_module(flavour)
    custom = _by_registered_names(baggage.unpack(use.code).custom_objects, path)
    try:
        # A function of the user's own is as trusted as the rest of the program that names it.
        return keras.models.load_model(path, compile=False, custom_objects=custom or None)
    except Exception as error:
        written = f" (written by Keras {version or 'of unknown version'}, read by {flavour} {keras.__version__})"
        if _is_newer(version, keras.__version__):
            told = f"it is of a newer Keras than the executors have: install that version there, or {_EXPORT}"
            raise ModelUnusable(told + written) from error
        raise ModelUnusable(why_not_loaded(error) + written) from error


def _is_newer(version: str, here: str) -> bool:
    """Whether a version is newer than another, to the second number."""
    numbers = [[int(part) for part in re.findall(r"\d+", text)[:2]] for text in (version, here)]
    return numbers[0] > numbers[1]


def _by_registered_names(custom: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Add the names that a file has for classes of ``register_keras_serializable``: with a package before them."""
    if not custom:
        return {}
    registered = [f"Custom>{name}" for name in custom]
    if path.endswith(".keras"):
        with zipfile.ZipFile(path) as archive:
            registered += re.findall(r'"registered_name": "([^">]+>[^"]+)"', archive.read("config.json").decode())
    own = {name: custom[name.rpartition(">")[2]] for name in registered if name.rpartition(">")[2] in custom}
    return {**own, **custom}


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


def keras_model(model: Any, use: Use) -> Model:
    """Return a function of arrays, traced once for any number of rows."""
    import tensorflow as tf

    given, returned = (_flat(getattr(model, name, None)) for name in ("inputs", "outputs"))
    if not given or not returned:
        raise ModelUnusable(f"a {type(model).__name__} does not say what it takes: {_EXPORT}")
    structure = _structure(model, "input", given)
    inputs = tuple(map(functools.partial(tensor_of, "input"), _names(structure, [t.name for t in given]), given))
    part, outputs = _asked(model, returned, use, inputs)

    def call(*tensors: Any) -> Any:
        return tf.nest.flatten(part(tf.nest.pack_sequence_as(structure, list(tensors)), training=False))

    traced = Traced(call, [tf.TensorSpec(t.shape, t.dtype) for t in given])
    wanted = [index for index, tensor in enumerate(outputs) if not use.outputs or tensor.name in use.outputs]

    def apply(arrays: Sequence[Array]) -> list[Array]:
        results = traced(*(constant(a, t) for t, a in zip(inputs, arrays, strict=True)))
        return [results[index].numpy() for index in wanted]

    return Model(Signature(inputs, tuple(outputs[index] for index in wanted)), apply)


def _asked(model: Any, returned: list[Any], use: Use, inputs: Sequence[Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the part of a model that gives what is asked for, and what that is."""
    unknown = [name for name in use.inputs if name not in {tensor.name for tensor in inputs}]
    if unknown:
        names = [tensor.name for tensor in inputs]
        raise ModelUnusable(f"it has no input {unknown[0]!r}{near(unknown[0], names)}. It takes {described(inputs)}")
    if use.layer is not None:
        return _up_to(model, [_layer(model, use.layer)])
    outputs = tuple(map(functools.partial(tensor_of, "output"), _output_names(model, returned), returned))
    names = [tensor.name for tensor in outputs]
    if all(name in names for name in use.outputs):
        return model, outputs
    layers = {layer.name: layer for layer in model.layers}
    for name in use.outputs:
        if name not in layers:
            raise ModelUnusable(
                f"it has no output and no layer {name!r}{near(name, [*names, *layers])}. It gives "
                f"{described(outputs)}; its layers are {', '.join(layers)}"
            )
    return _up_to(model, [layers[name] for name in use.outputs])


def _layer(model: Any, wanted: str | int) -> Any:
    layers = list(model.layers)
    if isinstance(wanted, int):
        if not -len(layers) <= wanted < len(layers):
            raise ModelUnusable(f"it has {len(layers)} layers, and none at {wanted}")
        return layers[wanted]
    for layer in layers:
        if layer.name == wanted:
            return layer
    names = [layer.name for layer in layers]
    inside = [layer.name for layer in layers if wanted in {inner.name for inner in getattr(layer, "layers", ())}]
    held = f"; it is inside its layer {inside[0]!r}: give that model instead" if inside else near(wanted, names)
    raise ModelUnusable(f"it has no layer {wanted!r}{held}. Its layers are {', '.join(names)}")


def _up_to(model: Any, layers: list[Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the model that ends with these layers."""
    keras = importlib.import_module(type(model).__module__.partition(".")[0])
    if keras.__name__ not in ("keras", "tf_keras"):
        keras = importlib.import_module("keras")
    ends: list[Any] = []
    outputs: list[Tensor] = []
    for layer in layers:
        try:
            end = layer.output
        except (AttributeError, ValueError):
            raise ModelUnusable(f"its layer {layer.name!r} is used several times or never: take another one") from None
        flat = _flat(end)
        names = [layer.name] if len(flat) == 1 else [f"{layer.name}_{index}" for index in range(len(flat))]
        ends += flat
        outputs += map(functools.partial(tensor_of, "output"), names, flat)
    return keras.Model(model.inputs, ends), tuple(outputs)


def _flat(tensors: Any) -> list[Any]:
    import tensorflow as tf

    return [] if tensors is None else list(tf.nest.flatten(tensors))


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
