"""Training on a DataFrame's rows on real executors: every row once a pass, and correct weights."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from tests.waiting import until
from tfos_nb import Cluster, errors, launch
from tfos_nb.spark.session import slots_busy

ROWS, WIDTH, BATCH = 512, 8, 32


def seen_ids(args: dict[str, Any], ctx: Any) -> list[list[int]]:
    """Read the requested number of passes; return the ids of each."""
    passes = []
    for _ in range(args["passes"]):
        ids: list[int] = []
        for batch in ctx.dataset(16, columns=["id"]):
            ids.extend(batch["id"].numpy().tolist())
        passes.append(ids)
    return passes


def every_row_once(results: dict[str, list[list[int]]], rows: int) -> bool:
    per_pass = zip(*results.values(), strict=True)
    return all(sorted(i for share in shares for i in share) == list(range(rows)) for shares in per_pass)


def fit_and_tell(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Train with Keras 3's fit on several workers; return this worker's batches of ids, and the weights."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(3)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((WIDTH,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        )
        model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="mse")
    before = [weight.tolist() for weight in model.get_weights()]
    ids: list[list[int]] = []
    keep = lambda batch: tf.py_function(lambda i: ids.append(i.numpy().tolist()), [batch["id"]], [])

    def pair(batch: Any) -> Any:
        with tf.control_dependencies([keep(batch)]):
            return tf.identity(batch["x"]), batch["y"]

    dataset = ctx.dataset(BATCH).map(pair)
    model.fit(dataset, epochs=args["epochs"], verbose=0)
    return {"before": before, "after": [weight.tolist() for weight in model.get_weights()], "ids": ids}


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    numbers = np.random.default_rng(1)
    x = numbers.normal(size=(ROWS, WIDTH)).astype("float32")
    y = (x[:, 0] * 2 - x[:, 1] + 0.1 * numbers.normal(size=ROWS)).astype("float32")
    rows = [(i, x[i].tolist(), float(y[i])) for i in range(ROWS)]
    cached = spark.createDataFrame(rows, "id long, x array<float>, y float").repartition(4).cache()
    cached.count()
    return cached


def numpy_sgd(frame: DataFrame, before: list[Any], batches: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    """Train the same model, in NumPy and float64, on the same global batches one after another."""
    rows = {row.id: row for row in frame.collect()}
    w1, b1, w2, b2 = (np.asarray(weight, dtype="float64") for weight in before)
    params = [w1, b1, w2, b2]
    velocity = [np.zeros_like(param) for param in params]
    for batch in batches:
        x = np.asarray([rows[i].x for i in batch], dtype="float64")
        y = np.asarray([[rows[i].y] for i in batch], dtype="float64")
        hidden = np.tanh(x @ params[0] + params[1])
        error = 2 * (hidden @ params[2] + params[3] - y) / len(batch)
        inner = (error @ params[2].T) * (1 - hidden**2)
        gradients = [x.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0)]
        for i, gradient in enumerate(gradients):
            velocity[i] = 0.9 * velocity[i] - 0.05 * gradient
            params[i] = params[i] + velocity[i]
    return params


def test_two_workers_end_alike_and_like_one_process_on_the_same_global_batches(
    spark: SparkSession, frame: DataFrame
) -> None:
    with launch(fit_and_tell, {"epochs": 2}, workers=2, spark=spark, name="alike") as cluster:
        cluster.train(frame, epochs=2)
    one, two = cluster.results()["worker:0"], cluster.results()["worker:1"]
    assert one["after"] == two["after"]
    assert sorted(i for ids in (one["ids"], two["ids"]) for batch in ids for i in batch) == sorted(
        2 * list(range(ROWS))
    )
    halves = [pair for worker in (one, two) for pair in [_halves(worker["ids"])]]
    steps = max(len(half) for half in halves)
    global_batches = [[i for half in halves if step < len(half) for i in half[step]] for step in range(steps)]
    expected = numpy_sgd(frame, one["before"], global_batches)
    for trained, wanted in zip(one["after"], expected, strict=True):
        np.testing.assert_allclose(np.asarray(trained), wanted, atol=1e-4)
    assert len(cluster.history["loss"]) == 2
    assert cluster.history["loss"][1] < cluster.history["loss"][0]


def _halves(batches: list[list[int]]) -> list[list[int]]:
    """Cut a worker's batches as MultiWorkerMirroredStrategy does: two steps of half the global size each."""
    half = BATCH // 2
    return [batch[start : start + half] for batch in batches for start in range(0, len(batch), half)]


def count_rows_of_all(args: Any, ctx: Any) -> dict[str, Any]:
    import tensorflow as tf

    strategy = ctx.strategy()
    rows = sum(int(batch["id"].shape[0]) for batch in ctx.dataset(BATCH).as_numpy_iterator())
    total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(rows)))
    return {"spec": ctx.cluster_spec, "rows": int(total)}


def test_workers_on_ipv6_hosts_connect_to_each_other_and_are_fed(
    spark: SparkSession, frame: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    monkeypatch.setenv("TFOS_SERVER_HOST", "::1")
    with launch(count_rows_of_all, workers=2, spark=spark) as cluster:
        cluster.train(frame.select("id"))
    for result in cluster.results().values():
        assert [place.rpartition(":")[0] for place in result["spec"]["worker"]] == ["[::1]", "[::1]"]
        assert result["rows"] == ROWS


def fit_for_longer_than_is_fed(args: Any, ctx: Any) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
    seen: list[Any] = []
    told = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(sorted(logs)))
    history = model.fit(ctx.dataset(BATCH, x="x", y="y"), epochs=5, verbose=0, callbacks=[told]).history
    return {"loss": history["loss"], "seen": seen}


def test_a_fit_with_more_epochs_than_are_fed_ends_with_the_last_rows_and_says_so(
    spark: SparkSession, frame: DataFrame
) -> None:
    with launch(fit_for_longer_than_is_fed, workers=2, spark=spark, name="longer") as cluster:
        cluster.train(frame, epochs=2)
    one, two = cluster.results()["worker:0"], cluster.results()["worker:1"]
    assert one == two
    assert len(one["loss"]) == 2
    assert min(one["loss"]) > 0
    assert one["seen"] == [["loss"], ["loss"], []]
    assert cluster.history["loss"] == pytest.approx(one["loss"])
    assert len(cluster.history.epochs) == 2
    assert [(node.epoch, node.epochs) for node in cluster.snapshot().nodes] == [(2, 5), (2, 5)]
    assert "fit ends before epoch 3 of 5: no more rows were fed" in cluster.logs("worker:1")


def fit_by_numbers_of_steps(args: Any, ctx: Any) -> list[float]:
    import keras

    with ctx.strategy().scope():
        model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
    losses: list[float] = []
    for dataset in (ctx.dataset(ROWS, x="x", y="y"), ctx.dataset(ROWS, x="x", y="y").repeat()):
        losses += model.fit(dataset, epochs=2, steps_per_epoch=1, verbose=0).history["loss"]
    losses += model.fit(ctx.dataset(ROWS, x="x", y="y"), epochs=2, verbose=0).history["loss"]
    return losses


def test_a_fit_whose_epochs_find_no_rows_at_the_end_of_a_pass_says_so(spark: SparkSession, frame: DataFrame) -> None:
    with launch(fit_by_numbers_of_steps, workers=2, spark=spark) as cluster:
        cluster.train(frame, epochs=3)
        cluster.train(frame, epochs=2)  # repeat() has not taken its first pass
    assert [loss > 0 for loss in cluster.results()["worker:0"]] == [True, False, *[True] * 4], "as of a generator"
    (told,) = [line for line in cluster.logs("worker:1").splitlines() if "WARNING fit(" in line]
    assert "fit(steps_per_epoch=1) made 2 epochs of 1 passes over the rows" in told


def test_a_spill_that_grows_too_big_falls_back_to_spark(spark: SparkSession) -> None:
    with launch(seen_ids, {"passes": 3}, workers=2, spark=spark, spill_bytes=1000) as cluster:
        cluster.train(spark.range(2000), epochs=3)
    assert every_row_once(cluster.results(), 2000)
    assert "Spark will read them again" in cluster.logs()


def test_one_row_for_three_workers_does_not_hang(spark: SparkSession) -> None:
    with launch(seen_ids, {"passes": 2}, workers=3, spark=spark) as cluster:
        cluster.train(spark.range(1), epochs=2)
    assert every_row_once(cluster.results(), 1)


def test_if_nodes_hold_every_slot_their_tasks_leave_slots_for_feeding(spark: SparkSession) -> None:
    with launch(seen_ids, {"passes": 1}, workers=4, spark=spark) as cluster:
        cluster.train(spark.range(400))
    assert every_row_once(cluster.results(), 400)
    assert cluster.state.value == "DONE"


UNREAD = "none has taken a row that train() fed"


def returning_early(args: Any, ctx: Any) -> int:
    batch = next(iter(ctx.dataset(4)))
    return int(batch["id"].shape[0])


def test_a_main_that_returns_early_ends_the_feed(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    with launch(returning_early, workers=2, spark=spark, buffer_bytes=1000) as cluster:
        cluster.train(spark.range(200_000), epochs=5)
    assert cluster.results() == {"worker:0": 4, "worker:1": 4}
    assert UNREAD not in caplog.text


def never_reading(args: Any, ctx: Any) -> None: ...


def test_a_main_that_never_reads_its_feed_is_reported(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    with launch(never_reading, workers=1, spark=spark, name="deaf") as cluster:
        cluster.train(spark.range(10), epochs=2)
    assert f"cluster deaf: every main has returned, and {UNREAD}" in caplog.text


def placed(args: Any, ctx: Any) -> dict[str, Any]:
    import json

    return {"config": json.loads(os.environ["TF_CONFIG"]), "chief": ctx.is_chief, "workers": ctx.num_workers}


def test_tf_config_is_right_for_every_role(spark: SparkSession) -> None:
    with launch(placed, workers=2, chief=True, evaluator=True, spark=spark, input_mode="tensorflow") as cluster:
        pass
    results = cluster.results()
    assert {"chief:0", "worker:0", "worker:1"} <= set(results)
    for node, result in results.items():
        role, index = node.split(":")
        assert result["config"]["task"] == {"type": role, "index": int(index)}
        assert {name: len(at) for name, at in result["config"]["cluster"].items()} == {
            "chief": 1,
            "worker": 2,
            "evaluator": 1,
        }
        assert result["chief"] == (node == "chief:0")
    with pytest.raises(errors.PlanError, match="reads files itself"):
        cluster.train(spark.range(1))


def coordinate(args: Any, ctx: Any) -> float | None:
    """Run a ParameterServerStrategy loop: the chief gives steps, the others serve."""
    import tensorflow as tf

    if not ctx.is_chief:
        ctx.serve()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = tf.Variable(0.0)

    @tf.function
    def step() -> None:
        total.assign_add(1.0)

    for _ in range(args["steps"]):
        coordinator.schedule(step)
    coordinator.join()
    return float(total.numpy())


def test_parameter_servers_and_workers_serve_a_chief(spark: SparkSession) -> None:
    with launch(coordinate, {"steps": 40}, workers=2, ps=1, spark=spark, input_mode="tensorflow") as cluster:
        pass
    assert cluster.results() == {"chief:0": 40.0}
    assert cluster.result() == 40.0
    assert {node.status.value for node in cluster.snapshot().nodes} == {"DONE", "STOPPED"}


def convolve(args: Any, ctx: Any) -> list[Any]:
    """Fit, evaluate and predict with two convolutions, which cannot take a batch without rows by themselves."""
    import keras
    import tensorflow as tf

    layers = keras.layers
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential(
            [
                layers.Input((64,)),
                layers.Reshape((8, 8, 1)),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(2),
            ]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(ctx.dataset(16, x="x", y="y"), epochs=1, verbose=0)
    loss, _ = model.evaluate(ctx.dataset(16, x="x", y="y"), verbose=0)
    rows = model.predict(ctx.dataset(16, x="x"), verbose=0).shape[0]
    return [float(loss), rows]


@pytest.mark.parametrize("count", [1, 100])
def test_a_worker_without_a_row_takes_part_in_every_step(spark: SparkSession, count: int) -> None:
    numbers = np.random.default_rng(2)
    rows = [(numbers.random(64).astype("float32").tolist(), i % 2) for i in range(count)]
    one_partition = spark.createDataFrame(rows, "x array<float>, y int").coalesce(1)
    with launch(convolve, workers=2, spark=spark) as cluster:
        cluster.train(one_partition, epochs=3)
    taken = [node.rows for node in cluster.snapshot().nodes]
    results = list(cluster.results().values())
    assert sorted(taken) == [3 * (count // 2), 3 * (count - count // 2)]
    assert results[0] == results[1]
    assert results[0][1] == count
    assert np.isfinite(results[0][0])


def adapt_and_tell(args: Any, ctx: Any) -> dict[str, Any]:
    """Adapt a layer for numbers and a layer for words to the feed's rows, one pass each."""
    import keras

    with ctx.strategy().scope():
        numbers, words = keras.layers.Normalization(), keras.layers.TextVectorization()
        numbers.adapt(ctx.dataset(4, x="x"))
        words.adapt(ctx.dataset(4, x="t"))
    mean, variance = (np.ravel(value).tolist() for value in (numbers.mean, numbers.variance))
    return {"mean": mean, "variance": variance, "words": words.get_vocabulary()}


@pytest.mark.parametrize("count", [1, 9])
def test_layers_adapt_to_the_rows_that_all_workers_are_fed(spark: SparkSession, count: int) -> None:
    x = np.random.default_rng(2).random((count, 3)).astype("float32")
    rows = [(values.tolist(), " ".join(["a", "b", "c"][: 1 + number % 3])) for number, values in enumerate(x)]
    with launch(adapt_and_tell, workers=2, spark=spark) as cluster:
        cluster.train(spark.createDataFrame(rows, "x array<float>, t string").coalesce(1), epochs=2)
    first, second = cluster.results().values()
    assert first == second
    assert first["mean"] == pytest.approx(x.mean(axis=0).tolist(), rel=1e-5)
    assert first["variance"] == pytest.approx(x.var(axis=0).tolist(), rel=1e-4, abs=1e-7)
    assert first["words"] == ["", "[UNK]", *["a", "b", "c"][:count]]


def fit_lengths(args: Any, ctx: Any) -> int:
    import keras
    import tensorflow as tf

    def length_of(batch: dict[str, Any]) -> tuple[Any, Any]:
        length = tf.cast(tf.strings.length(batch["text"]), tf.float32)
        return tf.reshape(length / 1e6, (-1, 1)), tf.zeros((tf.shape(batch["id"])[0], 1))

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(ctx.dataset(64).map(length_of), verbose=0)
    return int(model.optimizer.iterations.numpy())


def test_rows_that_become_large_do_not_deadlock_nodes_that_wait_for_each_other(spark: SparkSession) -> None:
    """One node's memory is full, and it waits for the other one, whose rows come after more than fit in memory."""
    text = F.expr("if(id < 15000, 'y', repeat('x', 100000))").alias("text")
    frame = spark.range(0, 16400, 1, 1).select("id", text)
    with launch(fit_lengths, workers=2, spark=spark, buffer_bytes=16 << 20, feed_timeout=60) as cluster:
        cluster.train(frame)
    assert set(cluster.results().values()) == {-(-16400 // 64)}  # the steps of one process


def slowly(args: Any, ctx: Any) -> int:
    rows = 0
    for batch in ctx.dataset(8):
        rows += int(batch["id"].shape[0])
        if ctx.should_stop:
            break
        threading.Event().wait(0.2)
    return rows


def test_wait_keeps_its_timeout_while_another_thread_feeds(spark: SparkSession) -> None:
    cluster = launch(slowly, workers=1, spark=spark, buffer_bytes=100)
    feeding = threading.Thread(target=lambda: _quietly(lambda: cluster.train(spark.range(100_000))))
    feeding.start()
    assert until(lambda: cluster.snapshot().feed is not None)
    with pytest.raises(TimeoutError, match="still being fed after 0.5 s"):
        cluster.wait(0.5)
    cluster.stop()
    feeding.join()
    assert cluster.state.value == "STOPPED"


def _quietly(action: Any) -> None:
    with contextlib.suppress(errors.TfosError):
        action()


def test_an_interrupted_launch_leaves_nothing(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Cluster] = []

    def interrupted(self: Cluster) -> None:
        made.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Cluster, "wait_until_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(slowly, workers=2, spark=spark)
    assert made[0].state.ended
    assert not slots_busy(spark)
    with pytest.raises(errors.ClusterClosed):
        made[0].train(spark.range(1))


def place_of_models(args: Any, ctx: Any) -> str:
    return str(ctx.absolute_path("model.keras"))


def test_a_relative_model_dir_is_relative_to_the_drivers_directory(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = launch(place_of_models, spark=spark, input_mode="tensorflow", model_dir="models")
    assert cluster.result() == str(tmp_path / "models/model.keras")
