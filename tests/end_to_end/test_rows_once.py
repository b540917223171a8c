"""Every row is fed exactly once a pass, on real executors, despite uneven partitions, dying tasks and broken input.

All tests share one cluster, whose nodes write the ids of each pass to files.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark import RDD
from pyspark.sql import DataFrame, SparkSession

from tests.waiting import until
from tfos_nb import Cluster, launch

PASSES = 16  # one more than all tests together feed


def write_down(args: Any, ctx: Any) -> None:
    """Read the passes, and write the ids of each one to a file."""
    for number in range(PASSES):
        ids = [int(i) for batch in ctx.dataset(256, columns=["id"]) for i in batch["id"].numpy()]
        part = Path(ctx.model_dir, f"{ctx.task_index}-{number}.part")
        part.write_text(json.dumps(ids))
        part.rename(part.with_suffix(".json"))


@dataclass
class Reading:
    """A cluster of two workers, and the number of passes that they have read."""

    cluster: Cluster
    folder: Path
    passes: int = 0

    def train(self, data: DataFrame | RDD[Any], epochs: int, **options: Any) -> list[list[list[int]]]:
        """Feed the rows; return the ids that each worker saw in each pass."""
        self.cluster.train(data, epochs=epochs, **options)
        self.passes += epochs
        return self.seen(range(self.passes - epochs, self.passes))

    def seen(self, numbers: range) -> list[list[list[int]]]:
        """Return the ids that each worker saw in the given passes, once these are over."""
        files = [[self.folder / f"{worker}-{number}.json" for worker in range(2)] for number in numbers]
        assert until(lambda: all(file.exists() for both in files for file in both))
        return [[json.loads(file.read_text()) for file in both] for both in files]


@pytest.fixture(scope="module")
def reading(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    folder = tmp_path_factory.mktemp("passes")
    with launch(write_down, workers=2, spark=spark, model_dir=str(folder), name="reading") as cluster:
        yield Reading(cluster, folder)


@pytest.fixture
def batch_rows(spark: SparkSession) -> Iterator[Any]:
    """Set how many rows Spark gives to Python at once."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    yield lambda rows: spark.conf.set(name, str(rows))
    spark.conf.unset(name)


def every_row_once(passes: list[list[list[int]]], rows: int) -> bool:
    return all(sorted(i for share in shares for i in share) == list(range(rows)) for shares in passes)


def test_skewed_and_empty_partitions_lose_no_row_in_any_pass(spark: SparkSession, reading: Reading) -> None:
    skewed = spark.range(1000).repartitionByRange(6, "id").where("id < 170 or id >= 990").coalesce(6)
    ids = {row.id: number for number, row in enumerate(skewed.collect())}
    renumbered = spark.createDataFrame([(number,) for number in ids.values()], "id long").repartition(5, "id")
    passes = reading.train(renumbered, epochs=3)
    assert every_row_once(passes, len(ids))
    assert passes[0] == passes[1] == passes[2]  # the later two come from the spill


def test_without_a_spill_spark_computes_the_rows_for_each_epoch(spark: SparkSession, reading: Reading) -> None:
    assert every_row_once(reading.train(spark.range(300), epochs=2, spill=False), 300)


def test_train_may_be_called_again_and_takes_rdds(spark: SparkSession, reading: Reading) -> None:
    rows = spark.sparkContext.parallelize([{"id": i} for i in range(100)], 3)
    for _ in range(2):
        assert every_row_once(reading.train(rows, epochs=1), 100)


@pytest.mark.parametrize("sizes", [[64], [37], [3], [90, 6]], ids=str)
def test_the_workers_shares_differ_by_at_most_one_row(spark: SparkSession, reading: Reading, sizes: list[int]) -> None:
    rows = spark.sparkContext.parallelize(range(len(sizes)), len(sizes))
    first = [sum(sizes[:number]) for number in range(len(sizes))]
    data = rows.flatMap(lambda number: [{"id": first[number] + row} for row in range(sizes[number])])
    passes = reading.train(data, epochs=1)
    assert every_row_once(passes, sum(sizes))
    shares = [len(ids) for ids in passes[0]]
    assert max(shares) - min(shares) <= 1


class DyingOnce:
    """Passes rows on; its first attempt at partition 1 dies by SIGKILL with rows still to come."""

    def __call__(self, batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        first = context.partitionId() == 1 and context.attemptNumber() == 0
        for number, batch in enumerate(batches):
            if first and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch


def test_a_feeding_task_that_is_killed_and_run_again_neither_loses_nor_repeats_a_row(
    spark: SparkSession, reading: Reading, batch_rows: Any
) -> None:
    batch_rows(500)
    dying = spark.range(0, 8000, 1, 2).mapInArrow(DyingOnce(), "id long")
    assert every_row_once(reading.train(dying, epochs=2), 8000)


@dataclass(frozen=True)
class BreakingOff:
    """Passes rows on; its first attempt at partition 1 ends with rows still to come.

    It raises, or waits until Spark cancels its task. The task that reads from it sees the end of the rows either way.
    """

    reached: str = ""

    def __call__(self, batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        first = context.partitionId() == 1 and context.attemptNumber() == 0
        for number, batch in enumerate(batches):
            if first and number == 2:
                if self.reached:
                    Path(self.reached).touch()
                    threading.Event().wait(60)
                raise RuntimeError("the source broke off")
            yield batch


def cancel_feeding_task(spark: SparkSession, partition: int, reached: Path) -> None:
    """Cancel the task that feeds a partition, once it waits."""
    assert until(reached.exists)
    scala, tracker = spark.sparkContext._jsc.sc(), spark.sparkContext.statusTracker()
    for stage in tracker.getActiveStageIds():
        if "feed epoch" in str(scala.statusStore().lastStageAttempt(stage).description()):
            tasks = scala.statusStore().taskList(stage, 0, 100)
            every = [tasks.apply(number) for number in range(tasks.size())]
            for task in every:
                if task.index() == partition and task.status() == "RUNNING":
                    assert scala.killTaskAttempt(task.taskId(), True, "a test")


@pytest.mark.parametrize("how", ["raises", "is cancelled"])
def test_a_feeding_task_whose_input_breaks_off_is_not_treated_as_done(
    spark: SparkSession, reading: Reading, batch_rows: Any, tmp_path: Path, how: str
) -> None:
    batch_rows(10_000)  # so that Spark sends each batch at once
    reached = tmp_path / "reached"
    breaking = BreakingOff(str(reached) if how == "is cancelled" else "")
    canceller = threading.Thread(target=cancel_feeding_task, args=(spark, 1, reached))
    if breaking.reached:
        canceller.start()
    passes = reading.train(spark.range(0, 60_000, 1, 2).mapInArrow(breaking, "id long"), epochs=1)
    assert every_row_once(passes, 60_000)
    if breaking.reached:
        canceller.join()


def test_a_pass_that_was_not_fed_is_empty_and_logged_as_empty(reading: Reading) -> None:
    reading.cluster.wait()
    assert reading.seen(range(reading.passes, PASSES)) == [[[], []]] * (PASSES - reading.passes)
    for node in ("worker:0", "worker:1"):
        assert (
            "train() fed fewer passes than main asks for, so this pass is empty; raise epochs"
            in reading.cluster.logs(node)
        )
