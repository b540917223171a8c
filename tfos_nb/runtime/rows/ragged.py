"""Results of TensorFlow as arrays: dense ones as NumPy's, ragged ones as their values and where each row ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Output", "Ragged", "dense_or_ragged", "fetched"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths.

    Parameters
    ----------
    values : numpy.ndarray
        The values of all rows, one after the other.
    splits : tuple of numpy.ndarray
        For each ragged axis, the outermost first, where each list starts; and where the last one ends.
    """

    values: Array
    splits: tuple[Array, ...]

    def __len__(self) -> int:
        return len(self.splits[0]) - 1

    @property
    def ndim(self) -> int:
        """The number of axes, that of the rows among them."""
        return len(self.splits) + self.values.ndim

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The axes' lengths, for messages."""
        return (len(self), *["any"] * len(self.splits), *self.values.shape[1:])

    def astype(self, dtype: Any) -> Ragged:
        """Return it with values of another type."""
        return Ragged(self.values.astype(dtype), self.splits)


Output = Array | Ragged
"""What a model gives for some rows."""


def dense_or_ragged(value: Any) -> Any:
    """Return a tensor as it is, and a sparse one as a dense one."""
    import tensorflow as tf

    return tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value


def fetched(value: Any) -> Output:
    """Return the array of a tensor that was computed."""
    if hasattr(value, "nested_row_splits"):
        return Ragged(value.flat_values.numpy(), tuple(splits.numpy() for splits in value.nested_row_splits))
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
