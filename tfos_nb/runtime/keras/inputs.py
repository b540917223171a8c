"""Refuse columns, layers and losses that cannot be used with a dataset, before the first step, by their names.

TensorFlow's own errors name neither the column nor the layer: ``Cast string to float is not supported`` for labels that
are text, ``Incompatible shapes: [19,1] vs. [37,1]`` for a layer that keeps states of a fixed number of rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tfos_nb.errors import PlanError
from tfos_nb.runtime.keras.replicas.replica import is_synchronous
from tfos_nb.runtime.keras.replicas.rows_needed import is_of_keras

__all__ = ["columns_of", "explained", "named", "refuse_states_of_rows", "refuse_text"]

_COLUMNS = "_tfos_nb_columns"
_OF_KERAS = ("train_step", "test_step", "compute_loss")
_SAME_ELEMENTS = ("_PrefetchDataset", "_OptionsDataset", "_FilterDataset", "LaterDataset")


def named(dataset: Any, x: Any, y: Any) -> Any:
    """Mark a dataset with the columns that its ``x`` and ``y`` are; return the dataset."""
    setattr(dataset, _COLUMNS, (x, y))
    return dataset


def columns_of(dataset: Any) -> tuple[Any, Any]:
    """Return the columns of a dataset of fed rows; None where they are not known, as after the program's ``map``."""
    while (columns := getattr(dataset, _COLUMNS, None)) is None:
        inputs = list(dataset._inputs()) if hasattr(dataset, "_inputs") else []
        if type(dataset).__name__ not in _SAME_ELEMENTS or len(inputs) != 1:
            return None, None
        dataset = inputs[0]
    x, y = columns
    return x, y


def refuse_text(model: Any, element: Any, columns: tuple[Any, Any] = (None, None)) -> None:
    """Refuse text for an input of a model that takes numbers, and as labels of a loss.

    Parameters
    ----------
    model : keras.Model
        A model that may not be built yet.
    element : structure of TypeSpec
        The elements of its dataset.
    columns : tuple, optional
        The columns of ``x`` and ``y``.

    Raises
    ------
    PlanError
        If text is given. The message names the column, or the input.
    """
    if not all(is_of_keras(getattr(type(model), name)) for name in _OF_KERAS):
        return  # the program may make numbers of it
    parts = [*element, None] if isinstance(element, (list, tuple)) else [element, None]
    x, y = parts[0], parts[1]
    for name, text, wanted in _fed(model, x):
        if _is_text(text) and not _is_text(wanted):
            column = columns[0] if isinstance(columns[0], str) else name if isinstance(columns[0], list) else None
            raise PlanError(
                f"{_thing(column, 'x')} must hold numbers, because the model's input {wanted.name!r} has dtype "
                f"{wanted.dtype}, got text. {_as_numbers(column)}, or give the model an input of dtype 'string'"
            )
    for key, text in _labels(model, y):
        if _is_text(text):
            column = columns[1] if isinstance(columns[1], str) else key
            loss = getattr(model.loss, "name", model.loss) if not isinstance(model.loss, Mapping) else model.loss[key]
            raise PlanError(
                f"{_thing(column, 'y')} must hold numbers, because the loss {loss!r} compares it with the model's "
                f"output, got text. {_as_numbers(column)}"
            )


def _fed(model: Any, x: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the name or place, and the kind, of each part of ``x``, and the input that takes it, as far as known."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return
    if isinstance(x, Mapping):
        struct = getattr(model, "_inputs_struct", None)
        by_name = struct if isinstance(struct, Mapping) else {one.name: one for one in inputs}
        yield from ((name, x[name], one) for name, one in by_name.items() if name in x)
    else:
        parts = list(x) if isinstance(x, (list, tuple)) else [x]
        if len(parts) == len(inputs):
            yield from zip(range(len(parts)), parts, inputs, strict=True)


def _labels(model: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the name and the kind of each label that a loss of ``compile`` gets."""
    if isinstance(y, Mapping):
        losses = model.loss if isinstance(model.loss, Mapping) else dict.fromkeys(y, model.loss)
        yield from ((name, part) for name, part in y.items() if losses.get(name) is not None)
    elif model.loss is not None and not isinstance(y, (list, tuple)):
        yield None, y


def _is_text(tensor: Any) -> bool:
    """Return whether a TypeSpec, or a KerasTensor, is of text; a strategy has one spec for each of its devices."""
    spec = tensor._value_specs[0] if hasattr(tensor, "_value_specs") else tensor
    dtype = getattr(spec, "dtype", None)
    return getattr(dtype, "name", dtype) == "string"


def _thing(column: Any, part: str) -> str:
    return f"column {column!r}, which is {part}," if isinstance(column, str) else part


def _as_numbers(column: Any) -> str:
    which = repr(column) if isinstance(column, str) else "the column"
    return f"Make numbers of {which}: StringIndexer in Spark, or keras.layers.StringLookup in dataset.map(…)"


def refuse_states_of_rows(model: Any) -> None:
    """Refuse layers that keep a state of each row of a batch, if several replicas have parts of a batch.

    Raises
    ------
    PlanError
        If one exists. The message names it.
    """
    if not is_synchronous(model.distribute_strategy):
        return
    replicas = model.distribute_strategy.num_replicas_in_sync
    for layer in _layers_of(model):
        if getattr(layer, "stateful", False):
            raise PlanError(
                f"layer {layer.name!r} must not be stateful under {replicas} replicas, got stateful=True: it keeps a "
                "state for each row of a batch, and each replica has only a part of the rows. Leave out stateful=True "
                "and the fixed batch size, or train with one worker"
            )


@contextlib.contextmanager
def explained(model: Any) -> Iterator[None]:
    """Name the input with a fixed number of rows, if there is one, where a step of several replicas fails.

    Raises
    ------
    PlanError
        Instead of TensorFlow's error, which is its cause.
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        fixed = [one for one in getattr(model, "inputs", None) or () if one.shape and one.shape[0] is not None]
        if not fixed:
            raise
        raise PlanError(
            f"input {fixed[0].name!r} must not have a fixed batch size where the model computes with it, got "
            f"{fixed[0].shape[0]} rows: {model.distribute_strategy.num_replicas_in_sync} replicas train on parts of a "
            f"batch. Use keras.Input(shape={tuple(fixed[0].shape[1:])}) instead of batch_shape, and -1 or "
            "keras.ops.shape(x)[0] for the rows"
        ) from error


def _layers_of(model: Any) -> Iterator[Any]:
    for layer in getattr(model, "layers", ()):
        yield layer
        yield from _layers_of(layer)
