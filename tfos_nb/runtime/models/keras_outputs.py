"""Assign labels, losses, metrics and conversions to the outputs of a Keras model.

Losses, metrics and labels may be given in four forms: one for all outputs, a list in the outputs' order, a dictionary
by their names, or a structure nested like the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfos_nb.errors import PlanError, near
from tfos_nb.runtime.models.classifier_outputs import ClassifierOutput, Task
from tfos_nb.runtime.models.keras_model import named_outputs, structure_of
from tfos_nb.runtime.rows.nested import flattened, leaves, packed

__all__ = ["Label", "Outputs", "is_config", "label_columns", "takes_any_shape"]

Label = str | Sequence[str] | Mapping[str, str]
"""Column of the only label, or the columns of all labels: in the outputs' order, or by the outputs' names."""

_CLASSES = ("categorical", "classes")
_BINARY = ("binary_crossentropy", "binary_focal_crossentropy")


def label_columns(label: Label) -> list[str]:
    """Return the columns of labels without duplicates."""
    if isinstance(label, str):
        return [label]
    return list(dict.fromkeys(label.values() if isinstance(label, Mapping) else label))


def is_config(value: Any) -> bool:
    """Return whether a value is the configuration of a Keras object, and not a dictionary by output."""
    return isinstance(value, Mapping) and "class_name" in value


def takes_any_shape(model: Any) -> bool:
    """Return whether a model is a Sequential without an Input, which is built for the shape of its first batch."""
    return not named_outputs(model) and any(cls.__name__ == "Sequential" for cls in type(model).__mro__)


@dataclass(frozen=True)
class Outputs:
    """Outputs of a model.

    Parameters
    ----------
    names : tuple of str
        In the order of :func:`tfos_nb.runtime.rows.nested.leaves`.
    structure : object
        The model's symbolic output tensors, nested as the model returns them.
    """

    names: tuple[str, ...]
    structure: Any

    @classmethod
    def of(cls, model: Any) -> Outputs:
        """Return the outputs of a Keras model.

        Raises
        ------
        PlanError
            If the model does not describe its outputs.
        """
        found = named_outputs(model)
        if not found:
            raise PlanError(
                f"a {type(model).__name__} does not describe its inputs and outputs: build it with keras.Sequential, "
                "which begins with a keras.Input, or keras.Model(inputs, outputs); or train it with TFEstimator"
            )
        return cls(tuple(name for name, _ in found), structure_of(model, "output"))

    @property
    def shapes(self) -> list[tuple[int | None, ...]]:
        """The outputs' shapes, without the batch axis."""
        return [tuple(tensor.shape)[1:] for tensor in flattened(self.structure)]

    def check(self, label: Label, loss: Any, metrics: Any) -> None:
        """Raise an error if labels, losses or metrics do not match these outputs.

        Raises
        ------
        PlanError
            The message names the output or argument that does not match.
        """
        losses = self.losses(loss)
        self.metrics(metrics)
        self.labels(label, losses)

    def losses(self, loss: Any) -> list[Any]:
        """Return the loss of each output, in the order of ``names``; None for an output without a loss."""
        if len(self.names) == 1 and not _is_nested(self.structure):
            alone = not isinstance(loss, (list, tuple)) and (is_config(loss) or not isinstance(loss, Mapping))
            return [loss] if alone else self._by_output(loss, "loss")
        return self._by_output(loss, "loss")

    @property
    def is_deep(self) -> bool:
        """Whether containers are nested in containers. Keras does not accept such labels from a ``tf.data`` dataset."""
        return any(len(path) > 1 for path, _ in leaves(self.structure))

    def flat(self, model: Any) -> Any:
        """Return a model with the same layers that returns its outputs in one flat dictionary, by their names."""
        import keras

        return keras.Model(structure_of(model, "input"), dict(zip(self.names, flattened(self.structure), strict=True)))

    def by_name(self, value: Any, what: str) -> dict[str, Any]:
        """Return the entry of ``value`` for each output, by the output's name. ``what`` is its name in errors."""
        return dict(zip(self.names, self._by_output(value, what), strict=True))

    def loss(self, loss: Any) -> Any:
        """Return the loss for ``compile``: nested like the outputs, or unchanged if it is one for all."""
        nested = isinstance(loss, (list, tuple)) or (isinstance(loss, Mapping) and not is_config(loss))
        return self._as_outputs(self.losses(loss)) if nested else loss

    def metrics(self, metrics: Any) -> Any:
        """Return metrics for ``compile``: a list for one output, else nested like the outputs."""
        if not metrics or len(self.names) == 1:
            return flattened_metrics(metrics)
        return self._as_outputs(self._by_output(metrics, "metrics"))

    def labels(self, label: Label, losses: Sequence[Any]) -> list[str | None]:
        """Return the column of each output's label; None for an output without a loss.

        Raises
        ------
        PlanError
            If there is one column for several outputs, or none for an output with a loss.
        """
        if isinstance(label, str):
            if len(self.names) > 1:
                raise PlanError(
                    f"the model has {len(self.names)} outputs, {', '.join(self.names)}, and labelCol names one column, "
                    f"{label!r}: give the label of each with {self._example('label_cols')}"
                )
            return [label]
        columns: list[str | None] = self._by_output(label, "label_cols")
        for name, column, loss in zip(self.names, columns, losses, strict=True):
            if column is None and loss is not None:
                raise PlanError(
                    f"label_cols names no column for output {name!r}, which has a loss: name it, or leave the output "
                    "out of loss={…}"
                )
        return columns

    def _example(self, what: str) -> str:
        return f"{what}={{{', '.join(f'{name!r}: …' for name in self.names)}}}"

    def _by_output(self, value: Any, what: str) -> list[Any]:
        """Return the entry of ``value`` for each output, in the order of ``names``."""
        said = list(self.names)
        if isinstance(value, Mapping) and not is_config(value):
            if set(value) <= set(said):
                return [value.get(name) for name in said]
        elif not isinstance(value, (list, tuple)):
            return [value] * len(said)
        found = _alongside(self.structure, value)
        if found is None and isinstance(value, (list, tuple)) and len(value) == len(said):
            found = list(value)
        if found is not None:
            return found
        unknown = [key for key in value if key not in said] if isinstance(value, Mapping) else []
        given = (
            f"no output is called {unknown[0]!r}{near(unknown[0], said)}"
            if unknown
            else f"it has {len(value)} {'entry' if len(value) == 1 else 'entries'}"
        )
        raise PlanError(
            f"{what}: {given}, and the model's outputs are {', '.join(said)}: give a list with an entry for each, or "
            f"{self._example(what)}"
        )

    def _as_outputs(self, flat: Sequence[Any]) -> Any:
        """Return one value per output, in containers of the same classes and order as the model's outputs."""
        waiting = iter(flat)

        def build(part: Any) -> Any:
            kind: Any = type(part)
            if isinstance(part, Mapping):
                made = {key: build(part[key]) for key in sorted(part)}
                return kind((key, made[key]) for key in part)
            if isinstance(part, (list, tuple)) and not hasattr(part, "dtype"):
                return kind(build(inner) for inner in part)
            return next(waiting)

        return build(self.structure)

    def packed_labels(self, columns: Sequence[str | None], values: Mapping[str, Any], rows: Any) -> Any:
        """Return the labels of a batch nested like the outputs, with zeros for an output without a label.

        Parameters
        ----------
        columns : sequence
            Result of :meth:`labels`.
        values : mapping
            The labels by column.
        rows : tensor
            Number of rows in the batch.
        """
        import tensorflow as tf

        labels = [tf.zeros([rows]) if column is None else values[column] for column in columns]
        return packed(self.structure, labels)

    def classifier_outputs(self, loss: Any, task: Task | None) -> tuple[ClassifierOutput, ...]:
        """Return the conversion of each output to Spark ML's columns.

        Parameters
        ----------
        loss : object
            The loss with which the model is compiled.
        task : Task or None
            Kind of prediction. None: derive it from each output's loss and shape.
        """
        return tuple(
            _classifier_output(alone, shape, task) for alone, shape in zip(self.losses(loss), self.shapes, strict=True)
        )


def _is_nested(structure: Any) -> bool:
    return isinstance(structure, (Mapping, list, tuple)) and not hasattr(structure, "dtype")


def _alongside(structure: Any, value: Any) -> list[Any] | None:
    """Return the entry of ``value`` for each leaf of a structure; None if ``value`` is not nested like it."""
    if isinstance(structure, Mapping):
        if not isinstance(value, Mapping) or is_config(value) or not set(value) <= set(structure):
            return [None] * len(leaves(structure)) if value is None else None
        parts = [(structure[key], value.get(key)) for key in sorted(structure)]
    elif _is_nested(structure):
        if not isinstance(value, (list, tuple)) or len(value) != len(structure):
            return [None] * len(leaves(structure)) if value is None else None
        parts = list(zip(structure, value, strict=True))
    else:
        return [value]
    found: list[Any] = []
    for part, said in parts:
        inner = _alongside(part, said)
        if inner is None:
            return None
        found += inner
    return found


def flattened_metrics(metrics: Any) -> list[Any]:
    """Return nested metrics as one list."""
    if isinstance(metrics, Mapping) and not is_config(metrics):
        return [metric for key in metrics for metric in flattened_metrics(metrics[key])]
    if isinstance(metrics, (list, tuple)):
        return [metric for part in metrics for metric in flattened_metrics(part)]
    return [] if metrics is None else [metrics]


def _classifier_output(loss: Any, shape: tuple[int | None, ...], task: Task | None) -> ClassifierOutput:
    name, logits = _loss_of(loss)
    one = not shape or shape == (1,)
    if task is not None:
        binary = task is Task.BINARY or (task is Task.CLASSES and one)
        return ClassifierOutput(Task.BINARY if binary else task, logits)
    if name in _BINARY and one:
        return ClassifierOutput(Task.BINARY, logits)
    if any(word in name for word in _CLASSES) and len(shape) == 1 and not one:
        return ClassifierOutput(Task.CLASSES, logits)
    return ClassifierOutput(Task.VALUES)


def _loss_of(loss: Any) -> tuple[str, bool]:
    """Return the name of a loss, and its ``from_logits``."""
    import keras

    if isinstance(loss, (str, dict)):
        loss = keras.losses.get(loss)
    config = loss.get_config() if hasattr(loss, "get_config") else {}
    return str(getattr(loss, "__name__", None) or config.get("name", "")), bool(config.get("from_logits", False))
