"""Nodes are lost while they train, and nothing else is: not a row, not a step that was saved, not the cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from tests.waiting import until
from tfos_nb import Cluster, errors, launch

PRIME = 1_000_003
ROWS = 3000


def sum_of_ids(passes: int) -> int:
    return passes * sum(range(ROWS)) % PRIME


def counting_loop(args: dict[str, Any], ctx: Any) -> tuple[int, int]:
    """A model that only counts rows, trained by a loop of its own under a synchronous strategy."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    dataset = strategy.experimental_distribute_dataset(ctx.dataset(32))

    @tf.function
    def step(batch: Any) -> Any:
        def on_replica(ids: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(ids))

        return strategy.experimental_local_results(strategy.run(on_replica, (batch["id"],)))[0]

    for epoch in range(ctx.resume(total=total).epoch, args["epochs"]):
        for number, batch in enumerate(dataset):
            total.assign((total + step(batch)) % PRIME)
            ctx.report(epoch=epoch + 1, step=number + 1, pid=os.getpid())
        ctx.checkpoint(total=total, epoch=epoch + 1)
    return int(total.numpy()), ctx.generation


def counting_fit(args: dict[str, Any], ctx: Any) -> tuple[int, int, list[int]]:
    """The same by Keras' fit, with Keras' own BackupAndRestore."""
    import keras
    import tensorflow as tf

    class Count(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.total = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

        def call(self, ids: Any, training: bool = False) -> Any:
            if training:
                context = tf.distribute.get_replica_context()
                seen = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(tf.cast(ids, tf.int64)))
                now = tf.convert_to_tensor(self.total.value)
                self.total.value.assign((now + seen) % PRIME)
            return tf.cast(ids, tf.float32) * 0.0

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,), dtype="int64"), Count(), keras.layers.Dense(1)])
        model.compile(loss="mse")
    rows = ctx.dataset(32, x="id", y="y")
    history = model.fit(
        rows, epochs=args["epochs"], verbose=0, callbacks=[keras.callbacks.BackupAndRestore(ctx.checkpoint_dir)]
    )
    return int(model.layers[0].total.numpy()), ctx.generation, history.epoch


class Killer(threading.Thread):
    """Sends a signal to something of a node, once, when that node has come so far."""

    def __init__(
        self, cluster: Cluster, node: str, rows: int, what: Callable[[int], int], how: int = signal.SIGKILL
    ) -> None:
        super().__init__(daemon=True)
        self.cluster, self.node, self.rows, self.what, self.how = cluster, node, rows, what, how
        self.statuses: set[str] = set()
        self.killed: int | None = None
        self.start()

    def run(self) -> None:
        while not self.cluster.state.ended:
            snapshot = self.cluster.snapshot()
            self.statuses.add(snapshot.status.value)
            state = next(node for node in snapshot.nodes if node.node == self.node)
            if self.killed is None and state.pid and state.rows >= self.rows:
                self.killed = self.what(state.pid)
                os.kill(self.killed, self.how)
            threading.Event().wait(0.05)


def itself(pid: int) -> int:
    return pid


def its_supervisor(pid: int) -> int:
    return psutil.Process(pid).ppid()


def its_executor(pid: int) -> int:
    """Find the JVM: the task's Python that started the supervisor is a child of the executor's Python daemon."""
    return next(parent.pid for parent in psutil.Process(pid).parents() if parent.name() == "java")


def rows(spark: SparkSession) -> Any:
    return spark.range(0, ROWS, 1, 4)


@pytest.mark.parametrize(("node", "what"), [("worker:1", itself), ("worker:0", its_supervisor)])
def test_a_loop_that_lost_a_node_ends_with_every_row_counted_once_an_epoch(
    spark: SparkSession, tmp_path: Path, node: str, what: Callable[[int], int]
) -> None:
    args = {"epochs": 3}
    with launch(counting_loop, args, workers=2, spark=spark, restarts=2, model_dir=str(tmp_path)) as cluster:
        killer = Killer(cluster, node, ROWS * 3 // 4, what)  # of about ROWS / 2 an epoch: in the second one
        cluster.train(rows(spark), epochs=3)
    assert cluster.result() == (sum_of_ids(3), 2)
    assert cluster.results()["worker:1"] == cluster.results()["worker:0"]
    assert "RECOVERING" in killer.statuses
    assert cluster.snapshot().generation == 2


def test_an_executor_that_is_killed_takes_no_row_with_it(spark: SparkSession, tmp_path: Path) -> None:
    args = {"epochs": 3}
    with launch(counting_loop, args, workers=2, spark=spark, restarts=2, model_dir=str(tmp_path)) as cluster:
        killer = Killer(cluster, "worker:1", ROWS * 3 // 4, its_executor)
        cluster.train(rows(spark), epochs=3)
    assert killer.killed
    assert cluster.result()[0] == sum_of_ids(3)


@pytest.mark.parametrize("what", [itself, its_supervisor])
def test_a_node_that_is_frozen_is_given_up_and_replaced(
    spark: SparkSession, tmp_path: Path, what: Callable[[int], int]
) -> None:
    options: dict[str, Any] = {"restarts": 1, "heartbeat_timeout": 4.0, "model_dir": str(tmp_path)}
    with launch(counting_loop, {"epochs": 2}, workers=2, spark=spark, **options) as cluster:
        killer = Killer(cluster, "worker:1", ROWS // 4, what, signal.SIGSTOP)
        cluster.train(rows(spark), epochs=2)
    assert cluster.result() == (sum_of_ids(2), 2)
    assert killer.killed
    assert until(lambda: not psutil.pid_exists(killer.killed or 0))


def test_keras_fit_goes_on_from_its_backup_and_is_fed_what_it_lacks(spark: SparkSession, tmp_path: Path) -> None:
    data = rows(spark).selectExpr("id", "double(0) as y")
    args = {"epochs": 3}
    with launch(counting_fit, args, workers=2, spark=spark, restarts=1, model_dir=str(tmp_path)) as cluster:
        Killer(cluster, "worker:0", ROWS * 3 // 4, itself)
        cluster.train(data, epochs=3)
    assert cluster.result() == (sum_of_ids(3), 2, [1, 2])


def raising_later(args: Any, ctx: Any) -> None:
    for batch in ctx.dataset(16):
        raise ValueError(f"no good: {int(batch['id'][0])}")


def test_an_exception_of_the_program_is_not_tried_again(spark: SparkSession) -> None:
    with pytest.raises(errors.NodeFailed, match="no good") as caught:
        with launch(raising_later, workers=2, spark=spark, restarts=3) as cluster:
            cluster.train(rows(spark))
    assert "raise ValueError" in caught.value.remote_traceback
    assert cluster.snapshot().generation == 1


def dying(args: Any, ctx: Any) -> None:
    if ctx.task_index == 1:
        os._exit(3)
    ctx.report(step=1)
    threading.Event().wait()


def test_a_node_that_dies_each_time_fails_the_cluster_when_the_restarts_are_used_up(spark: SparkSession) -> None:
    cluster = launch(dying, workers=2, spark=spark, restarts=1, wait_until_up=False)
    with pytest.raises(errors.NodeFailed, match="exited with code 3"), cluster:
        pass
    assert cluster.snapshot().generation == 2
    assert until(lambda: cluster.state.ended)


def test_a_number_of_restarts_that_is_none_is_refused(spark: SparkSession) -> None:
    with pytest.raises(errors.PlanError, match="restarts=-1: it is a whole number"):
        launch(dying, spark=spark, restarts=-1)
    with pytest.raises(errors.PlanError, match="single queue"):
        launch(dying, spark=spark, restarts=1, queues=["input", "valid"])
