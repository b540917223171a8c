"""Convert the columns of a training batch to a Keras model's inputs, by the same rules as in inference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfos_nb.errors import FeedFailed, PlanError, near
from tfos_nb.runtime.models.inputs import pictures_of
from tfos_nb.runtime.models.keras_model import named_inputs
from tfos_nb.runtime.models.signature import Tensor, described
from tfos_nb.runtime.rows.nested import packed

__all__ = ["KerasInputs", "input_tensors"]

Array = np.ndarray[Any, Any]


def input_tensors(model: Any) -> tuple[Tensor, ...]:
    """Return the inputs of a Keras model, without importing TensorFlow; none if the model does not describe them."""
    return tuple(
        Tensor(name, str(getattr(t.dtype, "name", t.dtype)), tuple(t.shape)[1:]) for name, t in named_inputs(model)
    )


@dataclass(frozen=True)
class KerasInputs:
    """Function for ``tf.data.Dataset.map`` that converts the features of a batch to a model's inputs.

    Parameters
    ----------
    tensors : tuple of Tensor
        The model's inputs.
    x : str or tuple of str
        The column of the features, or several columns named like the model's inputs.
    decode : frozenset of str
        The columns that have encoded pictures.
    failures : list of FeedFailed
        Errors in pictures are appended to it, because TensorFlow replaces an exception by an error of its own.
    structure : object
        Nested structure of the model's inputs. None: the only input itself, or a dictionary by name.
    """

    tensors: tuple[Tensor, ...]
    x: str | tuple[str, ...]
    decode: frozenset[str] = frozenset()
    failures: list[FeedFailed] = field(default_factory=list, compare=False)
    structure: Any = None

    def check(self, spec: Any) -> None:
        """Raise an error if features do not fit the model. TensorFlow's own error for this is a page of text.

        Parameters
        ----------
        spec : tf.TensorSpec or dict of tf.TensorSpec
            The ``element_spec`` of the features.

        Raises
        ------
        FeedFailed
            If a column has another type or shape than its input.
        PlanError
            If the names of the columns are not those of the inputs.
        """
        for column, tensor in self._pairs():
            given = spec if isinstance(self.x, str) else spec[column]
            self._check_type(column, tensor, given.dtype.name)
            if column not in self.decode and _laid(tuple(given.shape)[1:], tensor.shape) is None:
                raise FeedFailed(
                    f"column {column!r} has shape {_shown(tuple(given.shape)[1:])}, and the model's input "
                    f"{tensor.name!r} expects {_shown(tensor.shape)}: give a column of that shape, or build the model "
                    "for this one"
                )

    def __call__(self, features: Any) -> Any:
        """Return the model's inputs, nested as the model takes them."""
        columns = {self.x: features} if isinstance(self.x, str) else features
        made = {tensor.name: self._made(columns[column], column, tensor) for column, tensor in self._pairs()}
        if self.structure is not None:
            return packed(self.structure, [made[tensor.name] for tensor in self.tensors])
        return next(iter(made.values())) if len(made) == 1 else made

    def _pairs(self) -> list[tuple[str, Tensor]]:
        columns = [self.x] if isinstance(self.x, str) else list(self.x)
        if len(self.tensors) == len(columns) == 1:
            return [(columns[0], self.tensors[0])]
        names = [tensor.name for tensor in self.tensors]
        unknown = [column for column in columns if column not in names]
        missing = [name for name in names if name not in columns]
        if isinstance(self.x, str) or unknown or missing:
            which = f"no input {unknown[0]!r}{near(unknown[0], names)}" if unknown else f"no column for {missing[:1]}"
            what = f"featuresCol={self.x!r} names one column" if isinstance(self.x, str) else f"input_mapping: {which}"
            raise PlanError(
                f"{what}, and the model takes {described(self.tensors)}: give input_mapping={{'COLUMN': 'INPUT', …}} "
                "with a column for each"
            )
        return [(tensor.name, tensor) for tensor in self.tensors]

    def _check_type(self, column: str, tensor: Tensor, dtype: str) -> None:
        text = dtype == "string"
        if column in self.decode:
            if not text or len(tensor.shape) != 3:
                raise FeedFailed(
                    f"decode=[{column!r}]: the column must be binary, and the model's input an image of three axes, "
                    f"got {dtype} and {_shown(tensor.shape)}: leave it out of decode"
                )
        elif text != (tensor.dtype == "string"):
            advice = "; if it holds encoded pictures, name it in decode" if text and len(tensor.shape) == 3 else ""
            raise FeedFailed(
                f"column {column!r} is {dtype}, and the model's input {tensor.name!r} takes {tensor.dtype}: cast the "
                f"column in Spark, or build the model for it{advice}"
            )

    def _made(self, values: Any, column: str, tensor: Tensor) -> Any:
        import tensorflow as tf

        if column in self.decode:
            decoded = tf.numpy_function(_Decoder(column, tensor, self.failures), [values], _picture_type(tensor))
            return tf.ensure_shape(decoded, (None, *tensor.shape))
        sizes = _laid(tuple(values.shape)[1:], tensor.shape)
        return tf.reshape(values, (-1, *sizes)) if sizes else values


@dataclass(frozen=True)
class _Decoder:
    """Function for ``tf.numpy_function`` that decodes pictures and appends its errors to ``failures``."""

    column: str
    tensor: Tensor
    failures: list[FeedFailed]

    def __call__(self, contents: Array) -> Array:
        import tensorflow as tf

        try:
            with tf.device("CPU"):
                return pictures_of(contents.tolist(), self.tensor, self.column).astype(_picture_type(self.tensor))
        except FeedFailed as error:
            self.failures.append(error)
            raise


def _picture_type(tensor: Tensor) -> Any:
    return np.dtype("float32" if tensor.dtype == "bfloat16" else tensor.dtype)


def _laid(given: Sequence[int | None], wanted: Sequence[int | None]) -> tuple[int, ...] | None:
    """Return the shape to which a row's values must be reshaped; empty if they fit unchanged, None if they do not fit.

    A number or a text fits an input of one value. A flat list fits an input of several axes. The same rules apply in
    inference (:meth:`tfos_nb.runtime.models.inputs.Feed.array`).
    """
    if len(given) == len(wanted):
        fits = all(a is None or b is None or a == b for a, b in zip(given, wanted, strict=True))
        return () if fits else None
    sizes = tuple(size or 1 for size in wanted)
    if not given and math.prod(sizes) == 1:
        return sizes
    if len(given) == 1 and None not in wanted and len(wanted) > 1 and given[0] in (None, math.prod(sizes)):
        return sizes
    return None


def _shown(shape: Sequence[int | None]) -> str:
    return str(tuple(shape))
