"""Switch off TensorFlow's tuning of input pipelines that cannot be tuned, because it delays the end of epochs.

The tuning has a thread that checks a pipeline at growing intervals, up to a minute. Deleting the iterator waits for
that thread. A cancellation wakes the thread before it can see that it is cancelled, so it may sleep again:
``CancellationManager::StartCancel`` runs its callbacks before it sets its flag, and ``Model::OptimizeLoop`` checks the
flag and waits again. An epoch then ends with a pause of up to its own length. On two busy cores, this happened in
three of twelve epochs of three seconds.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["as_fed", "tune_no_devices", "untuned"]


def untuned(dataset: Any) -> Any:
    """Return a ``tf.data.Dataset`` without tuning. ``AUTOTUNE`` in it then means one thread per core."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def as_fed(dataset: Any) -> Any:
    """Return a ``tf.data.Dataset`` of a worker's own rows: without sharding among workers, and without tuning."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return untuned(dataset.with_options(options))


def tune_no_devices() -> None:
    """Switch off the tuning of the pipelines that strategies put on devices, which only fetch from the host's pipeline.

    The options of the user's own datasets are not changed.
    """
    from tensorflow.python.data.ops import multi_device_iterator_ops as owner  # there is no public name for it

    make = getattr(owner, "_create_device_dataset", None)
    if make is None or hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        return untuned(make(*args, **kwargs))

    owner._create_device_dataset = made
