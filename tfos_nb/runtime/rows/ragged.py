"""Convert results of TensorFlow to arrays: dense ones to NumPy arrays, ragged ones to values and row splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Output", "Ragged", "dense_or_ragged", "fetched"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Ragged:
    """Array whose rows have different lengths, as a ``tf.RaggedTensor`` represents it.

    Parameters
    ----------
    values : numpy.ndarray
        The concatenated values of all rows (``flat_values``).
    splits : tuple of numpy.ndarray
        For each ragged axis, the outermost first: the start of each list, and the end of the last
        (``nested_row_splits``).
    """

    values: Array
    splits: tuple[Array, ...]

    def __len__(self) -> int:
        return len(self.splits[0]) - 1

    @property
    def ndim(self) -> int:
        """Number of axes, including that of the rows."""
        return len(self.splits) + self.values.ndim

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Lengths of the axes for messages; ``"any"`` for a ragged axis."""
        return (len(self), *["any"] * len(self.splits), *self.values.shape[1:])

    def astype(self, dtype: Any) -> Ragged:
        """Return the same array with values of another type."""
        return Ragged(self.values.astype(dtype), self.splits)


Output = Array | Ragged
"""Output of a model for a batch of rows."""


def dense_or_ragged(value: Any) -> Any:
    """Return a sparse tensor as a dense one; any other value unchanged."""
    import tensorflow as tf

    return tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value


def fetched(value: Any) -> Output:
    """Return the value of an eager tensor as an array."""
    if hasattr(value, "nested_row_splits"):
        return Ragged(value.flat_values.numpy(), tuple(splits.numpy() for splits in value.nested_row_splits))
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
