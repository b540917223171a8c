"""What a classifier gives, in the columns that Spark ML's evaluators ask for.

::

    the model's last layer     rawPrediction             probability         prediction
    n probabilities (softmax)  their logarithms          as they are         the place of the largest
    n logits                   as they are               their softmax       the place of the largest
    1 probability (sigmoid)    (-margin, margin)         (1 - p, p)          1 where p > 0.5
    1 logit                    (-margin, margin)         (1 - p, p)          1 where p > 0.5
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfos_nb.runtime.models import Model, ModelUnusable, Signature, Tensor, described

__all__ = ["Head", "Task", "with_head"]

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
class Head:
    """How a model's only output is to be read.

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

    def columns(self, given: Array) -> list[Array]:
        """Return the values of what :meth:`signature` names."""
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


def with_head(model: Model, head: Head) -> Model:
    """Return a model that gives a head's columns.

    Raises
    ------
    ModelUnusable
        If the model's output is none that the head reads.
    """
    if len(model.signature.outputs) != 1:
        raise ModelUnusable(f"it gives several things, {described(model.signature.outputs)}: use TFModel")
    signature = Signature(model.signature.inputs, head.signature(model.signature.outputs[0]))
    return Model(signature, functools.partial(_apply, model, head), model.close)


def _apply(model: Model, head: Head, arrays: Sequence[Array]) -> list[Array]:
    return head.columns(model.apply(arrays)[0])
