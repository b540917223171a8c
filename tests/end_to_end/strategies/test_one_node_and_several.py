"""Synchronous training on several workers and on one node's devices, models that span nodes, and TensorFlow 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.end_to_end.strategies.programs import refusal
from tfos_nb import errors, launch

ROWS, WIDTH = 400, 4
TRUTH = np.array([[1.0], [-2.0], [0.5], [3.0]], dtype="float32")


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    numbers = np.random.default_rng(6)
    x = numbers.normal(size=(ROWS, WIDTH)).astype("float32")
    y = (x @ TRUTH)[:, 0]
    rows = [(i, x[i].tolist(), float(y[i])) for i in range(ROWS)]
    cached = spark.createDataFrame(rows, "id long, x array<float>, y float").repartition(3).cache()
    cached.count()
    return cached


def in_step(args: Any, ctx: Any) -> dict[str, Any]:
    """tf_keras' fit, then a loop with strategy.run, both in the same MultiWorkerMirroredStrategy."""
    import tensorflow as tf
    import tf_keras

    strategy = ctx.strategy(communication="ring", timeout=120.0)
    with strategy.scope():
        tf_keras.utils.set_random_seed(1)
        model = tf_keras.Sequential([tf_keras.layers.Dense(1, use_bias=False, input_shape=(WIDTH,))])
        model.compile(tf_keras.optimizers.SGD(0.05), "mse")
        weights = tf.Variable(tf.zeros((WIDTH, 1)))
    history = model.fit(ctx.dataset(16, x="x", y="y"), epochs=2, verbose=0).history["loss"]

    def replica_step(batch: Any) -> Any:
        error = batch["x"] @ weights - batch["y"][:, None]
        gradient = 2 * tf.matmul(batch["x"], error, transpose_a=True)
        rows = tf.cast(tf.shape(error)[0], tf.float32)
        replicas = tf.distribute.get_replica_context()
        gradient, total = replicas.all_reduce("SUM", [gradient, rows])
        weights.assign_sub(0.05 * gradient / tf.maximum(total, 1.0))
        return rows

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    dataset = strategy.experimental_distribute_dataset(ctx.dataset(16))
    rows = [sum(float(step(batch)) for batch in dataset) for _ in range(2)]
    return {
        "loss": history,
        "fitted": model.get_weights()[0],
        "weights": weights.numpy(),
        "rows": rows,
        "replicas": strategy.num_replicas_in_sync,
        "nccl": refusal(lambda: ctx.strategy("sync", communication="nccl")),
        "fast": refusal(lambda: ctx.strategy("sync", communication="fast")),
        "protocol": refusal(lambda: ctx.strategy("sync", protocol="grpc+verbs")),
    }


def test_tf_keras_and_a_loop_train_in_step_on_every_row(spark: SparkSession, frame: DataFrame) -> None:
    with launch(in_step, workers=2, spark=spark) as cluster:
        cluster.train(frame, epochs=4)
    one, two = cluster.results()["worker:0"], cluster.results()["worker:1"]
    assert one["replicas"] == 2
    assert one["rows"] == [ROWS, ROWS]
    np.testing.assert_array_equal(one["fitted"], two["fitted"])
    np.testing.assert_array_equal(one["weights"], two["weights"])
    np.testing.assert_allclose(one["weights"], TRUTH, atol=0.1)
    assert one["loss"][1] < one["loss"][0] / 4
    assert "this cluster's nodes have no GPUs" in one["nccl"]
    assert "communication must be one of auto, ring, nccl" in one["fast"]
    assert "was built without it; use one of grpc" in one["protocol"]


def within_a_node(args: Any, ctx: Any) -> dict[str, Any]:
    """MirroredStrategy over two logical CPU devices, with Keras 3's fit."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    strategy = ctx.strategy("mirrored", devices=2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    loss = model.fit(ctx.dataset(16, x="x", y="y"), epochs=3, verbose=0).history["loss"]
    tf.constant(1.0) + 1.0
    with ctx.strategy("one").scope():
        on = tf.Variable(0.0).device
    return {
        "replicas": strategy.num_replicas_in_sync,
        "loss": loss,
        "weights": model.get_weights()[0],
        "one": on,
        "default": ctx.strategy("default").num_replicas_in_sync,
        "late": refusal(lambda: ctx.strategy("mirrored", devices=3)),
        "kind": refusal(lambda: ctx.strategy("asink")),
        "async": refusal(lambda: ctx.strategy("async")),
        "coordinator": refusal(ctx.coordinator),
    }


def test_one_node_mirrors_its_own_devices(spark: SparkSession, frame: DataFrame) -> None:
    with launch(within_a_node, workers=1, spark=spark) as cluster:
        cluster.train(frame, epochs=3)
    result = cluster.result()
    assert result["replicas"] == 2
    np.testing.assert_allclose(result["weights"], TRUTH, atol=0.1)
    assert result["loss"][-1] < result["loss"][0] / 10
    assert "CPU:0" in result["one"]
    assert result["default"] == 1
    assert "Build the strategy first in main" in result["late"]
    assert "strategy must be one of auto, sync, async, mirrored, one, default" in result["kind"]
    assert "this cluster has none: launch it with ps=1" in result["async"]
    assert result["coordinator"] == result["async"]


def across_nodes(args: Any, ctx: Any) -> Any:
    """A model whose layers lie on different nodes: the chief computes, the workers' servers hold and multiply."""
    if not ctx.is_chief:
        return ctx.serve()
    import tensorflow as tf

    names = ctx.connect()
    first, second = "/job:worker/task:0", "/job:worker/task:1"
    with tf.device(first):
        w1 = tf.Variable(tf.random.stateless_normal((WIDTH, 8), (1, 2)) * 0.3)
    with tf.device(second):
        w2 = tf.Variable(tf.random.stateless_normal((8, 1), (3, 4)) * 0.3)
    x = np.random.default_rng(6).normal(size=(64, WIDTH)).astype("float32")
    y = x @ TRUTH

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            with tf.device(first):
                hidden = x @ w1
            with tf.device(second):
                loss = tf.reduce_mean((hidden @ w2 - y) ** 2)
        for weights, gradient in zip((w1, w2), tape.gradient(loss, (w1, w2)), strict=True):
            weights.assign_sub(0.05 * gradient)
        return loss

    losses = [float(step()) for _ in range(150)]
    return {"names": names, "on": [w1.device, w2.device], "losses": losses, "product": w1.numpy() @ w2.numpy()}


def test_the_layers_of_a_model_lie_on_different_nodes(spark: SparkSession) -> None:
    with launch(across_nodes, workers=2, chief=True, spark=spark, input_mode="tensorflow") as cluster:
        pass
    result = cluster.result()
    assert "/job:worker/replica:0/task:1/device:CPU:0" in result["names"]
    assert ["/job:worker/replica:0/task:0" in result["on"][0], "/job:worker/replica:0/task:1" in result["on"][1]]
    assert all(f"task:{index}" in device for index, device in enumerate(result["on"]))
    assert result["losses"][-1] < result["losses"][0] / 50
    np.testing.assert_allclose(result["product"], TRUTH, atol=0.2)


def over_a_mesh(args: Any, ctx: Any) -> dict[str, Any]:
    """DTensor: one global batch is split along the mesh, and the weights are replicated."""
    import tensorflow as tf

    dtensor = tf.experimental.dtensor
    refused = refusal(lambda: ctx.mesh(batch=3))
    mesh = ctx.mesh(batch=2 * ctx.num_workers)
    everywhere = dtensor.Layout.replicated(mesh, rank=2)
    weights = dtensor.DVariable(dtensor.call_with_layout(tf.zeros, everywhere, (WIDTH, 1)))
    x = np.random.default_rng(6).normal(size=(32, WIDTH)).astype("float32")
    y = x @ TRUTH
    along = dtensor.Layout.batch_sharded(mesh, "batch", rank=2)
    share = np.array_split(np.arange(32), mesh.size)
    mine = [share[position["batch"]] for position in mesh.local_device_locations()]
    xs = dtensor.pack([tf.constant(x[rows]) for rows in mine], along)
    ys = dtensor.pack([tf.constant(y[rows]) for rows in mine], along)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((xs @ weights - ys) ** 2)
        gradient = tape.gradient(loss, weights)
        weights.assign_sub(0.1 * dtensor.relayout(gradient, everywhere))
        return loss

    for _ in range(60):
        step()
    local = dtensor.unpack(dtensor.relayout(weights.read_value(), everywhere))[0]
    return {"devices": mesh.size, "here": len(mine), "weights": local.numpy(), "refused": refused}


def test_a_dtensor_mesh_spans_the_workers(spark: SparkSession) -> None:
    with launch(over_a_mesh, workers=2, spark=spark, input_mode="tensorflow") as cluster:
        pass
    for result in cluster.results().values():
        assert (result["devices"], result["here"]) == (4, 2)
        np.testing.assert_allclose(result["weights"], TRUTH, atol=0.05)
        assert "3 devices cannot be shared out among 2 nodes" in result["refused"]


def between_graph(args: dict[str, Any], ctx: Any) -> Any:
    """Between-graph replication: the graph on each worker, the variables on the ps, the rows from Spark."""
    if ctx.job_name == "ps":
        return ctx.serve()
    import tensorflow as tf

    v1 = tf.compat.v1
    address = ctx.release_port()
    server = ctx.server()
    assert server.target.startswith("grpc://")
    ids: list[int] = []
    with tf.Graph().as_default():
        here = f"/job:worker/task:{ctx.task_index}"
        with v1.device(here + "/cpu:0"):
            rows = ctx.dataset(10).repeat(args["epochs"])
            if ctx.task_index == args["ends_first"]:
                rows = rows.take(3)
            batch = v1.data.make_one_shot_iterator(rows).get_next()
        with v1.device(v1.train.replica_device_setter(cluster=ctx.cluster_spec, worker_device=here)):
            step = v1.train.get_or_create_global_step()
            weights = v1.get_variable("weights", (WIDTH, 1), initializer=v1.zeros_initializer())
            loss = tf.reduce_mean((tf.matmul(batch["x"], weights) - batch["y"][:, None]) ** 2)
            optimizer = v1.train.GradientDescentOptimizer(0.1)
            options: dict[str, Any] = {}
            if args["ends_first"] is not None:
                optimizer = v1.train.SyncReplicasOptimizer(
                    optimizer, replicas_to_aggregate=ctx.num_workers, total_num_replicas=ctx.num_workers
                )
                options = {"optimizer": optimizer, "workers": ctx.num_workers}
            train = optimizer.minimize(loss, global_step=step)
        with ctx.monitored_session(server, **options) as session:
            while not session.should_stop():
                _, seen, trained, on = session.run([train, batch["id"], weights, step])
                ids.extend(seen.tolist())
    return {"ids": ids, "weights": trained, "on": weights.device, "steps": int(on), "address": address}


@pytest.mark.parametrize(
    "ends_first",
    [None, pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)],
    ids=["asynchronous", "SyncReplicasOptimizer, chief first", "and last"],
)
def test_sessions_and_graphs_train_on_fed_rows(spark: SparkSession, frame: DataFrame, ends_first: int | None) -> None:
    args = {"epochs": 3, "ends_first": ends_first}
    with launch(between_graph, args, workers=2, ps=1, chief=False, spark=spark) as cluster:
        cluster.train(frame, epochs=3)
    results = cluster.results()
    assert set(results) == {"worker:0", "worker:1"}
    if ends_first is None:
        assert sorted(i for result in results.values() for i in result["ids"]) == sorted(3 * list(range(ROWS)))
    else:  # the other one continues alone to its last row
        first, last = results[f"worker:{ends_first}"]["ids"], results[f"worker:{1 - ends_first}"]["ids"]
        assert len(first) == 30
        assert sorted(last) == sorted(3 * list(set(last)))
        assert len(set(last)) >= ROWS / 2 - 64
        assert not set(first) & set(last)
    assert all("/job:ps" in result["on"] for result in results.values())
    newest = max(results.values(), key=lambda result: result["steps"])
    np.testing.assert_allclose(newest["weights"], TRUTH, atol=0.3)
    assert len({result["address"] for result in results.values()}) == 2


def test_a_protocol_that_tensorflow_was_built_without_is_refused_before_a_node_starts(spark: SparkSession) -> None:
    with pytest.raises(errors.PlanError, match="protocol='grpc\\+verbs': TensorFlow 2.* without it; use one of grpc"):
        launch(within_a_node, workers=1, spark=spark, protocol="grpc+verbs")


def whereabouts(args: Any, ctx: Any) -> list[Any]:
    return [ctx.cluster_name, ctx.cluster_spec, [int(i) for batch in ctx.dataset(4) for i in batch["id"]]]


def test_several_clusters_run_at_once_and_one_after_another(spark: SparkSession) -> None:
    with launch(whereabouts, workers=1, name="first", spark=spark) as first:
        with launch(whereabouts, workers=1, name="second", spark=spark) as second:
            second.train(spark.range(10))
        first.train(spark.range(100, 120))
    with launch(whereabouts, workers=1, name="third", spark=spark) as third:
        third.train(spark.range(5))
    found = [cluster.result() for cluster in (first, second, third)]
    assert [sorted(ids) for _, _, ids in found] == [list(range(100, 120)), list(range(10)), list(range(5))]
    assert [name for name, _, _ in found] == ["first", "second", "third"]
    assert found[0][1] != found[1][1]


def test_more_nodes_than_spark_has_slots_are_refused_with_the_numbers(spark: SparkSession) -> None:
    with pytest.raises(errors.PlanError, match=r"needs 5 slots \(5 nodes\); Spark has 4"):
        launch(whereabouts, workers=3, ps=1, spark=spark, input_mode="tensorflow")
