"""Convert a classifier's outputs to the columns that Spark ML's evaluators need.

::

    the model's last layer     rawPrediction             probability         prediction
    n probabilities (softmax)  their logarithms          unchanged           index of the largest
    n logits                   unchanged                 their softmax       index of the largest
    1 probability p (sigmoid)  (-margin, margin)         (1 - p, p)          1 where p > 0.5, else 0
    1 logit                    (-margin, margin)         (1 - p, p)          1 where p > 0.5, else 0

The margin is the logit, ``log(p / (1 - p))``. The columns and their meaning are those of Spark ML's
``ProbabilisticClassificationModel``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfos_nb.runtime.models.signature import ModelUnusable, Tensor, described
from tfos_nb.runtime.rows.ragged import Output, Ragged

__all__ = ["ClassifierOutput", "Task"]

Array = np.ndarray[Any, Any]

_LEAST = 1e-30  # probabilities are raised to this, so that their logarithm is finite


class Task(str, enum.Enum):
    """Kind of prediction that an output makes."""

    CLASSES = "classes"
    """One of several classes: the output has one number per class."""
    BINARY = "binary"
    """One of two classes: the output is one number."""
    VALUES = "values"
    """No classes: the output's numbers are the prediction."""


@dataclass(frozen=True)
class ClassifierOutput:
    """Conversion of one output of a model to Spark ML's columns.

    Parameters
    ----------
    task : Task
        Kind of prediction.
    logits : bool
        Whether the output is logits, not probabilities.

    Examples
    --------
    >>> raw, probability, prediction = ClassifierOutput(Task.BINARY).columns(np.array([[0.2], [0.9]]))
    >>> probability.tolist(), prediction.tolist()
    ([[0.8, 0.2], [0.09999999999999998, 0.9]], [0.0, 1.0])
    """

    task: Task
    logits: bool = False

    def signature(self, output: Tensor) -> tuple[Tensor, ...]:
        """Return the names, types and shapes of the columns that replace an output.

        They are ``rawPrediction``, ``probability`` and ``prediction``; only the last for :attr:`Task.VALUES`.

        Raises
        ------
        ModelUnusable
            If the output's shape is not that of a classifier of this kind.
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
        """Return the values of the columns of :meth:`signature`, each of type float64 with one entry per row."""
        if isinstance(given, Ragged):  # signature() accepts a ragged output only as Task.VALUES
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
