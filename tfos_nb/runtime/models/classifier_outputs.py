"""Convert a classifier's outputs to the columns that Spark ML's evaluators need.

::

    the model's last layer     rawPrediction             probability         prediction
    n probabilities (softmax)  their logarithms          as they are         the place of the largest
    n logits                   as they are               their softmax       the place of the largest
    1 probability (sigmoid)    (-margin, margin)         (1 - p, p)          1 where p > 0.5
    1 logit                    (-margin, margin)         (1 - p, p)          1 where p > 0.5
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfos_nb.runtime.models.model import Model, ModelUnusable, Signature, Tensor, described
from tfos_nb.runtime.rows.ragged import Output, Ragged

__all__ = ["ClassifierOutput", "Task", "with_heads"]

Array = np.ndarray[Any, Any]

_LEAST = 1e-30  # whose logarithm is finite


class Task(str, enum.Enum):
    """What a model is for."""

    CLASSES = "classes"
    """One of several: a number for each."""
    BINARY = "binary"
    """Yes or no: one number."""
    VALUES = "values"
    """Numbers as they are."""


@dataclass(frozen=True)
class ClassifierOutput:
    """How an output of a model is to be read.

    Parameters
    ----------
    task : Task
        What the model is for.
    logits : bool
        Whether it gives logits, not probabilities.
    """

    task: Task
    logits: bool = False

    def signature(self, output: Tensor) -> tuple[Tensor, ...]:
        """Return what is given in place of an output.

        Raises
        ------
        ModelUnusable
            If the output has another shape.
        """
        last = output.shape[0] if len(output.shape) == 1 else 1 if not output.shape else None
        if self.task is Task.VALUES:
            return (Tensor("prediction", "float64", () if last == 1 else output.shape),)
        if last is None or (last == 1) != (self.task is Task.BINARY):
            wanted = "one number a row" if self.task is Task.BINARY else "a number for each of several classes"
            raise ModelUnusable(f"a classifier's output is {wanted}; this model gives {described([output])}")
        size = 2 if self.task is Task.BINARY else last
        pair = Tensor("rawPrediction", "float64", (size,)), Tensor("probability", "float64", (size,))
        return (*pair, Tensor("prediction", "float64", ()))

    def columns(self, given: Output) -> list[Output]:
        """Return the values of what :meth:`signature` names."""
        if isinstance(given, Ragged):  # of which signature() makes values alone
            return [given.astype(np.float64)]
        values = np.asarray(given, np.float64)
        if self.task is Task.VALUES:
            return [values.reshape(len(values)) if values.shape[1:] == (1,) else values]
        raw, probability = self._binary(values.reshape(-1)) if self.task is Task.BINARY else self._classes(values)
        best = (probability[:, 1] > 0.5) if self.task is Task.BINARY else probability.argmax(axis=1)
        return [raw, probability, best.astype(np.float64)]

    def _classes(self, values: Array) -> tuple[Array, Array]:
        if not self.logits:
            return np.log(np.maximum(values, _LEAST)), values
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        return values, powers / powers.sum(axis=1, keepdims=True)

    def _binary(self, values: Array) -> tuple[Array, Array]:
        if self.logits:
            margin, yes = values, 1 / (1 + np.exp(-np.clip(values, -700, 700)))
        else:
            yes = values
            margin = np.log(np.maximum(yes, _LEAST)) - np.log(np.maximum(1 - yes, _LEAST))
        return np.stack([-margin, margin], axis=1), np.stack([1 - yes, yes], axis=1)


def with_heads(model: Model, heads: Sequence[ClassifierOutput]) -> Model:
    """Return a model that gives its heads' columns: of several outputs with the output's name behind each.

    Parameters
    ----------
    model : Model
        Any.
    heads : sequence of ClassifierOutput
        One for each output, in their order; or one for all of them.

    Raises
    ------
    ModelUnusable
        If an output is none that its head reads.
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
