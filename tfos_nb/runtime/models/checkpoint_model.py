"""Load models from a directory of checkpoints.

::

    model.ckpt-100.meta + .index + .data   TensorFlow 1: the graph is in the .meta file; outputs are named tensors
    ckpt-3.index + .data                   tf.train.Checkpoint: the model comes from the model function,
    last.weights.h5                        or from a .keras file in the same directory
    last.keras                             the whole model
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tfos_nb.runtime.code import custom_objects
from tfos_nb.runtime.models.keras_model import keras_model, read_keras
from tfos_nb.runtime.models.model import Model, Use, why_not_loaded
from tfos_nb.runtime.models.saved_model import graph_model, new_session
from tfos_nb.runtime.models.signature import ModelUnusable

__all__ = ["files_of", "load_checkpoint"]

_WHOLE = re.compile(r"(?<!\.weights)\.(keras|h5|hdf5)$")
_WEIGHTS = re.compile(r"\.weights\.h5$")
_LATEST = re.compile(r'^model_checkpoint_path:\s*"(.*)"', re.MULTILINE)


def files_of(path: str) -> list[str]:
    """Return the names of the files of the newest checkpoint in a directory, and of its newest whole-model file."""
    names = sorted(os.listdir(path))
    prefix = _newest_prefix(path, names)
    files = [] if prefix is None else [name for name in names if name.rpartition(".")[0] == prefix]
    weights = _newest(path, filter(_WEIGHTS.search, names)) if prefix is None else None
    whole = _newest(path, filter(_WHOLE.search, names))
    return [*files, *(name for name in (weights, whole) if name is not None)]


def _newest_prefix(path: str, names: Sequence[str]) -> str | None:
    """Return the common prefix of the newest checkpoint's files; None if there is no ``.index`` file.

    TensorFlow writes this prefix into the file ``checkpoint``. Without that file, the newest ``.index`` file counts.
    """
    there = [name for name in names if name.endswith(".index")]
    if "checkpoint" in names:
        with open(os.path.join(path, "checkpoint"), encoding="utf-8", errors="replace") as file:
            noted = _LATEST.search(file.read())
        prefix = os.path.basename(noted[1]) if noted else ""
        if f"{prefix}.index" in there:
            return prefix
    newest = _newest(path, there)
    return newest.removesuffix(".index") if newest is not None else None


def _newest(path: str, names: Iterable[str]) -> str | None:
    # Files with the same modification time are ordered by the numbers in their names.
    return max(names, key=lambda name: (os.path.getmtime(os.path.join(path, name)), _numbers(name)), default=None)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def load_checkpoint(path: str, use: Use) -> Model:
    """Load the newest checkpoint of a directory.

    Raises
    ------
    ModelUnusable
        If the checkpoint has only weights and there is no model for them, or if the weights do not fit the model.
    """
    names = files_of(path)
    prefix = next((name.removesuffix(".index") for name in names if name.endswith(".index")), None)
    if prefix is not None and f"{prefix}.meta" in names:
        return _graph(os.path.join(path, prefix), use)
    weights = next((name for name in names if _WEIGHTS.search(name)), None)
    whole = next((name for name in names if _WHOLE.search(name)), None)
    built = custom_objects.unpack(use.code)
    if built.function is None:
        if whole is None:
            what = f"the checkpoint {prefix}" if prefix else str(weights)
            raise ModelUnusable(
                f"{what} contains only weights: give the function that builds the model, model_fn=…, or put a "
                ".keras file of the model beside it"
            )
        model = read_keras(os.path.join(path, whole), use)
    else:
        model = _built(built)
    try:
        if prefix is not None:
            _restore(model, os.path.join(path, prefix))
        elif weights is not None:
            model.load_weights(os.path.join(path, weights))
    except ModelUnusable:
        raise
    except Exception as error:
        raise ModelUnusable(f"{prefix or weights} does not fit the model: {why_not_loaded(error)}") from error
    return keras_model(model, use)


def _graph(prefix: str, use: Use) -> Model:
    """Load a checkpoint of TensorFlow 1 into the graph of its ``.meta`` file."""
    import tensorflow as tf

    session = new_session()
    with session.graph.as_default():
        saver = tf.compat.v1.train.import_meta_graph(f"{prefix}.meta", clear_devices=True)
        if saver is None:
            raise ModelUnusable(f"{os.path.basename(prefix)}.meta has no variables in it")
        saver.restore(session, prefix)
        tables = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS)
        if tables:
            session.run(tables)
    return graph_model(session, {}, use, f"Its graph: {_outline(session.graph)}")


def _outline(graph: Any) -> str:
    shown = [op.name for op in graph.get_operations() if "save" not in op.name and op.type not in ("Const", "NoOp")]
    return ", ".join(shown[:40]) + ", …" * (len(shown) > 40)


def _built(built: custom_objects.ModelCode) -> Any:
    assert built.function is not None
    name = getattr(built.function, "__name__", type(built.function).__name__)
    try:
        model = built.function(*built.args)
    except Exception as error:
        raise ModelUnusable(f"{name}() failed: {type(error).__name__}: {error}") from error
    if not hasattr(model, "load_weights"):
        raise ModelUnusable(f"{name}() must return a Keras model, got a {type(model).__name__}")
    if not getattr(model, "built", True):
        raise ModelUnusable(f"{name}() returned a model without inputs: begin the model with keras.Input")
    return model


def _restore(model: Any, prefix: str) -> None:
    """Restore a tf.train.Checkpoint into a model, whatever attribute of the checkpoint holds the model.

    Raises
    ------
    ModelUnusable
        If no attribute has values for all variables of the model.
    """
    import tensorflow as tf

    keys = [name for name, _ in tf.train.list_variables(prefix) if name != "_CHECKPOINTABLE_OBJECT_GRAPH"]
    heads = sorted({key.partition("/")[0] for key in keys} - {"save_counter", "optimizer", "step", "epoch"})
    before = [variable.numpy() for variable in model.weights]
    mistake: Exception | None = None
    # The model may be the root or an attribute of it: Checkpoint(model), Checkpoint(model=model), Checkpoint(net=model)
    for head in (None, *heads):
        root = tf.train.Checkpoint(model) if head is None else tf.train.Checkpoint(**{head: model})
        try:
            root.restore(prefix).assert_existing_objects_matched().expect_partial()
        except (AssertionError, ValueError) as error:
            mistake = mistake or error
            for variable, value in zip(model.weights, before, strict=True):
                variable.assign(value)
            continue
        return
    told = str(mistake).strip().splitlines()[0][:300] if mistake is not None else ""
    raise ModelUnusable(f"the variables of checkpoint {os.path.basename(prefix)} are not those of the model: {told}")
