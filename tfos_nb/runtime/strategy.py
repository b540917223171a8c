"""What a node does to TensorFlow and Keras before and while the user's ``main`` runs."""

from __future__ import annotations

from typing import Any

from tfos_nb.runtime.autolog import autolog, progress_callback
from tfos_nb.runtime.keras_fit import patch_keras_fit

__all__ = ["autolog", "disable_auto_shard", "patch_keras_fit", "progress_callback"]


def disable_auto_shard(dataset: Any) -> Any:
    """Return the ``tf.data.Dataset`` with auto-sharding off: each worker keeps all the rows that it was fed."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
