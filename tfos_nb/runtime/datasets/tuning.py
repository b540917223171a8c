"""TensorFlow's tuning of input pipelines, off where there is nothing to tune: it makes epochs end late.

With it a thread looks at a pipeline ever more rarely, every minute at last, and whoever lets go of the iterator waits
for that thread: a cancellation wakes it before it can see that it is cancelled, so it may sleep on
(``CancellationManager::StartCancel`` calls back before it says so; ``Model::OptimizeLoop`` looks, and waits again). An
epoch then ends with a pause of up to its own length: of twelve of three seconds, on two busy cores, three did.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["as_fed", "tune_no_devices", "untuned"]


def untuned(dataset: Any) -> Any:
    """Return the ``tf.data.Dataset``, which TensorFlow does not tune: ``AUTOTUNE`` in it means as many as cores."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def as_fed(dataset: Any) -> Any:
    """Return the ``tf.data.Dataset`` as a worker reads the rows that it was fed: all of them, and without tuning."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return untuned(dataset.with_options(options))


def tune_no_devices() -> None:
    """Have strategies tune none of the pipelines that they put on the devices, which only fetch from the host's.

    A dataset of the user's own keeps its options: this is of what TensorFlow lays on top of it.
    """
    from tensorflow.python.data.ops import multi_device_iterator_ops as owner  # no public name leads there

    make = getattr(owner, "_create_device_dataset", None)
    if make is None or hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        return untuned(make(*args, **kwargs))

    owner._create_device_dataset = made
