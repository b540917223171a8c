"""Choose the reader for each kind of model file.

::

    .keras, .h5                      by Keras 3, or by tf_keras if Keras 2 wrote it  keras_model.py
    directory with saved_model.pb    by a signature, or by the names of tensors      saved_model.py
    directory with checkpoints       with a .keras file or the model function        checkpoint_model.py
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfos_nb.runtime.models.checkpoint_model import load_checkpoint
from tfos_nb.runtime.models.classifier_outputs import ClassifierOutput
from tfos_nb.runtime.models.keras_model import load_keras
from tfos_nb.runtime.models.model import WHOLE, Model, Use, check_directory, check_file, is_saved_model
from tfos_nb.runtime.models.saved_model import load_saved_model
from tfos_nb.runtime.models.signature import ModelUnusable, Signature, Tensor, described
from tfos_nb.runtime.rows.ragged import Output

__all__ = ["load"]

Array = np.ndarray[Any, Any]


def load(path: str, use: Use = WHOLE) -> Model:
    """Load a Keras file, a SavedModel or the newest checkpoint of a directory.

    Parameters
    ----------
    path : str
        Local path of the file or directory.
    use : Use
        Part of the model that is used.

    Raises
    ------
    ModelUnusable
        If it is none of them, cannot be read, or does not describe its inputs and outputs.

    Examples
    --------
    >>> model = load("/models/mnist.keras")  # doctest: +SKIP
    >>> [scores] = model.apply([np.zeros((2, 28, 28), "float32")])  # doctest: +SKIP
    >>> scores.shape  # doctest: +SKIP
    (2, 10)
    """
    if not os.path.isdir(path):
        check_file(path)
        model = load_keras(path, use)
    else:
        check_directory(path)
        model = load_saved_model(path, use) if is_saved_model(path) else load_checkpoint(path, use)
    return _with_heads(model, use.heads) if use.heads else model


def _with_heads(model: Model, heads: Sequence[ClassifierOutput]) -> Model:
    """Return a model whose outputs are converted to Spark ML's columns.

    If the model has several outputs, ``_`` and the output's name are appended to the name of each column.

    Parameters
    ----------
    model : Model
        The model.
    heads : sequence of ClassifierOutput
        One for each output, in their order; or one for all of them.

    Raises
    ------
    ModelUnusable
        If the number of heads is wrong, or an output has a shape that its head cannot convert.
    """
    outputs = model.signature.outputs
    heads = tuple(heads) * len(outputs) if len(heads) == 1 else tuple(heads)
    if len(heads) != len(outputs):
        raise ModelUnusable(f"it has {len(outputs)} outputs, {described(outputs)}, and was trained with {len(heads)}")
    tensors: list[Tensor] = []
    for head, output in zip(heads, outputs, strict=True):
        behind = f"_{output.name}" if len(outputs) > 1 else ""
        tensors += [dataclasses.replace(t, name=f"{t.name}{behind}") for t in head.signature(output)]
    signature = Signature(model.signature.inputs, tuple(tensors))
    return Model(signature, functools.partial(_apply, model, heads), model.close)


def _apply(model: Model, heads: Sequence[ClassifierOutput], arrays: Sequence[Array]) -> list[Output]:
    results = zip(heads, model.apply(arrays), strict=True)
    return [column for head, output in results for column in head.columns(output)]
