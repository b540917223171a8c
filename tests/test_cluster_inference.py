"""Inference through a running cluster: real executors, real nodes, each result beside its row."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.conftest import RunScript
from tfos_nb import Cluster, errors, launch

ROWS = 1003


def by_array(args: Any, ctx: Any) -> dict[str, Any]:
    """Answer with arrays and a tensor; return what came."""
    import tensorflow as tf

    rows, partitions = 0, set()
    for batch in ctx.requests(100):
        rows += batch.rows
        partitions.add(batch.partition)
        batch.reply({"twice": tf.constant(batch["id"]) * 2, "pair": batch["x"][:, :2]})
    return {"rows": rows, "partitions": sorted(partitions)}


def by_list(args: Any, ctx: Any) -> list[int]:
    """Answer as TensorFlowOnSpark's programs do; return the sizes of the batches."""
    feed = ctx.get_data_feed(train_mode=False)
    sizes = []
    while not feed.should_stop():
        rows = feed.next_batch(100)
        if rows:
            sizes.append(len(rows))
            feed.batch_results([(row, ctx.task_index) for row in rows])
    return sizes


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    x = "transform(sequence(0, 3), i -> cast(id + i as float)) AS x"
    cached = spark.range(0, ROWS, 1, 5).selectExpr("id", x, "cast(id as string) AS `a name`").cache()
    cached.count()
    return cached


@pytest.fixture(scope="module")
def answering(spark: SparkSession) -> Iterator[Cluster]:
    """Two nodes that answer with arrays; two slots are left for Spark's tasks."""
    cluster = launch(by_array, workers=2, spark=spark, name="answering")
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def crowded(spark: SparkSession) -> Iterator[Cluster]:
    """As many nodes as Spark has slots, which answer with lists. It is closed before the other cluster starts."""
    cluster = launch(by_list, workers=4, spark=spark, name="crowded")
    yield cluster
    cluster.close()


# --- every slot a node: TensorFlowOnSpark's usual shape -----------------------------------------------------------


def test_an_rdd_gets_its_results_in_order_and_in_its_partitions(spark: SparkSession, crowded: Cluster) -> None:
    rdd = spark.sparkContext.parallelize([f"{number},x" for number in range(ROWS)], 5)
    answers = crowded.inference(rdd)
    found = answers.glom().collect()
    assert [[row for row, _ in partition] for partition in found] == rdd.glom().collect()
    # This holds for the nodes' first partitions: a later job evens out their rows, and may skip the node with most.
    assert {node for partition in found for _, node in partition} == {0, 1, 2, 3}
    assert [row for row, _ in answers.take(3)] == ["0,x", "1,x", "2,x"]


def test_rows_and_tuples_and_empty_partitions_are_answered(
    spark: SparkSession, crowded: Cluster, frame: DataFrame
) -> None:
    pairs = spark.sparkContext.parallelize([([0.5, 1.0], 7), ([2.5], None)], 4)
    assert [row for row, _ in crowded.inference(pairs).collect()] == pairs.collect()
    rows = crowded.inference(frame.where("id < 3").rdd)
    assert [tuple(row) for row, _ in rows.collect()] == [tuple(row) for row in frame.where("id < 3").collect()]
    assert crowded.inference(spark.sparkContext.emptyRDD()).collect() == []


class DyingOnce:
    """Passes rows on; its first attempt at partition 1 kills itself by SIGKILL in the middle."""

    def __call__(self, rows: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for number, row in enumerate(rows):
            if number == 3000 and context.partitionId() == 1 and context.attemptNumber() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            yield row


def test_a_retried_task_gets_each_result_once(spark: SparkSession, crowded: Cluster) -> None:
    rdd = spark.sparkContext.parallelize(range(8000), 2).mapPartitions(DyingOnce())
    assert [row for row, _ in crowded.inference(rdd).collect()] == list(range(8000))


def test_wait_ends_the_nodes_and_later_inference_is_refused(spark: SparkSession, crowded: Cluster) -> None:
    crowded.wait()
    sizes = crowded.results()
    assert all(size <= 100 for node in sizes.values() for size in node)
    assert sum(size for node in sizes.values() for size in node) >= ROWS
    with pytest.raises(errors.ClusterClosed):
        crowded.inference(spark.sparkContext.parallelize([1]))


# --- DataFrames ---------------------------------------------------------------------------------------------------


def test_a_frame_keeps_its_columns_and_gains_those_of_the_results(answering: Cluster, frame: DataFrame) -> None:
    scored = answering.inference(frame, "twice long, pair array<float>")
    assert scored.columns == ["id", "x", "a name", "twice", "pair"]
    rows = scored.collect()
    assert [row.id for row in rows] == list(range(ROWS))
    assert all(row.twice == 2 * row.id and row.pair == [row.id, row.id + 1.0] for row in rows)
    assert scored.rdd.glom().map(len).collect() == frame.rdd.glom().map(len).collect()
    assert scored.where("id = 7").first()["twice"] == 14
    assert scored.orderBy("id", ascending=False).first()["twice"] == 2 * (ROWS - 1)


def test_keep_false_returns_only_the_results_and_columns_limits_the_input(answering: Cluster, frame: DataFrame) -> None:
    alone = answering.inference(frame, "twice long, pair array<double>", columns=["id", "x"], keep=False)
    assert alone.columns == ["twice", "pair"]
    assert alone.agg({"twice": "sum"}).first()[0] == ROWS * (ROWS - 1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"schema": None}, "needs the columns of the results, such as schema='prediction double'"),
        ({"schema": "no type here"}, "such as 'prediction double', got 'no type here'"),
        ({"schema": "id long"}, "the DataFrame has a column 'id' already"),
        ({"schema": "y long", "columns": ["idd"]}, "'idd' matches 0 of"),
        ({"schema": "y long", "columns": "id"}, "columns must be a list"),
        ({"schema": "y long", "qname": "valid"}, "the queue must be 'input', got 'valid'"),
        ({"schema": "y long", "feed_timeout": 0}, "feed_timeout must be .*, got 0"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_before_any_row_is_read(
    answering: Cluster, frame: DataFrame, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(errors.PlanError, match=told):
        answering.inference(frame, **given)


def test_data_that_is_neither_a_frame_nor_an_rdd_is_refused(spark: SparkSession, answering: Cluster) -> None:
    with pytest.raises(errors.PlanError, match="data must be a Spark DataFrame or an RDD, got a list"):
        answering.inference([1, 2])
    with pytest.raises(errors.PlanError, match="schema and columns need a DataFrame, got an RDD"):
        answering.inference(spark.sparkContext.parallelize([1]), "y long")


def test_a_missing_result_column_ends_the_cluster_and_both_sides_report_it(
    answering: Cluster, frame: DataFrame
) -> None:
    scored = answering.inference(frame, "thrice long, pair array<float>")
    with pytest.raises(Exception, match=r"the results have the columns pair, twice; the schema .* has thrice, pair"):
        scored.collect()
    with pytest.raises(errors.NodeFailed, match="the results have the columns pair, twice"):
        answering.wait()
    with pytest.raises(Exception, match="the results have the columns pair, twice|so it has ended"):
        scored.limit(1).collect()


# --- programs that go wrong ---------------------------------------------------------------------------------------


def one_short(args: Any, ctx: Any) -> None:
    feed = ctx.get_data_feed(False)
    while not feed.should_stop():
        feed.batch_results(feed.next_batch(10_000)[1:])


def one_too_many(args: Any, ctx: Any) -> None:
    feed = ctx.get_data_feed(False)
    while not feed.should_stop():
        feed.batch_results([0, *feed.next_batch(10_000)])


def returning_at_once(args: Any, ctx: Any) -> str:
    return "done"


@pytest.mark.parametrize(
    ("main", "told"),
    [
        (one_short, "worker:0: main asks for more rows, but 1 of partition 0 have no result"),
        (
            one_too_many,
            "worker:0: main must return one result for each row, got 101 results for 100 rows of partition 0",
        ),
    ],
)
def test_a_wrong_number_of_results_is_reported_on_both_sides(spark: SparkSession, main: Any, told: str) -> None:
    cluster = launch(main, workers=1, spark=spark)
    answers = cluster.inference(spark.sparkContext.parallelize(range(100), 1))
    with pytest.raises(Exception, match=told):
        answers.collect()
    with pytest.raises(errors.NodeFailed, match=told):
        cluster.wait()


def raising(args: Any, ctx: Any) -> None:
    for _ in ctx.requests(64):
        raise ValueError("this row is bad")


def test_a_main_that_raises_ends_the_users_job_and_frees_its_slots(spark: SparkSession) -> None:
    """The job does not retry each partition three times; each attempt would start a Python worker."""
    frame = spark.range(0, 1000, 1, 4)
    cluster = launch(raising, workers=2, spark=spark, name="bad")
    answers = cluster.inference(frame, "prediction double")
    with pytest.raises(errors.NodeFailed, match=r"^worker:. on .*ValueError: this row is bad") as told:
        answers.collect()
    assert ", in raising" in str(told.value), "the node's own traceback"
    assert told.value.__cause__ is None, "Java's stack of the cancelled job explains nothing"
    with pytest.raises(errors.NodeFailed, match="this row is bad"):
        cluster.wait()
    with pytest.raises(TypeError, match="cluster bad belongs to this process, and cannot be pickled or copied: take"):
        pickle.dumps(cluster)
    for action in (answers.collect, answers.count, answers.rdd.map(len).sum):
        with pytest.raises(errors.NodeFailed, match="this row is bad"):
            action()  # computed again, after the cluster has failed
    spark.newSession()  # puts PySpark's own conversion of errors back
    with pytest.raises(errors.NodeFailed, match="this row is bad"):
        answers.collect()
    with pytest.raises(errors.NodeFailed, match="this row is bad"), pytest.warns(UserWarning, match="toPandas"):
        answers.toPandas()
    launch(returning_at_once, workers=2, spark=spark, name="next").wait()


def answering_until_the_feed_ends(args: Any, ctx: Any) -> str:
    for batch in ctx.requests(64):
        batch.reply(batch["id"] * 2)
    return "done"


def test_using_a_result_of_an_ended_cluster_fails_at_once_with_the_reason(spark: SparkSession) -> None:
    """It fails by one attempt, not by the four that Spark makes of a failing task."""
    with launch(answering_until_the_feed_ends, workers=1, spark=spark, name="over") as cluster:
        late = cluster.inference(spark.range(0, 100, 1, 2), "twice long", keep=False)
    for _ in range(2):
        with pytest.raises(errors.ClusterClosed, match=r"^cluster over has ended: .*use them"):
            late.collect()
    launch(returning_at_once, workers=2, spark=spark, name="next").wait()


def test_ended_clusters_release_their_ports(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("TFOS_SERVER_PORT", str(port))
    for name in ("first", "second"):
        with launch(answering_until_the_feed_ends, workers=1, spark=spark, name=name) as cluster:
            cluster.inference(spark.range(3), "twice long", keep=False)


def test_the_cell_shows_the_nodes_error_not_the_cancelled_jobs(spark: SparkSession) -> None:
    with pytest.raises(errors.NodeFailed, match="this row is bad") as told:
        with launch(raising, workers=2, spark=spark, name="bad") as cluster:
            cluster.inference(spark.range(0, 1000, 1, 4), "prediction double").collect()
    assert "raising" in told.value.remote_traceback
    assert told.value.__cause__ is None
    with pytest.raises(KeyError, match="of the cell's own"):
        with launch(returning_at_once, workers=1, spark=spark, name="good"):
            raise KeyError("of the cell's own")


def test_inference_does_not_wait_for_a_main_that_returned(spark: SparkSession) -> None:
    with launch(returning_at_once, workers=1, spark=spark) as cluster:
        try:
            answers = cluster.inference(spark.sparkContext.parallelize(range(100), 1))
        except errors.ClusterClosed:
            pass  # main had returned already
        else:
            with pytest.raises(Exception, match="has returned|has ended|cannot be reached|was gone"):
                answers.collect()
    assert cluster.result() == "done"


def sleeping(args: Any, ctx: Any) -> None:
    while not ctx.should_stop:
        threading.Event().wait(0.1)


def test_a_main_that_never_reads_is_reported_after_the_timeout(spark: SparkSession) -> None:
    cluster = launch(sleeping, workers=1, spark=spark, feed_timeout=1.0)
    try:
        with pytest.raises(Exception, match=r"100 rows of partition 0 .* for 1 s. main has asked for none"):
            cluster.inference(spark.sparkContext.parallelize(range(100), 1)).collect()
        with pytest.raises(errors.PlanError, match="the queue must be 'input', got 'other'"):
            cluster.train(spark.range(3), qname="other")
    finally:
        cluster.stop()


# --- queues -------------------------------------------------------------------------------------------------------


def two_queues(args: Any, ctx: Any) -> dict[str, Any]:
    """Take training rows as lists, validation rows as tensors, and answer the rows of a third queue."""
    train, valid = ctx.get_data_feed(), 0
    rows: list[Any] = []
    while len(rows) < args["rows"]:
        rows += train.next_batch(args["rows"] - len(rows))
    train.terminate()
    for batch in ctx.dataset(10, queue="valid"):
        valid += int(np.sum(batch["id"].numpy()))
    for batch in ctx.requests(qname="ask"):
        batch.reply(batch["id"] + valid)
    return {"train": rows, "valid": valid}


def test_queues_are_fed_separately_and_a_terminated_one_takes_no_more_rows(spark: SparkSession) -> None:
    queues = ["input", "valid", "ask"]
    endless = spark.range(0, 10**9, 1, 1000).selectExpr("id AS value")
    with launch(two_queues, {"rows": 5}, workers=1, spark=spark, queues=queues, buffer_bytes=10_000) as cluster:
        cluster.train(endless, epochs=3)
        cluster.train(spark.range(10), qname="valid")
        answers = cluster.inference(spark.range(3), "sum long", qname="ask", keep=False)
        assert [row[0] for row in answers.collect()] == [45, 46, 47]
    assert cluster.result()["valid"] == 45
    assert len(cluster.result()["train"]) == 5


def asks_for_rows(args: Any, ctx: Any) -> dict[str, str]:
    calls = {
        "dataset": lambda: ctx.dataset(8),
        "validation": lambda: ctx.validation(8),
        "batches": ctx.batches,
        "get_data_feed": ctx.get_data_feed,
        "requests": ctx.requests,
        "coordinator_dataset": lambda: ctx.coordinator_dataset(8),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except errors.FeedFailed as error:
            said[name] = str(error)
    return said


def test_a_cluster_that_reads_files_refuses_rows_on_both_sides(spark: SparkSession, frame: DataFrame) -> None:
    with launch(asks_for_rows, workers=1, spark=spark, input_mode="tensorflow") as cluster:
        with pytest.raises(errors.PlanError, match="input_mode='tensorflow'"):
            cluster.inference(frame, "y long")
        cluster.wait(100)
    said = cluster.result()
    assert list(said) == ["dataset", "validation", "batches", "get_data_feed", "requests", "coordinator_dataset"]
    for name, text in said.items():
        assert text.startswith(f"ctx.{name}: worker:0 gets no rows from Spark, since the cluster was launched with ")
        assert "input_mode='tensorflow'" in text
        assert "ctx.read(…)" in text


# --- another Spark ------------------------------------------------------------------------------------------------


LOCAL = """
    from tfos_nb import launch, spark_session

    def main(args, ctx):
        for batch in ctx.requests(64):
            batch.reply({"twice": batch["id"] * 2})

    if __name__ == "__main__":
        spark = spark_session(2)
        with launch(main, workers=2, spark=spark) as cluster:
            rows = cluster.inference(spark.range(0, 500, 1, 3), "twice long").collect()
        assert [(row.id, row.twice) for row in rows] == [(i, 2 * i) for i in range(500)]
        from tfos_nb.errors import NodeFailed

        def failing(args, ctx):
            for batch in ctx.requests(10):
                raise ValueError("boom")

        try:
            with launch(failing, workers=2, spark=spark, name="failing") as cluster:
                cluster.inference(spark.range(9), "twice long").collect()
        except NodeFailed as error:  # this Spark tries no task again, so its error of the task comes first
            assert "in failing" in error.remote_traceback, error
            print("as it should be")
        spark.stop()
"""


@pytest.mark.slow
def test_local_spark_with_a_node_in_every_slot_answers(run_script: RunScript) -> None:
    assert "as it should be" in run_script(LOCAL).stdout
