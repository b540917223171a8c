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
    return _with_classifier_outputs(model, use.classifier_outputs) if use.classifier_outputs else model


def _with_classifier_outputs(model: Model, conversions: Sequence[ClassifierOutput]) -> Model:
    """Return a model whose outputs are converted to Spark ML's columns.

    If the model has several outputs, ``_`` and the output's name are appended to the name of each column.

    Parameters
    ----------
    model : Model
        The model.
    conversions : sequence of ClassifierOutput
        One for each output, in their order; or one for all of them.

    Raises
    ------
    ModelUnusable
        If the number of conversions is wrong, or an output has a shape that its conversion does not accept.
    """
    outputs = model.signature.outputs
    conversions = tuple(conversions) * len(outputs) if len(conversions) == 1 else tuple(conversions)
    if len(conversions) != len(outputs):
        raise ModelUnusable(
            f"it has {len(outputs)} outputs, {described(outputs)}, and was trained with {len(conversions)}"
        )
    tensors: list[Tensor] = []
    for conversion, output in zip(conversions, outputs, strict=True):
        behind = f"_{output.name}" if len(outputs) > 1 else ""
        tensors += [dataclasses.replace(t, name=f"{t.name}{behind}") for t in conversion.signature(output)]
    signature = Signature(model.signature.inputs, tuple(tensors))
    return Model(signature, functools.partial(_converted, model, conversions), model.close)


def _converted(model: Model, conversions: Sequence[ClassifierOutput], arrays: Sequence[Array]) -> list[Output]:
    results = zip(conversions, model.apply(arrays), strict=True)
    return [column for conversion, output in results for column in conversion.columns(output)]
