"""The training of the saving benchmark."""

from __future__ import annotations

import itertools
import time
from typing import Any

__all__ = ["fit", "turns"]

_WIDTH, _PIXELS, _CLASSES = 1024, 784, 10


def turns(args: dict[str, Any], ctx: Any) -> dict[str, list[float]]:
    """Save after every second epoch; return the seconds of epochs that saved and of those that did not."""
    model, rows = _build(args)
    model.fit(rows, epochs=1, verbose=0)
    seconds: dict[str, list[float]] = {"saved": [], "not saved": []}
    for epoch in range(2 * args["epochs"]):
        name = ("saved", "not saved")[epoch % 2]
        began = time.perf_counter()
        model.fit(rows, epochs=1, verbose=0)
        if name == "saved":
            ctx.checkpoint(model, epoch=epoch + 1)
        seconds[name].append(time.perf_counter() - began)
    return seconds


def fit(args: dict[str, Any], ctx: Any) -> list[float]:
    """Train by Keras' fit; return the seconds of each epoch but the first, including the time between epochs."""
    import keras

    model, rows = _build(args)
    ends: list[float] = []
    told = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: ends.append(time.perf_counter()))
    model.fit(rows, epochs=args["epochs"] + 2, verbose=0, callbacks=[told])
    return [after - before for before, after in itertools.pairwise(ends[1:])]


def _build(args: dict[str, Any]) -> tuple[Any, Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        dense = keras.layers.Dense
        model = keras.Sequential(
            [keras.Input((_PIXELS,)), dense(_WIDTH, "relu"), dense(_WIDTH, "relu"), dense(_CLASSES)]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pick = np.random.default_rng(0)
    share = args["rows"] // 2
    x = pick.random((share, _PIXELS), dtype=np.float32)
    y = pick.integers(0, _CLASSES, share)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return model, tf.data.Dataset.from_tensor_slices((x, y)).batch(args["batch_size"]).with_options(options)
