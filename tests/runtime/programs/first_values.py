"""Create variables as one of several workers, each with another seed, and write how many first values were sent.

Usage: ``first_values.py OUT``, with ``TF_CONFIG``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from tensorflow.python.ops import collective_ops

from tfos_nb.runtime.program.setup import patch_keras_fit

sent: list[str] = []


def noting(original: Any) -> Any:
    @functools.wraps(original)
    def send(*args: Any, **options: Any) -> Any:
        sent.append(original.__name__)
        return original(*args, **options)

    return send


def main() -> None:
    """Create a model's and an optimizer's variables."""
    for name in ("broadcast_send", "broadcast_recv"):
        setattr(collective_ops, name, noting(getattr(collective_ops, name)))
    patch_keras_fit()
    place = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    keras.utils.set_random_seed(place)
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        dense = keras.layers.Dense(3, kernel_initializer="normal", bias_initializer=keras.initializers.Constant(place))
        model = keras.Sequential([keras.Input((2,)), dense, keras.layers.BatchNormalization()])
        model.compile(optimizer=keras.optimizers.Adam(), loss="mse")
        before = len(sent)
        model.optimizer.build(model.trainable_variables)
    found = {
        "weights": [weight.numpy().tolist() for weight in model.weights],
        "slots": [float(tf.reduce_sum(one.value)) for one in model.optimizer.variables],
        "sent": [before, len(sent) - before],
    }
    with open(f"{sys.argv[1]}.{place}", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
