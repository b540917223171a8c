"""A batch without a row on its way through a model.

A replica whose rows have come to their end takes part in the steps of the others with empty batches. Not every kernel
bears one: oneDNN's convolutions fail on it ("input depth must be evenly divisible by filter depth"). So the model sees
one row of zeros instead, and what comes out of it is cut back to nothing before a loss or a metric sees it: they, and
the gradients, are those of no row.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["bears_empty_batches", "with_a_row_at_least"]


@contextlib.contextmanager
def with_a_row_at_least(model: Any, rows: Any) -> Iterator[None]:
    """Have ``model``'s call see a row of zeros where ``rows`` is 0, while a step is traced or run.

    Not with synchronized BatchNormalization: it would count that row in the moments of all replicas.
    """
    if _synchronizes(model) or "call" in vars(model):
        yield
        return
    # In the instance's own dictionary, past Keras' tracking of attributes: looked up at each call, gone afterwards.
    vars(model)["call"] = _padded(model.call, rows)
    try:
        yield
    finally:
        vars(model).pop("call", None)


def bears_empty_batches(step: Callable[..., Any], rows_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Wrap a ``predict_step(self, data)``."""

    @functools.wraps(step)
    def predict_step(self: Any, data: Any) -> Any:
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return step(self, data)
        with with_a_row_at_least(self, rows_of(data)):
            return step(self, data)

    return predict_step


def _padded(call: Callable[..., Any], rows: Any) -> Callable[..., Any]:
    import keras
    import tensorflow as tf

    missing = tf.cast(tf.equal(rows, 0), tf.int32)

    def pad(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0) or leaf.dtype in (tf.string, tf.variant):
            return leaf
        padded = tf.pad(leaf, [[0, missing], *([[0, 0]] * (leaf.shape.rank - 1))])
        return tf.ensure_shape(padded, [None, *leaf.shape[1:]])

    def cut(leaf: Any) -> Any:
        return leaf[: tf.shape(leaf)[0] - missing] if isinstance(leaf, tf.Tensor) and leaf.shape.rank else leaf

    @functools.wraps(call)
    def padded_call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = call(keras.tree.map_structure(pad, inputs), *args, **kwargs)
        return keras.tree.map_structure(cut, outputs)

    return padded_call


def _synchronizes(model: Any) -> bool:
    return any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())
