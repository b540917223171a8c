"""Load SavedModels as functions of arrays: by a signature, or by the names of any tensors in the graph.

A requested name is looked up in the signature first. If it is not found there and no signature was named, it is looked
up in the graph, as in TensorFlow 1: ``dense/Softmax:0``, ``dense/Softmax``, or the name of a tensor in any signature. A
graph is run in a session, which can load SavedModels of TensorFlow 1 and 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfos_nb.errors import near
from tfos_nb.runtime.models.model import SERVING, Model, Use, constant, why_not_loaded
from tfos_nb.runtime.models.signature import ModelUnusable, Signature, tensor_of
from tfos_nb.runtime.rows.ragged import Output, dense_or_ragged, fetched

__all__ = ["graph_model", "load_saved_model", "new_session"]

Array = np.ndarray[Any, Any]

_INIT = "__saved_model_"


def load_saved_model(path: str, use: Use) -> Model:
    """Load a SavedModel.

    Raises
    ------
    ModelUnusable
        If it cannot be read, or has no such tags, signature or tensors.
    """
    if use.layer is not None:
        raise ModelUnusable("a SavedModel has no layers: give the .keras file, or name a tensor of the graph as output")
    graph = _graph_of(path, use.tags)
    signatures = {key: value for key, value in graph.signature_def.items() if not key.startswith(_INIT)}
    key = _key_of(signatures, use)
    try:
        if key is None or _unknown(use, signatures[key]):
            return _by_tensors(path, graph, signatures, use)
        return _by_signature(path, graph, key, use)
    except ModelUnusable:
        raise
    except Exception as error:
        written = f" (written by TensorFlow {graph.meta_info_def.tensorflow_version or 'of unknown version'})"
        # The path may be that of a temporary copy, which tells the user nothing.
        told = why_not_loaded(error).replace(path.rstrip(os.sep) + os.sep, "")
        raise ModelUnusable(told + written) from error


def _graph_of(path: str, wanted: Sequence[str]) -> Any:
    """Return the ``MetaGraphDef`` with these tags; of no tags, ``serve`` or the only graph."""
    from tensorflow.core.protobuf import saved_model_pb2

    file = os.path.join(path, "saved_model.pb")
    if not os.path.exists(file):
        raise ModelUnusable("its saved_model is in text form (.pbtxt): write it in binary form")
    proto = saved_model_pb2.SavedModel()
    try:
        with open(file, "rb") as stream:
            proto.ParseFromString(stream.read())
    except Exception as error:
        raise ModelUnusable(f"its saved_model.pb cannot be read: {error}") from error
    graphs = {tuple(sorted(graph.meta_info_def.tags)): graph for graph in proto.meta_graphs}
    tags = tuple(sorted(wanted)) or ("serve",)
    if tags not in graphs and not wanted and len(graphs) == 1:
        tags = next(iter(graphs))
    if tags not in graphs:
        there = " | ".join(",".join(known) or "none" for known in graphs)
        raise ModelUnusable(f"it has no graph with the tags {','.join(tags)} (it has: {there})")
    return graphs[tags]


def _key_of(signatures: Mapping[str, Any], use: Use) -> str | None:
    """Return the key of the signature; None if the outputs must be looked up in the graph.

    Raises
    ------
    ModelUnusable
        If there is no such signature, or a named signature does not have all inputs and outputs of ``use``.
    """
    keys = sorted(signatures)
    if use.signature is None and SERVING not in keys and len(keys) != 1 and use.outputs:
        return None
    key = use.signature or (keys[0] if SERVING not in keys and len(keys) == 1 else SERVING)
    if key not in keys:
        there = ", ".join(keys) or "none"
        raise ModelUnusable(
            f"it has no signature {key!r}{near(key, keys)} (it has: {there}): "
            + ("name one of them" if keys else "model.export(DIRECTORY) makes one, or name tensors of its graph")
        )
    unknown = _unknown(use, signatures[key])
    if unknown and use.signature is not None:
        names = [*signatures[key].inputs, *signatures[key].outputs]
        raise ModelUnusable(
            f"its signature {key!r} has no {unknown[0]!r}{near(unknown[0], names)}. {_told(signatures[key])}"
        )
    return key


def _unknown(use: Use, signature: Any) -> list[str]:
    unknown = [name for name in use.inputs if name not in signature.inputs]
    return unknown + [name for name in use.outputs if name not in signature.outputs]


def _told(signature: Any) -> str:
    return f"It takes {_listed(signature.inputs)} and gives {_listed(signature.outputs)}"


def _listed(tensors: Mapping[str, Any]) -> str:
    import tensorflow as tf

    return ", ".join(f"{name} ({tf.as_dtype(info.dtype).name})" for name, info in sorted(tensors.items())) or "nothing"


# --- by signature -------------------------------------------------------------------------------------------------


def _by_signature(path: str, graph: Any, key: str, use: Use) -> Model:
    import tensorflow as tf

    loaded = tf.saved_model.load(path, list(graph.meta_info_def.tags))
    function = loaded.signatures[key]
    # A signature of TensorFlow 1 has no structured inputs, only keywords.
    given = function.structured_input_signature[1] or _arguments(function)
    returned = function.structured_outputs
    inputs, outputs = sorted(given), [name for name in sorted(returned) if not use.outputs or name in use.outputs]
    signature = Signature(
        tuple(tensor_of("input", name, given[name]) for name in inputs),
        tuple(tensor_of("output", name, returned[name]) for name in outputs),
    )

    # The default argument keeps ``loaded`` alive: TensorFlow frees the variables with it.
    def apply(arrays: Sequence[Array], _owner: Any = loaded) -> list[Output]:
        tensors = {t.name: constant(a, t) for t, a in zip(signature.inputs, arrays, strict=True)}
        result = function(**tensors)
        return [fetched(dense_or_ragged(result[name])) for name in outputs]

    return Model(signature, apply)


def _arguments(function: Any) -> dict[str, Any]:
    return dict(zip(function._arg_keywords, function.inputs, strict=False))


# --- by the names of tensors --------------------------------------------------------------------------------------


def _by_tensors(path: str, graph: Any, signatures: Mapping[str, Any], use: Use) -> Model:
    import tensorflow as tf

    session = new_session()
    with session.graph.as_default():
        tf.compat.v1.saved_model.load(session, list(graph.meta_info_def.tags), path)
    serving = signatures.get(SERVING) or next(iter(signatures.values()), None)
    inputs = use.inputs or (tuple(sorted(serving.inputs)) if serving is not None else ())
    aliases = {
        role: {name: info.name for signature in signatures.values() for name, info in getattr(signature, role).items()}
        for role in ("inputs", "outputs")
    }
    told = "; ".join(f"signature {key!r}: {_told(signature)}" for key, signature in sorted(signatures.items()))
    return graph_model(session, {**aliases, "": {}}, Use(inputs=inputs, outputs=use.outputs), told)


def new_session() -> Any:
    """Open a session on an empty graph, with the process' numbers of threads."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=tf.config.threading.get_inter_op_parallelism_threads(),
        allow_soft_placement=True,
    )
    return tf.compat.v1.Session(graph=tf.Graph(), config=config)


def graph_model(session: Any, aliases: Mapping[str, Mapping[str, str]], use: Use, told: str) -> Model:
    """Return a graph of TensorFlow 1 as a function of arrays.

    Parameters
    ----------
    session : tf.compat.v1.Session
        Session of the graph. Its variables must have their values.
    aliases : mapping
        Other names of tensors, in two mappings under ``inputs`` and ``outputs``.
    use : Use
        Names of the inputs and outputs. Without inputs, all placeholders are inputs.
    told : str
        Description of the model at the end of an error message.

    Raises
    ------
    ModelUnusable
        If no output is named, a tensor does not exist, or the outputs need a placeholder that is no input.
    """
    graph = session.graph
    names = use.inputs or tuple(op.name for op in graph.get_operations() if op.type == "Placeholder")
    given = [_find(graph, name, aliases.get("inputs", {}), told) for name in names]
    if not use.outputs:
        raise ModelUnusable(f"name the tensors that it must return; it takes {', '.join(names) or 'nothing'}. {told}")
    returned = [_find(graph, name, aliases.get("outputs", {}), told) for name in use.outputs]
    unfed = _unfed(given, returned)
    if unfed:
        raise ModelUnusable(
            f"{', '.join(use.outputs)} also needs the placeholder {unfed[0]!r}: name a column for "
            f"it as an input. {told}"
        )
    signature = Signature(
        tuple(tensor_of("input", name, tensor) for name, tensor in zip(names, given, strict=True)),
        tuple(tensor_of("output", name, tensor) for name, tensor in zip(use.outputs, returned, strict=True)),
    )
    with graph.as_default():
        run = session.make_callable(returned, feed_list=given)

    def apply(arrays: Sequence[Array]) -> list[Output]:
        return [np.asarray(array) for array in run(*arrays)]

    return Model(signature, apply, session.close)


def _find(graph: Any, name: str, aliases: Mapping[str, str], told: str) -> Any:
    wanted = aliases.get(name, name)
    try:
        return graph.get_tensor_by_name(wanted if ":" in wanted else f"{wanted}:0")
    except (KeyError, ValueError):
        raise ModelUnusable(
            f"it has no tensor {name!r}{near(name, _tensors(graph, aliases))}{'. ' + told if told else ''}"
        ) from None


def _unfed(given: Sequence[Any], returned: Sequence[Any]) -> list[str]:
    """Return the names of the placeholders that the outputs need and that are not among ``given``."""
    fed, seen, waiting = {tensor.name for tensor in given}, set(), list(returned)
    unfed = set()
    while waiting:
        tensor = waiting.pop()
        if tensor.name in fed or tensor.name in seen:
            continue
        seen.add(tensor.name)
        if tensor.op.type == "Placeholder":
            unfed.add(tensor.op.name)
        waiting += tensor.op.inputs
    return sorted(unfed)


def _tensors(graph: Any, aliases: Mapping[str, str]) -> Iterable[str]:
    return [*aliases, *(op.name for op in graph.get_operations())]
