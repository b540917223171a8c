"""Nodes leave at scheduled moments, and every row is still counted once per epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.faults import ROWS, Exit, counting_loop, sum_of_ids
from tfos_nb import errors, launch

pytestmark = pytest.mark.faults

EPOCHS = 3
BOTH = ("worker:0", "worker:1")
FIRST, IN_THE_MIDDLE = (1, 1), (2, 20)


def count(spark: SparkSession, folder: Path, *schedule: Exit, **options: Any) -> tuple[int, int]:
    """Count the rows while nodes leave by schedule; return the sum, and the number of generations."""
    args = {"epochs": EPOCHS, "pause": 0.0, "schedule": schedule}
    settings: dict[str, Any] = {
        "restarts": len(schedule),
        "heartbeat_timeout": 4.0,
        "model_dir": str(folder),
        **options,
    }
    with launch(counting_loop, args, spark=spark, **{"workers": 2, **settings}) as cluster:
        cluster.train(spark.range(0, ROWS, 1, 4), epochs=EPOCHS)
    total, generation = cluster.result()
    return total, generation


@pytest.mark.parametrize("moment", [FIRST, IN_THE_MIDDLE])
@pytest.mark.parametrize("how", ["exit", "kill", "freeze", "kill the supervisor"])
@pytest.mark.parametrize("node", BOTH)
def test_every_row_is_counted_when_one_node_leaves(
    spark: SparkSession, tmp_path: Path, node: str, how: str, moment: tuple[int, int]
) -> None:
    assert count(spark, tmp_path, Exit(node, *moment, how)) == (sum_of_ids(EPOCHS), 2)


def test_a_node_stays_when_its_executor_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    assert count(spark, tmp_path, Exit("worker:0", *IN_THE_MIDDLE, "kill the executor")) == (sum_of_ids(EPOCHS), 1)


@pytest.mark.parametrize("how", ["kill", "kill the supervisor"])
def test_every_row_is_counted_when_both_nodes_leave_at_once(spark: SparkSession, tmp_path: Path, how: str) -> None:
    schedule = [Exit(node, *IN_THE_MIDDLE, how) for node in BOTH]
    total, generation = count(spark, tmp_path, *schedule)
    assert total == sum_of_ids(EPOCHS)
    assert generation in (2, 3)


def test_every_row_is_counted_when_a_restarted_node_leaves_again(spark: SparkSession, tmp_path: Path) -> None:
    """It leaves in the first batch of each generation, in any epoch. The next one continues from its last state."""
    schedule = [Exit("worker:1", epoch, 1, "kill", generation) for generation in (1, 2, 3) for epoch in (1, 2, 3)]
    total, generation = count(spark, tmp_path, *schedule, restarts=3)
    assert (total, generation) == (sum_of_ids(EPOCHS), 4)


@pytest.mark.parametrize("node", BOTH)
def test_the_other_worker_continues_without_a_lost_host(spark: SparkSession, tmp_path: Path, node: str) -> None:
    leaves = Exit(node, *IN_THE_MIDDLE, "kill the host")
    total, generation = count(spark, tmp_path, leaves, min_workers=1)
    assert total == sum_of_ids(EPOCHS)
    assert generation in (2, 3), "the second where it came too late to join"


def test_a_node_that_raises_is_not_restarted(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(errors.NodeFailed, match="worker:1 raises in batch 20 of epoch 2"):
        count(spark, tmp_path, Exit("worker:1", *IN_THE_MIDDLE, "raise"))
