"""What a node does to TensorFlow and Keras before and while the user's ``main`` runs."""

from __future__ import annotations

from typing import Any

from tfos_nb.runtime import keras_fit
from tfos_nb.runtime.autolog import autolog, progress_callback
from tfos_nb.runtime.keras_keep import keep_fits
from tfos_nb.runtime.strategies import refuse_what_fails

__all__ = ["autolog", "disable_auto_shard", "keep_fits", "patch_keras_fit", "progress_callback"]


def patch_keras_fit() -> str:
    """Mend Keras' ``fit``, and have what would hang or fail refused with a reason; say what was mended."""
    note = keras_fit.patch_keras_fit()
    refuse_what_fails()
    return note


def disable_auto_shard(dataset: Any) -> Any:
    """Return the ``tf.data.Dataset`` with auto-sharding off: each worker keeps all the rows that it was fed."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
