"""Inputs and outputs of a model, and the error for a model that cannot be used.

TensorFlow is imported inside functions, because the driver imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tfos_nb.runtime.control.wire import message

__all__ = ["ModelUnusable", "Signature", "Tensor", "described", "tensor_of"]


class ModelUnusable(Exception):
    """A model cannot be used. The message says why and what to do."""


@message
@dataclass(frozen=True)
class Tensor:
    """Description of an input or output.

    Parameters
    ----------
    name : str
        Name in the signature.
    dtype : str
        TensorFlow's name of the type, as in ``"float32"``.
    shape : tuple of int or None
        Shape of one row's value, without the batch axis. None: any length.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@message
@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model, in the order in which :attr:`Model.apply` takes and returns them."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def tensor_of(role: str, name: str, spec: Any) -> Tensor:
    """Return the description of an input or output.

    Parameters
    ----------
    role : {"input", "output"}
        Its role in error messages.
    name : str
        Its name.
    spec : tf.TypeSpec or tensor
        Its type, and its shape with the batch axis.

    Raises
    ------
    ModelUnusable
        If it is no tensor, is a sparse or ragged input, or its first axis is not ``None`` (any number of rows).
    """
    import tensorflow as tf

    if not hasattr(spec, "shape"):
        raise ModelUnusable(f"{role} {name!r} is a {type(spec).__name__}, not a tensor")
    kind = "sparse" if getattr(spec, "sparse", False) else "ragged" if getattr(spec, "ragged", False) else ""
    if role == "input" and kind:
        raise ModelUnusable(
            f"{role} {name!r} is {kind}, and columns become dense tensors: build the model with a dense Input"
        )
    shape = tf.TensorShape(spec.shape)
    if shape.rank is None:
        raise ModelUnusable(f"{role} {name!r} has an unknown number of axes: export the model with its shapes")
    sizes = shape.as_list()
    if not sizes or sizes[0] is not None:
        has = f"exactly {sizes[0]} rows" if sizes else "no axis for rows"
        raise ModelUnusable(f"{role} {name!r} has {has}: save the model with a first axis of None")
    return Tensor(name, str(tf.as_dtype(spec.dtype).name), tuple(sizes[1:]))


def described(tensors: Iterable[Tensor]) -> str:
    """Return a text that lists tensors with their types and shapes, as in ``"image (float32 28x28)"``."""
    return ", ".join(f"{t.name} ({t.dtype} {_sizes(t.shape)})" for t in tensors) or "nothing"


def _sizes(shape: Sequence[int | None]) -> str:
    return "x".join("any" if size is None else str(size) for size in shape) if shape else "one value"
