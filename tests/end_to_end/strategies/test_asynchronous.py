"""Parameter servers and a coordinator: every row once a pass, from Spark or other sources, and correct weights."""

from __future__ import annotations

import importlib.util
import os
import signal
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.end_to_end.strategies.programs import refusal
from tests.waiting import until
from tfos_nb import Cluster, errors, launch
from tfos_nb.spark.session import slots_busy

ROWS, WIDTH = 600, 4
HAS_TF_KERAS = importlib.util.find_spec("tf_keras") is not None
TRUTH = np.array([[1.0], [-2.0], [0.5], [3.0]], dtype="float32")


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    numbers = np.random.default_rng(5)
    x = numbers.normal(size=(ROWS, WIDTH)).astype("float32")
    y = (x @ TRUTH)[:, 0]
    rows = [(i, x[i].tolist(), float(y[i]), f"row {i}") for i in range(ROWS)]
    cached = spark.createDataFrame(rows, "id long, x array<float>, y float, name string").repartition(3).cache()
    cached.count()
    return cached


def train_a_line(args: dict[str, Any], ctx: Any) -> Any:
    """Train in a custom loop: variables on the ps, steps on the workers, rows from Spark, one main for all roles."""
    if not ctx.is_chief:
        return ctx.serve()
    import tensorflow as tf

    with ctx.strategy().scope():
        weights = tf.Variable(tf.zeros((WIDTH, 1)))
    rows = ctx.coordinator_dataset(16, columns=["id", "x", "y", "name"], shuffle=100)

    def step(batch: Any) -> dict[str, Any]:
        error = batch["x"] @ weights - batch["y"][:, None]
        gradient = 2 * tf.matmul(batch["x"], error, transpose_a=True) / tf.cast(tf.shape(error)[0], tf.float32)
        weights.assign_sub(0.05 * gradient)
        return {"ids": batch["id"], "names": batch["name"], "loss": tf.reduce_mean(error**2)}

    passes = []
    for epoch in range(args["passes"]):
        results = list(rows.steps(step))
        ctx.report(epoch=epoch + 1, loss=float(results[-1]["loss"]), epoch_end=True)
        passes.append(results)
    return {
        "ids": [[int(i) for result in results for i in result["ids"]] for results in passes],
        "names": sorted(name.decode() for result in passes[0] for name in result["names"]),
        "weights": weights.numpy(),
        "on": weights.device,
        "own": own_data(ctx),
        "keras": keras_fit(ctx, ctx.coordinator_dataset(own_rows)) if HAS_TF_KERAS else None,
        "refused": refusals(ctx),
    }


def own_rows() -> Any:
    """Rows that each worker makes itself."""
    import tensorflow as tf

    x = np.random.default_rng(5).normal(size=(ROWS, WIDTH)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, (x @ TRUTH)[:, 0])).batch(20).repeat()


def own_data(ctx: Any) -> dict[str, Any]:
    import tensorflow as tf

    numbers = ctx.coordinator_dataset(lambda: tf.data.Dataset.range(100).batch(7))
    with ctx.strategy().scope():
        total = tf.Variable(0, dtype=tf.int64)

    def add(batch: Any) -> None:
        total.assign_add(tf.reduce_sum(batch))

    nothing = list(numbers.steps(add))
    seen = [int(n) for batch in numbers.steps(lambda batch: batch) for n in batch]
    first = next(numbers.steps(lambda batch: tf.shape(batch)[0]))
    return {"total": int(total.numpy()), "seen": sorted(seen), "first": int(first), "steps": len(nothing)}


def keras_fit(ctx: Any, rows: Any) -> dict[str, Any]:
    """Keras' own fit under ParameterServerStrategy, which tf_keras supports and Keras 3 does not."""
    import tf_keras

    tf_keras.utils.set_random_seed(1)
    first = tf_keras.initializers.GlorotUniform(seed=1)  # 2.16 to 2.18 cannot draw a seed on Python 3.12
    with ctx.strategy().scope():
        dense = tf_keras.layers.Dense(1, use_bias=False, kernel_initializer=first, input_shape=(WIDTH,))
        model = tf_keras.Sequential([dense])
        model.compile(tf_keras.optimizers.SGD(0.05), "mse")
    creator = tf_keras.utils.experimental.DatasetCreator(rows)
    history = model.fit(creator, epochs=4, steps_per_epoch=ROWS // 20, verbose=0).history["loss"]
    return {"loss": history, "weights": model.get_weights()[0]}


def refusals(ctx: Any) -> dict[str, str]:
    import keras
    import tensorflow as tf

    with ctx.strategy().scope():
        model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    outside = tf.data.Dataset.range(3)

    def from_outside() -> Any:
        return outside

    return {
        "fit": refusal(lambda: model.fit(np.zeros((8, WIDTH)), np.zeros(8))),
        "sync": refusal(lambda: ctx.strategy("sync")),
        "mirrored": refusal(tf.distribute.MultiWorkerMirroredStrategy),
        "outside": refusal(lambda: ctx.coordinator_dataset(from_outside)),
        "sparse": refusal(lambda: ctx.coordinator_dataset(8, sparse=["x"])),
        "column": refusal(lambda: ctx.coordinator_dataset(8, columns=["nmae"])),
    }


@pytest.fixture(scope="module")
def line(spark: SparkSession, frame: DataFrame) -> Cluster:
    with launch(train_a_line, {"passes": 3}, workers=2, ps=1, spark=spark) as cluster:
        cluster.train(frame, epochs=3)
    return cluster


def test_a_coordinators_steps_see_every_row_once_a_pass_and_learn(line: Cluster) -> None:
    result = line.result()
    assert [sorted(ids) for ids in result["ids"]] == [list(range(ROWS))] * 3
    assert result["names"] == sorted(f"row {i}" for i in range(ROWS))
    assert "/job:ps/" in result["on"]
    np.testing.assert_allclose(result["weights"], TRUTH, atol=0.05)
    assert {node.node for node in line.snapshot().nodes if node.rows} == {"worker:0", "worker:1"}
    assert len(line.history["loss"]) == 3 + 4 * HAS_TF_KERAS  # tf_keras' fit reports its epochs itself
    assert "AutoGraph" not in line.logs(), "it would warn of what it cannot read"


def test_workers_may_make_their_own_data(line: Cluster) -> None:
    own = line.result()["own"]
    assert own["total"] == 2 * sum(range(100))
    assert own["seen"] == sorted([*range(100), *range(100)])
    assert (own["first"], own["steps"]) == (7, 2 * 15)


@pytest.mark.skipif(not HAS_TF_KERAS, reason="there is no tf_keras for this TensorFlow yet")
def test_tf_keras_fits_on_the_workers_own_data(line: Cluster) -> None:
    fitted = line.result()["keras"]
    assert fitted["loss"][-1] < fitted["loss"][0] / 10
    np.testing.assert_allclose(fitted["weights"], TRUTH, atol=0.1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("fit", "do not run under ParameterServerStrategy. Use tf_keras"),
        ("sync", "would wait without end in a cluster with parameter servers"),
        ("mirrored", "would wait without end in a cluster with parameter servers"),
        ("outside", "Make the dataset inside the function"),
        ("sparse", "coordinator_dataset does not support sparse"),
        ("column", "no column 'nmae' in the rows that are fed: they have id, x, y, name; did you mean 'name'?"),
    ],
)
def test_calls_that_would_hang_or_fail_with_parameter_servers_are_refused(
    line: Cluster, what: str, message: str
) -> None:
    assert message in line.result()["refused"][what]


def fit_on_fed_rows(args: Any, ctx: Any) -> Any:
    if not ctx.is_chief:
        return ctx.serve()
    return {"at": ctx.cluster_spec["ps"], **keras_fit(ctx, ctx.coordinator_dataset(20, x="x", y="y", repeat=True))}


@pytest.mark.slow
def test_tf_keras_fits_on_fed_rows_with_parameter_servers_on_the_driver(
    spark: SparkSession, frame: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFOS_SERVER_HOST", "localhost")  # a name, while Spark uses an address
    with launch(fit_on_fed_rows, workers=2, ps=1, spark=spark, driver_ps_nodes=True) as cluster:
        assert sum(stage.tasks for stage in slots_busy(spark)) == 3
        cluster.train(frame, epochs=2)
    fitted = cluster.result()
    assert [address.partition(":")[0] for address in fitted["at"]] == ["localhost"]  # the name that the executors use
    assert len(cluster.history["loss"]) == 4
    assert fitted["loss"][-1] < fitted["loss"][0] / 10
    np.testing.assert_allclose(fitted["weights"], TRUTH, atol=0.1)
    ps = next(node for node in cluster.snapshot().nodes if node.node == "ps:0")
    assert ps.executor == "driver"
    assert ps.pid is not None
    assert until(lambda: not os.path.exists(f"/proc/{ps.pid}"))


def until_the_ps_is_gone(args: Any, ctx: Any) -> None:
    if not ctx.is_chief:
        ctx.serve()
    import tensorflow as tf

    with ctx.strategy().scope():
        count = tf.Variable(0.0)
    numbers = ctx.coordinator_dataset(lambda: tf.data.Dataset.range(1 << 40))
    for step, _ in enumerate(numbers.steps(lambda n: count.assign_add(1.0))):
        ctx.report(step=step + 1)


def test_a_parameter_server_that_dies_is_named(spark: SparkSession) -> None:
    cluster = launch(until_the_ps_is_gone, workers=1, ps=1, spark=spark, input_mode="tensorflow")
    assert until(lambda: any(node.step for node in cluster.snapshot().nodes))
    ps = next(node for node in cluster.snapshot().nodes if node.node == "ps:0")
    assert ps.pid is not None
    os.kill(ps.pid, signal.SIGKILL)
    with pytest.raises(errors.NodeFailed, match="^ps:0 .*killed by SIGKILL") as caught:
        cluster.wait(60)
    assert caught.value.node == "ps:0"


def fail_on_a_null(args: Any, ctx: Any) -> Any:
    if not ctx.is_chief:
        return ctx.serve()
    rows = ctx.coordinator_dataset(4, columns=["value"])
    return [int(n) for n in rows.steps(lambda batch: batch["value"][0])]


def test_an_invalid_row_of_a_worker_is_reported_with_its_column(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(i if i != 70 else None,) for i in range(100)], "value long")
    with pytest.raises(errors.TfosError, match="column 'value' has a null") as caught:
        with launch(fail_on_a_null, workers=1, ps=1, spark=spark) as cluster:
            cluster.train(frame)
    assert "PyFunc" not in str(caught.value).splitlines()[0]


def forget_to_serve(args: Any, ctx: Any) -> Any:
    if ctx.is_chief:
        return str(ctx.strategy())
    return ctx.serve() if ctx.job_name == "worker" else None


def test_a_parameter_server_that_returns_without_a_server_is_named(spark: SparkSession) -> None:
    with pytest.raises(errors.NodeFailed, match="ps:0 .*its main has returned and left no TensorFlow server"):
        with launch(forget_to_serve, workers=1, ps=1, spark=spark, input_mode="tensorflow"):
            pass  # the failure is raised here or when the block is left


def between_graph_only(args: Any, ctx: Any) -> list[str]:
    return [refusal(ctx.coordinator), refusal(lambda: ctx.strategy("sync")), refusal(lambda: ctx.mesh(batch=3))]


def test_without_a_chief_a_coordinator_is_refused(spark: SparkSession) -> None:
    with launch(between_graph_only, workers=1, ps=1, chief=False, spark=spark, input_mode="tensorflow") as cluster:
        pass
    coordinator, sync, _ = cluster.result()
    assert "needs a chief that coordinates" in coordinator
    assert "would wait without end" in sync
    assert "and ps:0 does not" in cluster.results()["ps:0"][2]
