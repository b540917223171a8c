"""A cluster gets more or fewer workers while it trains, and every row is counted as often as it was fed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from tests.faults import ROWS, counting_fit, counting_loop, counting_steps, sum_of_ids
from tests.waiting import until
from tfos_nb import Cluster, errors, launch
from tfos_nb.state.cluster_state import NodeState

COORDINATED: dict[str, Any] = {"workers": 1, "ps": 1, "driver_ps_nodes": True, "restarts": 1}
"""A cluster that leaves two of four slots."""


def node(cluster: Cluster, name: str) -> NodeState:
    return next(one for one in cluster.snapshot().nodes if one.node == name)


def status_of(cluster: Cluster, name: str) -> str:
    return node(cluster, name).status.value


def takes_part(cluster: Cluster, name: str) -> bool:
    return name in cluster._controller.feeds.nodes


def when_rows_are_taken(cluster: Cluster, rows: int, action: Callable[[], object]) -> threading.Thread:
    """Call ``action`` in a thread, once the first worker has taken ``rows`` rows."""

    def wait() -> None:
        assert until(lambda: node(cluster, "worker:0").rows >= rows)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_coordinator_gives_steps_to_a_new_worker_and_no_node_restarts(spark: SparkSession) -> None:
    rows = spark.range(0, ROWS, 1, 4)
    with launch(counting_steps, {"rows": ROWS, "epochs": 5}, spark=spark, **COORDINATED) as cluster:
        before = {one.node: one.pid for one in cluster.snapshot().nodes}
        cluster.train(rows, epochs=2)
        cluster.scale(workers=2)
        assert until(lambda: status_of(cluster, "worker:1") == "TRAINING")
        cluster.train(rows)  # the coordinator already waited for this pass
        assert until(lambda: takes_part(cluster, "worker:1"))
        cluster.train(rows, epochs=2)
        after = {one.node: one.pid for one in cluster.snapshot().nodes}
        assert node(cluster, "worker:1").rows > ROWS // 4
    found = cluster.result()
    assert (found["seen"] == 5).all(), "every row once a pass"
    assert found["generation"] == 1
    assert {name: after[name] for name in before} == before, "no process has been replaced"
    assert cluster.plan.workers == 2


@pytest.mark.faults
def test_rows_kept_for_later_passes_are_shared_with_a_new_worker(spark: SparkSession) -> None:
    rows = spark.range(0, ROWS, 1, 4)
    with launch(counting_steps, {"rows": ROWS, "epochs": 8}, spark=spark, **COORDINATED) as cluster:
        scaling = when_rows_are_taken(cluster, ROWS // 4, lambda: cluster.scale(workers=2))
        cluster.train(rows, epochs=8)
        scaling.join()
        assert node(cluster, "worker:1").rows > ROWS // 4
    assert (cluster.result()["seen"] == 8).all()
    assert cluster.result()["generation"] == 1


@pytest.mark.slow
def test_synchronous_workers_continue_with_a_new_one_from_their_saved_state(
    spark: SparkSession, tmp_path: Path
) -> None:
    with launch(counting_loop, {"epochs": 6}, workers=1, spark=spark, restarts=1, model_dir=str(tmp_path)) as cluster:
        scaling = when_rows_are_taken(cluster, ROWS // 4, lambda: cluster.scale(workers=2))
        cluster.train(spark.range(0, ROWS, 1, 4), epochs=6)
        scaling.join()
    results = cluster.results()
    assert results == dict.fromkeys(["worker:0", "worker:1"], (sum_of_ids(6), 2))


@pytest.mark.faults
def test_synchronous_workers_continue_without_a_removed_one(spark: SparkSession, tmp_path: Path) -> None:
    options: dict[str, Any] = {"restarts": 1, "model_dir": str(tmp_path)}
    with launch(counting_loop, {"epochs": 6}, workers=2, spark=spark, **options) as cluster:
        scaling = when_rows_are_taken(cluster, ROWS // 4, lambda: cluster.scale(workers=1))
        cluster.train(spark.range(0, ROWS, 1, 4), epochs=6)
        scaling.join()
        assert status_of(cluster, "worker:1") == "STOPPED"
    assert cluster.results() == {"worker:0": (sum_of_ids(6), 2)}


@pytest.mark.faults
def test_keras_fit_continues_with_a_new_worker_at_the_next_epoch(spark: SparkSession, tmp_path: Path) -> None:
    data = spark.range(0, ROWS, 1, 4).selectExpr("id", "double(0) as y")
    options: dict[str, Any] = {"restarts": 1, "model_dir": str(tmp_path)}
    with launch(counting_fit, {"epochs": 8}, workers=1, spark=spark, **options) as cluster:
        scaling = when_rows_are_taken(cluster, ROWS // 4, lambda: cluster.scale(workers=2))
        cluster.train(data, epochs=8)
        scaling.join()
    total, generation, _ = cluster.result()
    assert (total, generation) == (sum_of_ids(8), 2)


@pytest.mark.faults
def test_a_shuffled_fit_goes_on_with_two_of_three_workers_and_then_with_three(spark: SparkSession) -> None:
    data = spark.range(0, ROWS, 1, 4).selectExpr("id", "double(id) as y")
    args = {"epochs": 8, "pause": 0.0, "pause_step": 0.05, "shuffle": 200}

    def is_scaled(cluster: Cluster, generation: int, workers: int) -> bool:
        if cluster.snapshot().generation != generation or not node(cluster, "worker:0").step:
            return False
        threading.Event().wait(0.5)  # within an epoch
        try:
            cluster.scale(workers=workers)
        except errors.PlanError as error:  # the tasks of a feed take the slots for some seconds
            return not str(error).startswith("needs")
        return True

    def fewer_and_more(cluster: Cluster) -> None:
        for generation, workers in ((1, 2), (2, 3)):
            assert until(partial(is_scaled, cluster, generation, workers))

    with launch(counting_fit, args, workers=3, spark=spark, restarts=1) as cluster:
        scaling = threading.Thread(target=fewer_and_more, args=(cluster,))
        scaling.start()
        cluster.train(data, epochs=8)
        scaling.join()
    total, generation, _, count, first, epochs, losses = cluster.result()
    assert (total, generation) == (sum_of_ids(8), 3)
    assert cluster.results().keys() == {"worker:0", "worker:1", "worker:2"}
    assert len(set(map(str, cluster.results().values()))) == 1
    assert count >= 8 * (ROWS // 32), "no step is done twice"
    assert count <= 8 * (ROWS // 32 + 1) + 4, "and a rest of an epoch may have a step more"
    assert first[1] > 0, "it goes on within an epoch"
    assert epochs == list(range(8))
    squares = float((np.arange(ROWS, dtype=float) ** 2).mean())
    np.testing.assert_allclose(losses, [squares] * 8, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (
            {"restarts": 1},
            [
                ("3", "workers must be a whole number, 0 or more"),
                (0, "a cluster needs at least one worker or a chief"),
                (9, "needs 8 slots"),
            ],
        ),
        ({}, [(2, "starts the nodes again, which needs a restart: launch the cluster with restarts=1 or more")]),
        ({"restarts": 1, "min_workers": 1}, [(0, "at least one worker")]),
    ],
)
def test_an_impossible_scale_is_refused_and_the_cluster_continues(
    spark: SparkSession, options: dict[str, Any], refused: list[tuple[Any, str]]
) -> None:
    with launch(counting_loop, {"epochs": 1}, workers=1, spark=spark, **options) as cluster:
        for workers, said in refused:
            with pytest.raises(errors.PlanError, match=said):
                cluster.scale(workers=workers)
        assert cluster.plan.workers == 1
        cluster.train(spark.range(0, ROWS, 1, 4))
    assert cluster.result()[0] == sum_of_ids(1)
