"""Load Keras models as functions of arrays: the whole model, or the part up to a layer."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfos_nb.errors import near
from tfos_nb.runtime.code import custom_objects
from tfos_nb.runtime.models.model import Model, Traced, Use, constant, why_not_loaded
from tfos_nb.runtime.models.signature import ModelUnusable, Signature, Tensor, described, tensor_of
from tfos_nb.runtime.rows.nested import flattened, leaves, names_of, packed
from tfos_nb.runtime.rows.ragged import Output, dense_or_ragged, fetched

__all__ = [
    "by_registered_names",
    "keras_model",
    "load_keras",
    "named_inputs",
    "named_outputs",
    "read_keras",
    "structure_of",
]

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
    """Return the Keras model of a file, read with Keras 3, or with tf_keras if Keras 2 wrote the file.

    Raises
    ------
    ModelUnusable
        If the file is damaged, has only weights, or Keras cannot read it.
    """
    try:
        version = _keras_version(path)
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise ModelUnusable(f"the file is damaged or incomplete ({error}): copy it again, or save it again") from error
    flavour = "tf_keras" if version.startswith("2.") and importlib.util.find_spec("tf_keras") else "keras"
    keras = importlib.import_module(flavour)
    custom = by_registered_names(custom_objects.unpack(use.code).custom_objects, path)
    try:
        # safe_mode refuses Python code in the file. A trusted file was made from an object in the user's own session.
        return keras.models.load_model(path, compile=False, custom_objects=custom or None, safe_mode=not use.trusted)
    except Exception as error:
        written = f" (written by Keras {version or 'of unknown version'}, read by {flavour} {keras.__version__})"
        if _is_newer(version, keras.__version__):
            told = f"it is of a newer Keras than the executors have: install that version there, or {_EXPORT}"
            raise ModelUnusable(told + written) from error
        raise ModelUnusable(why_not_loaded(error) + written) from error


def _is_newer(version: str, here: str) -> bool:
    """Return whether a version is newer than another, comparing only the major and minor number."""
    numbers = [[int(part) for part in re.findall(r"\d+", text)[:2]] for text in (version, here)]
    return numbers[0] > numbers[1]


def by_registered_names(custom: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return custom objects also by their registered names, as Keras looks them up when it reads a file.

    ``keras.saving.register_keras_serializable`` registers a class as ``PACKAGE>NAME``, by default ``Custom>NAME``. The
    packages are read from a ``.keras`` file's configuration.
    """
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
            raise ModelUnusable(
                "it contains only weights, not a model: save the whole model with model.save(PATH.keras)"
            )
        version = file.attrs.get("keras_version", "")
    return version.decode() if isinstance(version, bytes) else str(version)


def keras_model(model: Any, use: Use) -> Model:
    """Return a Keras model as a function of arrays, traced once for any number of rows.

    Raises
    ------
    ModelUnusable
        If the model does not describe its inputs, or has no input, layer or output of a name in ``use``.
    """
    import tensorflow as tf

    given = named_inputs(model)
    if not given or not named_outputs(model):
        raise ModelUnusable(f"a {type(model).__name__} does not describe its inputs: {_EXPORT}")
    structure = structure_of(model, "input")
    inputs = tuple(tensor_of("input", name, tensor) for name, tensor in given)
    part, returned = _asked(model, use, inputs)

    def call(*tensors: Any) -> Any:
        results = flattened(part(packed(structure, tensors), training=False))
        return [dense_or_ragged(result) for result in results]

    traced = Traced(call, [tf.TensorSpec(t.shape, t.dtype) for _, t in given])
    outputs = _described_outputs(traced, returned)
    wanted = [index for index, tensor in enumerate(outputs) if not use.outputs or tensor.name in use.outputs]

    def apply(arrays: Sequence[Array]) -> list[Output]:
        results = traced(*(constant(a, t) for t, a in zip(inputs, arrays, strict=True)))
        return [fetched(results[index]) for index in wanted]

    return Model(Signature(inputs, tuple(outputs[index] for index in wanted)), apply)


def _described_outputs(traced: Traced, returned: Sequence[tuple[str, Any]]) -> list[Tensor]:
    """Return the names, types and shapes of a model's outputs.

    Only the traced function shows whether an output is sparse or ragged. Keras reports ``x * 100.0`` as sparse, because
    a number has no attribute ``sparse`` (``keras.ops.Multiply.compute_output_spec``).
    """
    import tensorflow as tf

    dense = [_dense(name, tensor) for name, tensor in returned]
    try:
        specs = traced.outputs()
    except Exception as error:
        raise ModelUnusable(f"it cannot be applied: {why_not_loaded(error)}") from error
    return [
        tensor_of("output", tensor.name, spec) if isinstance(spec, tf.RaggedTensorSpec) else tensor
        for tensor, spec in zip(dense, specs, strict=True)
    ]


def _dense(name: str, tensor: Any) -> Tensor:
    import tensorflow as tf

    return tensor_of("output", name, tf.TensorSpec(tensor.shape, tensor.dtype))


def _asked(model: Any, use: Use, inputs: Sequence[Tensor]) -> tuple[Any, list[tuple[str, Any]]]:
    """Return the model, or the part of it that ends with the requested layers, and its outputs by name.

    Raises
    ------
    ModelUnusable
        If it has no such input, output or layer.
    """
    unknown = [name for name in use.inputs if name not in {tensor.name for tensor in inputs}]
    if unknown:
        names = [tensor.name for tensor in inputs]
        raise ModelUnusable(f"it has no input {unknown[0]!r}{near(unknown[0], names)}. It takes {described(inputs)}")
    if use.layer is not None:
        return _up_to(model, [_layer(model, use.layer)])
    outputs = named_outputs(model)
    names = [name for name, _ in outputs]
    if all(name in names for name in use.outputs):
        return model, outputs
    layers = {layer.name: layer for layer in model.layers}
    for name in use.outputs:
        if name not in layers:
            raise ModelUnusable(
                f"it has no output and no layer {name!r}{near(name, [*names, *layers])}. It gives "
                f"{described(_dense(name, t) for name, t in outputs)}; its layers are {', '.join(layers)}"
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


def _up_to(model: Any, layers: list[Any]) -> tuple[Any, list[tuple[str, Any]]]:
    """Return the model that ends with these layers, and the names and tensors of its outputs.

    Raises
    ------
    ModelUnusable
        If a layer is used several times or never, so that it has no single output.
    """
    keras = importlib.import_module(type(model).__module__.partition(".")[0])
    if keras.__name__ not in ("keras", "tf_keras"):
        keras = importlib.import_module("keras")
    ends: list[tuple[str, Any]] = []
    for layer in layers:
        try:
            end = layer.output
        except (AttributeError, ValueError):
            raise ModelUnusable(f"its layer {layer.name!r} is used several times or never: use another layer") from None
        flat = flattened(end)
        names = [layer.name] if len(flat) == 1 else [f"{layer.name}_{index}" for index in range(len(flat))]
        ends += zip(names, flat, strict=True)
    return keras.Model(model.inputs, [tensor for _, tensor in ends]), ends


def structure_of(model: Any, name: str) -> Any:
    """Return the nested structure of a model's inputs or outputs.

    Parameters
    ----------
    model : keras.Model
        A Sequential without this attribute has one tensor, which is returned itself.
    name : {"input", "output"}
        Attribute of the model.
    """
    flat = _listed(model, f"{name}s")
    try:
        found = getattr(model, name)
    except (AttributeError, ValueError):
        found = flat
    if len(flattened(found)) != len(flat):  # a user's class may define the attribute differently
        found = flat
    return found[0] if len(flat) == 1 and isinstance(found, list) else found


def named_inputs(model: Any) -> list[tuple[str, Any]]:
    """Return the names and tensors of a model's inputs; none if the model does not describe them.

    An input in a dictionary is named by its keys. Another input is named by its ``InputLayer``, as in the model's file.
    """
    flat = _listed(model, "inputs")
    first = [layer for layer in (model.layers if flat else ()) if type(layer).__name__ == "InputLayer"]
    layers = {id(layer.output): layer.name for layer in first}
    return _named(model, "input", [layers.get(id(tensor), getattr(tensor, "name", "")) for tensor in flat])


def named_outputs(model: Any) -> list[tuple[str, Any]]:
    """Return the names and tensors of a model's outputs; none if the model does not describe them.

    An output in a dictionary is named by its keys. Another output is named by its layer.
    """
    flat = _listed(model, "outputs")
    # The tensors' names are not used: they contain a counter of the process, so they differ between processes.
    own = getattr(model, "output_names", None) or [f"output_{index}" for index in range(len(flat))]
    return _named(model, "output", own)


def _listed(model: Any, name: str) -> list[Any]:
    try:
        found = getattr(model, name)
    except (AttributeError, ValueError):  # a Sequential that is not built, or a subclass of Model without a graph
        return []
    return [] if found is None else flattened(found)


def _named(model: Any, name: str, own: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the names and tensors of a model's inputs or outputs, in the order of :func:`leaves`.

    ``own`` has the names of those that are in no dictionary, in the order of the model's ``inputs`` or ``outputs``.
    """
    flat = _listed(model, f"{name}s")
    if not flat:
        return []
    found = leaves(structure_of(model, name))
    places = {id(tensor): place for place, tensor in reversed(list(enumerate(flat)))}
    otherwise = [own[places.get(id(tensor), index)] for index, (_, tensor) in enumerate(found)]
    names = names_of([path for path, _ in found], otherwise)
    return [(label, tensor) for label, (_, tensor) in zip(names, found, strict=True)]
