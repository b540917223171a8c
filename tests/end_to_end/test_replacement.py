"""Workers of a coordinator are lost while it trains: the others continue, and no row is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.faults import Killer, counting_steps, its_supervisor, itself, itself_for_good
from tfos_nb import Cluster, launch
from tfos_nb.state.cluster_state import ClusterState

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


def counting_with_a_question_never_answered(args: dict[str, Any], ctx: Any) -> Any:
    """Imitate a worker of the first generation that dies while TensorFlow waits for its answer."""
    if ctx.is_chief and ctx.generation == 1:
        from tensorflow.python.eager import context

        from tfos_nb.runtime.program import peers

        def never(*given: Any, **named: Any) -> None:
            Path(args["asked"]).touch()
            threading.Event().wait()

        peers._NO_ANSWER = 2.0  # type: ignore[misc]
        context.context().update_server_def = never
    return counting_steps(args, ctx)


class SecondKiller(Killer):
    """Kills a second worker while TensorFlow waits for the first one."""

    def __init__(self, cluster: Cluster, asked: Path) -> None:
        self.asked = asked
        self.killed_too = 0
        super().__init__(cluster, "worker:1", ROWS // 8, itself)

    def look(self, snapshot: ClusterState) -> None:
        if self.asked.exists() and not self.killed_too:
            self.killed_too = next(node.pid for node in snapshot.nodes if node.node == "worker:0") or 0
            os.kill(self.killed_too, signal.SIGKILL)


@pytest.mark.faults
def test_a_coordinator_that_waits_for_a_lost_worker_causes_a_new_generation(
    spark: SparkSession, tmp_path: Path
) -> None:
    args = {"rows": ROWS, "epochs": 1, "asked": str(tmp_path / "asked")}
    main = counting_with_a_question_never_answered
    with launch(main, args, chief=True, workers=2, ps=1, spark=spark, restarts=3) as cluster:
        killer = SecondKiller(cluster, tmp_path / "asked")
        cluster.train(spark.range(0, ROWS, 1, 4))
    found = cluster.result()
    assert killer.killed
    assert killer.killed_too
    assert found["generation"] == 2
    assert set(found["seen"]) == {1}, "the new generation has seen each row once"


class Freezer(Killer):
    """Stops a node's process, and notes the chief's steps until the driver notices."""

    def __init__(self, cluster: Cluster, node: str, rows: int) -> None:
        self.steps: list[int] = []
        super().__init__(cluster, node, rows, itself_for_good, signal.SIGSTOP)

    def look(self, snapshot: ClusterState) -> None:
        chief = next(node for node in snapshot.nodes if node.node == "chief:0")
        if self.killed and "RECOVERING" not in self.statuses:
            self.steps.append(chief.step or 0)


@pytest.mark.faults
def test_a_frozen_worker_stops_neither_the_chief_nor_the_others(spark: SparkSession) -> None:
    rows, options = 4 * ROWS, {"chief": True, "workers": 2, "ps": 1, "restarts": 1, "heartbeat_timeout": 6.0}
    with launch(counting_steps, {"rows": rows, "epochs": 1}, spark=spark, **options) as cluster:
        freezer = Freezer(cluster, "worker:1", rows // 16)
        cluster.train(spark.range(0, rows, 1, 8))
    found = cluster.result()
    assert freezer.killed
    assert found["generation"] == 1
    assert found["seen"].min() >= 1, "no row is lost"
    assert freezer.steps[-1] - freezer.steps[0] > 50, "many more than those that were under way"
