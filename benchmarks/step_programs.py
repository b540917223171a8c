"""The training of the steps benchmark: the same functions in a node of a cluster, and in a process started by hand.

``python -m benchmarks.step_programs NAME ARGUMENTS`` starts it by hand: TF_CONFIG says which task this process is, as
in TensorFlow's guide to distributed training, and the steps a second are printed as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

__all__ = ["async_in_cluster", "async_steps", "sync_in_cluster", "sync_steps"]

_CLASSES = 10
_PIXELS = 784


def sync_in_cluster(args: dict[str, Any], ctx: Any) -> float:
    """Run a worker of the synchronous training, in a node."""
    return sync_steps(args)


def async_in_cluster(args: dict[str, Any], ctx: Any) -> float | None:
    """Run the chief, a worker or the parameter server of the asynchronous training, in a node."""
    if not ctx.is_chief:
        ctx.serve()
        return None
    return async_steps(args, ctx.strategy("async"), ctx.coordinator())


def sync_steps(args: dict[str, Any]) -> float:
    """Train by tf_keras' fit; return the steps a second of its second epoch."""
    import tensorflow as tf
    import tf_keras

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = tf_keras.Sequential(
            [tf_keras.layers.Dense(args["width"], activation="relu"), tf_keras.layers.Dense(_CLASSES)]
        )
        model.compile("sgd", tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    rows = _rows(args["batch_size"])
    model.fit(rows, steps_per_epoch=args["steps"], epochs=1, verbose=0)
    began = time.perf_counter()
    model.fit(rows, steps_per_epoch=args["steps"], epochs=1, verbose=0)
    return float(args["steps"] / (time.perf_counter() - began))


def async_steps(args: dict[str, Any], strategy: Any, coordinator: Any) -> float:
    """Train by a coordinator's schedule; return the steps a second, after as many steps for warming up."""
    import tensorflow as tf

    with strategy.scope():
        weights = [
            tf.Variable(tf.random.normal((_PIXELS, args["width"]), stddev=0.05, seed=1)),
            tf.Variable(tf.random.normal((args["width"], _CLASSES), stddev=0.05, seed=2)),
        ]
    batch_size = args["batch_size"]

    def dataset() -> Any:
        return _rows(batch_size)

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    @tf.function
    def step(batches: Any) -> Any:
        pixels, labels = next(batches)
        with tf.GradientTape() as tape:
            logits = tf.matmul(tf.nn.relu(tf.matmul(pixels, weights[0])), weights[1])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    for _ in range(args["steps"]):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    began = time.perf_counter()
    for _ in range(args["steps"]):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    return float(args["steps"] / (time.perf_counter() - began))


def _rows(batch_size: int) -> Any:
    import tensorflow as tf

    pixels = tf.random.uniform((batch_size, _PIXELS), seed=3)
    labels = tf.random.uniform((batch_size,), maxval=_CLASSES, dtype=tf.int64, seed=4)
    rows = tf.data.Dataset.from_tensors((pixels, labels)).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return rows.with_options(options)


def _sync_by_hand(args: dict[str, Any]) -> float:
    return sync_steps(args)


def _async_by_hand(args: dict[str, Any]) -> float:
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        )
        server.join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return async_steps(args, strategy, tf.distribute.coordinator.ClusterCoordinator(strategy))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    by_hand = {"sync": _sync_by_hand, "async": _async_by_hand}[sys.argv[1]]
    print(json.dumps(by_hand(json.loads(sys.argv[2]))), flush=True)
    os._exit(0)  # a coordinator's threads would keep the process alive
