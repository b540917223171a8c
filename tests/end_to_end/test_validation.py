"""Validation rows, class weights, sparse vectors, and feeds that main ends early."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.versions import sparse_vectors
from tfos_nb import errors, launch

WIDTH, BATCH = 3, 32


def table(spark: SparkSession, rows: int, partitions: int, seed: int) -> DataFrame:
    numbers = np.random.default_rng(seed)
    x = numbers.normal(size=(rows, WIDTH)).astype("float32")
    y = (x @ [1.0, -2.0, 0.5] + 0.1 * numbers.normal(size=rows)).astype("float32")
    content = [(i, x[i].tolist(), float(y[i])) for i in range(rows)]
    return spark.createDataFrame(content, "id long, x array<float>, y float").coalesce(partitions)


def arrays(frame: DataFrame) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rows = frame.collect()
    return np.array([row.x for row in rows]), np.array([row.y for row in rows])


def fit_and_validate(args: dict[str, Any], ctx: Any) -> list[Any]:
    """Fit once for each call of train; return the losses on the validation rows, with the weights of each epoch."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(3)
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), loss="mse", metrics=["mae"])
    told = []
    for queue, epochs in args["epochs"].items():
        weights: list[Any] = []
        keep = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, to=weights: to.append([w.tolist() for w in model.get_weights()])
        )
        rows, held_out = (give(BATCH, x="x", y="y", queue=queue) for give in (ctx.dataset, ctx.validation))
        history = model.fit(rows, validation_data=held_out, epochs=epochs, verbose=0, callbacks=[keep]).history
        told.append({"weights": weights, **history, "rows": sum(int(y.shape[0]) for _, y in held_out)})
    return told


def losses(weights: list[Any], frame: DataFrame) -> tuple[float, float]:
    """Compute the mean squared and absolute error in float64, in one process."""
    x, y = arrays(frame)
    error = x @ np.asarray(weights[0])[:, 0] + weights[1][0] - y
    return float(np.mean(error**2)), float(np.mean(np.abs(error)))


def test_the_validation_of_each_epoch_equals_that_of_one_process_on_all_rows(spark: SparkSession) -> None:
    training = table(spark, 300, 3, 1).cache()
    sets = [table(spark, 37, 1, 2), table(spark, 211, 5, 3)]  # the first one has a single partition
    passes = {"input": 2, "other": 3}
    how = {"workers": 2, "queues": list(passes), "name": "validated"}
    with launch(fit_and_validate, {"epochs": passes}, spark=spark, **how) as cluster:
        for held_out, (queue, epochs) in zip(sets, passes.items(), strict=True):
            cluster.train(training, epochs=epochs, validation=held_out, qname=queue)
    one, two = cluster.results()["worker:0"], cluster.results()["worker:1"]
    for number, held_out in enumerate(sets):
        assert one[number]["weights"] == two[number]["weights"]
        assert one[number]["rows"] + two[number]["rows"] == held_out.count()
        for epoch, weights in enumerate(one[number]["weights"]):
            expected = losses(weights, held_out)
            for found in (one, two):
                told = found[number]["val_loss"][epoch], found[number]["val_mae"][epoch]
                assert told == pytest.approx(expected, abs=1e-4)
    assert sorted([one[0]["rows"], two[0]["rows"]]) == [18, 19]
    assert len(cluster.history["val_loss"]) == 5


def stop_early(args: Any, ctx: Any) -> dict[str, Any]:
    """End one feed by model.stop_training within the first pass, one by EarlyStopping, one in a custom loop."""
    import keras
    import tensorflow as tf

    class StopAtThird(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 2

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), loss="mse")
    pair = lambda row: (tf.cast(row["id"], tf.float32)[:, None] * 0, row["id"] * 0)
    first = model.fit(ctx.dataset(64).map(pair), epochs=3, verbose=0, callbacks=[StopAtThird()]).history
    patient = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0)
    second = model.fit(ctx.dataset(64, queue="other").map(pair), epochs=9, verbose=0, callbacks=[patient]).history
    taken = 0
    for batch in ctx.dataset(16):
        taken += int(batch["id"].shape[0])
        if taken >= 160:
            break
    ctx.stop_feeding()
    after = [int(batch["id"].shape[0]) for batch in ctx.dataset(1000)]
    return {"first": first["loss"], "second": second["loss"], "taken": taken, "after": after}


class Slowly:
    """Passes rows on, with a pause after each batch. Reading all of them would take too long."""

    def __call__(self, batches: Any) -> Any:
        import time

        for batch in batches:
            time.sleep(0.05)
            yield batch


def test_a_feed_that_main_ends_early_does_not_read_the_rest(spark: SparkSession) -> None:
    endless = spark.range(0, 400_000_000, 1, 2).mapInArrow(Slowly(), "id long")
    read = []
    how = {"buffer_bytes": 1 << 20, "queues": ["input", "other"], "name": "early"}
    with launch(stop_early, workers=2, spark=spark, **how) as cluster:
        cluster.train(endless, epochs=3)
        read.append(cluster.snapshot().feed)
        cluster.train(spark.range(128), epochs=9, qname="other")
        cluster.train(endless, epochs=2)
        read.append(cluster.snapshot().feed)
        cluster.train(spark.range(50))
    assert len(read) == 2
    assert all(feed is not None and feed.rows < 10_000_000 for feed in read)
    results = cluster.results()
    assert sum(sum(result["after"]) for result in results.values()) == 50
    for result in results.values():
        assert result["taken"] >= 160
        assert len(result["first"]) == 1
        assert len(result["second"]) == 2
    assert len(cluster.history["loss"]) == 3


WEIGHTS = {0: 0.5, 2: 4.0}


def fit_weighed(args: Any, ctx: Any) -> list[Any]:
    """Return the loss of a pass, with class weights given to fit or to the dataset, for dense and sparse rows."""
    import keras
    import tensorflow as tf

    told = []
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # only one is possible in a process
    for sparse in (False, True):
        for by_dataset in (False, True):
            keras.utils.set_random_seed(3)
            with strategy.scope():
                model = keras.Sequential([keras.layers.Input((6,), sparse=sparse), keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.0), loss="mse")
            rows = ctx.dataset(
                16,
                x="features",
                y="kind",
                class_weight=WEIGHTS if by_dataset else None,
                sparse=["features"] if sparse else [],
            )
            if sparse:
                assert isinstance(rows.element_spec[0], tf.SparseTensorSpec)
            weights = None if by_dataset else {**WEIGHTS, 1: 1.0}
            (loss,) = model.fit(rows, epochs=1, verbose=0, class_weight=weights).history["loss"]
            told.append([[weight.tolist() for weight in model.get_weights()], loss])
    return told


@sparse_vectors
def test_class_weights_and_sparse_vectors_give_the_loss_of_the_formula(spark: SparkSession) -> None:
    from pyspark.ml.linalg import SparseVector, Vectors

    numbers = np.random.default_rng(4)
    rows: list[tuple[Any, int]] = []
    for number in range(90):
        entries = {int(place): float(numbers.normal()) for place in numbers.choice(6, number % 4, replace=False)}
        dense = Vectors.dense([entries.get(place, 0.0) for place in range(6)])
        rows.append((SparseVector(6, entries) if number % 3 else dense, number % 3))
    frame = spark.createDataFrame(rows, ["features", "kind"]).repartition(3)
    with launch(fit_weighed, workers=2, spark=spark, name="weighed") as cluster:
        cluster.train(frame, epochs=4)
    assert cluster.results()["worker:0"] == cluster.results()["worker:1"]
    x, y = np.array([row[0].toArray() for row in rows]), np.array([row[1] for row in rows], dtype=float)
    weight = np.array([WEIGHTS.get(row[1], 1.0) for row in rows])
    for (kernel, bias), loss in cluster.result():
        squares = (x @ np.asarray(kernel)[:, 0] + bias[0] - y) ** 2
        assert loss == pytest.approx(float(np.mean(weight * squares)), abs=1e-5)
        assert abs(loss - float(np.mean(squares))) > 0.1


# --- bad input --------------------------------------------------------------------------------------------------------


def wait_for_rows(args: Any, ctx: Any) -> int:
    rows = ctx.dataset(16, columns=["id"])
    if args == "validates":
        ctx.validation(16)
    return sum(1 for _ in rows)


def test_invalid_validation_rows_are_refused_before_anything_is_read(spark: SparkSession) -> None:
    training = table(spark, 20, 1, 1)
    stream = spark.readStream.format("rate").load()
    with pytest.raises(errors.FeedFailed, match="the validation data have no rows"):
        with launch(wait_for_rows, workers=1, spark=spark, name="refusing") as cluster:
            for validation, words in (
                (training.drop("y"), r"have no column 'y'; they have id, x.*df\.drop\('y'\)"),
                (
                    training.withColumn("y", training.y.cast("double")),
                    r"'y' is double in the validation rows",
                ),
                (stream, "validation is a stream, which has no end"),
                ([1, 2], "a list cannot be fed"),
            ):
                with pytest.raises(errors.PlanError, match=words):
                    cluster.train(training, validation=validation)
            for words, arguments in (("epochs must be 1 for a stream, got 2: its rows come once", {"epochs": 2}),):
                with pytest.raises(errors.PlanError, match=words):
                    cluster.train(stream, **arguments)
            with pytest.raises(
                errors.PlanError, match=r"column 'timestamp' is timestamp, which cannot become a tensor"
            ):
                cluster.train(stream)
            cluster.train(training, validation=training.where("id < 0"))


def test_validation_rows_of_another_length_and_missing_ones_are_reported(spark: SparkSession) -> None:
    short = spark.sparkContext.parallelize([{"id": 1, "x": [1.0]}], 1)
    long = spark.sparkContext.parallelize([{"id": 1, "x": [1.0, 2.0]}], 1)
    with pytest.raises(errors.FeedFailed, match="differ from the validation rows: 'x' holds lists of 1, not 2"):
        with launch(wait_for_rows, workers=1, spark=spark) as cluster:
            cluster.train(short, validation=long)
    with pytest.raises(errors.NodeFailed, match=re.escape("cluster.train(df, validation=df2), or --validation VAR")):
        with launch(wait_for_rows, "validates", workers=1, spark=spark) as cluster:
            cluster.train(short)
            cluster.wait()
