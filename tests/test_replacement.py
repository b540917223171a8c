"""Workers of a coordinator are lost while it trains: the others go on, and the lost one's rows are in the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

from tests.faults import Killer, counting_steps, its_supervisor, itself
from tfos_nb import launch

ROWS = 3000


@pytest.mark.parametrize("what", [itself, pytest.param(its_supervisor, marks=pytest.mark.faults)])
def test_a_lost_worker_is_replaced_while_the_others_go_on(spark: SparkSession, what: Callable[[int], int]) -> None:
    args = {"rows": ROWS, "epochs": 3}
    with launch(counting_steps, args, chief=True, workers=2, ps=1, spark=spark, restarts=1) as cluster:
        before = {node.node: node.pid for node in cluster.snapshot().nodes}
        killer = Killer(cluster, "worker:1", ROWS // 4, what)
        cluster.train(spark.range(0, ROWS, 1, 4), epochs=2)
        cluster.train(spark.range(0, ROWS, 1, 4))
        after = {node.node: node.pid for node in cluster.snapshot().nodes}
    found = cluster.result()
    assert killer.killed
    assert found["generation"] == 1
    assert found["seen"].min() >= 3, "no row is lost"
    assert found["seen"].max() <= 4, "those of the lost worker's pass may have been through a step before"
    assert {name for name in before if before[name] != after[name]} == {"worker:1"}
    assert "RECOVERING" in killer.statuses
