"""The session, its slots and its jobs."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from tests.conftest import RunScript
from tests.versions import profiles
from tfos_nb.errors import PlanError
from tfos_nb.spark.session import (
    Busy,
    SparkJobs,
    active_session,
    check_dynamic_allocation,
    check_slots,
    is_stopped,
    resource_profile,
    slots_busy,
    slots_total,
    spark_session,
)

PATIENCE = 60.0


class HoldSlot:
    """A task that creates a file when it runs, and ends when another file appears."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        (self.folder / f"running-{TaskContext.get().partitionId()}").touch()
        deadline = time.monotonic() + PATIENCE
        while not (self.folder / "end").exists() and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        yield from batches


class CountCpus:
    """A task that returns the CPUs that Spark assigned to it."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"cpus": pa.array([TaskContext.get().cpus()], pa.int64())})


def holding(spark: SparkSession, folder: Path, tasks: int) -> DataFrame:
    folder.mkdir(exist_ok=True)
    return spark.range(0, tasks, 1, tasks).mapInArrow(HoldSlot(folder), "id long")


def await_tasks(spark: SparkSession, tasks: int) -> tuple[Busy, ...]:
    deadline = time.monotonic() + PATIENCE
    while sum(stage.tasks for stage in slots_busy(spark)) != tasks:
        assert time.monotonic() < deadline, f"{tasks} tasks never ran: {slots_busy(spark)}"
        threading.Event().wait(0.05)
    return slots_busy(spark)


def jvm_threads(spark: SparkSession) -> int:
    """Count the JVM threads that serve a Python thread."""
    names = [str(thread.getName()) for thread in spark._jvm.Thread.getAllStackTraces().keySet()]
    return sum(name.startswith("Thread-") for name in names)


@pytest.fixture
def jobs(spark: SparkSession) -> Iterator[SparkJobs]:
    own = SparkJobs(spark, "tfos_nb-test-one")
    yield own
    assert own.cancel_all()
    await_tasks(spark, 0)


def test_the_active_session_is_used(spark: SparkSession) -> None:
    assert spark_session() is spark


def test_the_active_session_is_not_a_stopped_one(spark: SparkSession) -> None:
    assert active_session() is spark
    assert not is_stopped(spark)
    assert not is_stopped("spark")


def test_the_active_session_is_used_in_another_thread(spark: SparkSession) -> None:
    seen: list[SparkSession] = []
    thread = threading.Thread(target=lambda: seen.append(spark_session()))
    thread.start()
    thread.join(PATIENCE)
    assert seen[0].sparkContext is spark.sparkContext


def test_counts_the_slots_of_all_executors(spark: SparkSession) -> None:
    assert slots_total(spark) == 4


def test_nodes_beyond_the_limit_of_open_files_are_refused_with_the_numbers(run_script: RunScript) -> None:
    ended = run_script("""
        import resource

        import tfos_nb.errors

        spark = tfos_nb.spark_session(slots=300)
        resource.setrlimit(resource.RLIMIT_NOFILE, (650, 700))
        try:
            tfos_nb.launch(print, workers=250, spark=spark)
        except tfos_nb.errors.PlanError as error:
            print("refused:", error)
    """)
    said = re.search(
        r"refused: 250 nodes need .* can take (\d+)\. Its limit of .* must be (\d+) or more, got 700: ", ended.stdout
    )
    assert said, ended.stdout
    most, needed = map(int, said.groups())
    assert needed == 700 + 2 * (250 - most)


def failing_beside_slow_ones(part: int) -> int:
    if part == 0:
        time.sleep(1)  # gives the others time to start
        raise ValueError("no good")
    time.sleep(60)
    return part


def test_slots_of_tasks_being_killed_are_waited_for(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="no good"):
        spark.sparkContext.parallelize(range(4), 4).map(failing_beside_slow_ones).collect()
    assert check_slots(spark, 4, False).free == 4


def test_says_which_job_holds_how_many_slots(spark: SparkSession, jobs: SparkJobs, tmp_path: Path) -> None:
    jobs.run(holding(spark, tmp_path, 3).collect, "somebody's report")
    assert await_tasks(spark, 3) == (Busy("somebody's report", tasks=3, cpus=3, gpus=0, number=ANY),)


def test_more_nodes_than_slots_are_refused_with_the_numbers_and_remedies(spark: SparkSession) -> None:
    assert check_slots(spark, 3, feeding=True).free == 4
    with pytest.raises(PlanError) as refusal:
        check_slots(spark, 4, feeding=True)
    text = str(refusal.value)
    assert "needs 5 slots (4 nodes and at least 1 for feeding); Spark has 4" in text
    assert "2 executors x 2 cores, spark.task.cpus=1" in text
    assert "ask for 3 nodes" in text
    assert "spark.executor.instances" in text


def test_a_refusal_names_the_job_that_holds_the_slots(spark: SparkSession, jobs: SparkJobs, tmp_path: Path) -> None:
    jobs.run(holding(spark, tmp_path, 2).collect, "a long query")
    await_tasks(spark, 2)
    with pytest.raises(PlanError, match=r"2 tasks of 'a long query'.*stop what runs") as refusal:
        check_slots(spark, 2, feeding=True)
    assert "ask for 1 node," in str(refusal.value)


def test_a_node_like_sparks_own_tasks_needs_no_profile(spark: SparkSession) -> None:
    assert resource_profile(spark, cpus=1, gpus=0) is None


@pytest.mark.slow
@profiles
def test_a_node_with_two_cpus_gets_them_and_halves_the_slots(spark: SparkSession) -> None:
    profile = resource_profile(spark, cpus=2)
    assert profile is not None
    assert slots_total(spark, profile) == 2
    rows = spark.range(0, 2, 1, 2).mapInArrow(CountCpus(), "cpus long", profile=profile).collect()
    assert [row.cpus for row in rows] == [2, 2]


@profiles
def test_busy_slots_of_a_profile_are_counted_by_their_cpus(
    spark: SparkSession, jobs: SparkJobs, tmp_path: Path
) -> None:
    profile = resource_profile(spark, cpus=2)
    held = spark.range(0, 1, 1, 1).mapInArrow(HoldSlot(tmp_path), "id long", profile=profile)
    jobs.run(held.collect, "a node of two CPUs")
    await_tasks(spark, 1)
    assert check_slots(spark, 2, feeding=False).busy == 2
    assert check_slots(spark, 1, feeding=False, cpus=2, profile=profile).free == 1


@pytest.mark.parametrize(
    ("wish", "remedy"), [({"cpus": 3}, "spark.executor.cores"), ({"gpus": 1}, "resource.gpu.amount=1")]
)
def test_a_node_too_large_for_any_executor_is_refused(spark: SparkSession, wish: dict[str, int], remedy: str) -> None:
    with pytest.raises(PlanError, match=remedy):
        resource_profile(spark, **wish)


def test_dynamic_allocation_is_not_checked_when_off(spark: SparkSession) -> None:
    check_dynamic_allocation(spark, need=1000)


def test_a_job_has_its_result_or_its_error(spark: SparkSession, jobs: SparkJobs) -> None:
    counted = jobs.run(spark.range(10).count, "counts")
    failed = jobs.run(lambda: 1 / 0, "fails")
    assert counted.done.wait(PATIENCE)
    assert failed.done.wait(PATIENCE)
    assert (counted.result, counted.error) == (10, None)
    assert isinstance(failed.error, ZeroDivisionError)


def test_cancel_ends_its_own_job_and_leaves_the_others(spark: SparkSession, jobs: SparkJobs, tmp_path: Path) -> None:
    other = SparkJobs(spark, "tfos_nb-test-two")
    mine = jobs.run(holding(spark, tmp_path / "mine", 2).collect, "mine")
    same_cluster = jobs.run(holding(spark, tmp_path / "same", 1).collect, "same cluster")
    theirs = other.run(holding(spark, tmp_path / "theirs", 1).count, "theirs")
    await_tasks(spark, 4)
    assert mine.cancel()
    assert mine.cancelled
    assert mine.error is not None
    assert jobs.running() == (same_cluster,)
    assert jobs.cancel_all()
    assert not theirs.done.is_set()
    (tmp_path / "theirs" / "end").touch()
    assert theirs.done.wait(PATIENCE)
    assert (theirs.result, theirs.error) == (1, None)


def test_cancel_also_ends_a_job_not_yet_submitted(spark: SparkSession, jobs: SparkJobs, tmp_path: Path) -> None:
    job = jobs.run(holding(spark, tmp_path, 1).collect, "cancelled at once")
    assert job.cancel(PATIENCE)
    assert job.result is None


def test_an_action_that_submits_its_job_after_the_cancellation_is_cancelled_then(
    spark: SparkSession, jobs: SparkJobs, tmp_path: Path
) -> None:
    begun, submit = threading.Event(), threading.Event()

    def late() -> Any:
        begun.set()
        assert submit.wait(PATIENCE)
        return holding(spark, tmp_path, 1).collect()

    job = jobs.run(late, "submitted late")
    assert begun.wait(PATIENCE)
    assert not job.cancel(0.1)
    submit.set()
    assert job.done.wait(PATIENCE)
    assert job.error is not None


def test_jobs_leave_no_thread_behind_in_python_or_the_jvm(spark: SparkSession, jobs: SparkJobs) -> None:
    def run_some() -> None:
        for _ in range(10):
            job = jobs.run(spark.range(10).count, "counts")
            assert job.join(PATIENCE)

    run_some()
    before = (threading.active_count(), jvm_threads(spark))
    run_some()
    deadline = time.monotonic() + PATIENCE
    while (threading.active_count(), jvm_threads(spark)) > before and time.monotonic() < deadline:
        threading.Event().wait(0.1)
    assert (threading.active_count(), jvm_threads(spark)) <= before


def test_a_thread_woken_by_a_job_sees_that_it_is_done_and_its_error(jobs: SparkJobs) -> None:
    """A thread woken before the job is marked as done would go back to sleep, and nothing would wake it again."""
    started, woken = threading.Event(), threading.Event()
    seen: list[tuple[bool, str]] = []

    def failing() -> None:
        started.wait(PATIENCE)
        raise ValueError("no good")

    def wake() -> None:
        seen.append((job.done.is_set(), str(job.error)))
        woken.set()

    job = jobs.run(failing, "fails", wake)
    started.set()
    assert woken.wait(PATIENCE)
    assert seen == [(True, "no good")]


def test_a_job_does_not_change_the_callers_tags_and_description(spark: SparkSession, jobs: SparkJobs) -> None:
    assert jobs.run(spark.range(10).count, "counts").join(PATIENCE)
    assert not {tag for tag in spark.sparkContext.getJobTags() if tag.startswith("tfos_nb")}
    assert spark.sparkContext.getLocalProperty("spark.job.description") is None


EMBEDDED = """
    import json, os, sys, warnings
    warnings.simplefilter("ignore")
    from tfos_nb.errors import PlanError
    from tfos_nb.spark.session import active_session, is_stopped, resource_profile, slots_total, spark_session

    before = dict(os.environ)
    nothing = active_session()
    spark = spark_session(3, conf={"spark.ui.enabled": "false"})
    sc = spark.sparkContext
    refusals = []
    for wish in ({"cpus": 2}, {"cpus": 9}, {"gpus": 1}):
        try:
            resource_profile(spark, **wish)
        except PlanError as error:
            refusals.append(str(error))
    ours = ("JAVA_HOME", "SPARK_HOME", "SPARK_LOCAL_IP", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    changed = {name for name in ours if before.get(name) != os.environ.get(name)}
    log = spark.conf.get("spark.tfos_nb.log")
    seen = {
        "master": sc.master, "slots": slots_total(spark), "refusals": refusals, "changed": sorted(changed), "log": log,
        "worker": sc.parallelize([0], 1).map(lambda _: __import__("sys").executable).first(), "python": sys.executable,
        "log_exists": os.path.exists(log), "java": spark._jvm.System.getProperty("java.home"),
    }
    spark.stop()
    seen["sessions"] = [nothing is None, is_stopped(spark), active_session() is None]
    again = spark_session(2)
    seen["again"] = [again.sparkContext.master, again.range(5).count()]
    again.stop()
    print(json.dumps(seen))
    sys.stdout.flush()
"""


def test_an_embedded_spark_retries_tasks_and_prints_nothing_in_the_cell(run_script: RunScript) -> None:
    ended = run_script(EMBEDDED)
    assert ended.stderr == ""
    seen = json.loads(ended.stdout)
    assert seen["master"] == "local[3,4]"
    assert seen["slots"] == 3
    assert seen["worker"] == seen["python"]
    assert seen["changed"] == []
    assert seen["log_exists"]
    assert not os.path.exists(seen["log"])
    assert seen["sessions"] == [True, True, True]
    assert seen["again"] == ["local[2,4]", 5]
    cpus, cores, gpus = seen["refusals"]
    assert "spark.task.cpus=2" in cpus
    assert "an executor has 3 cores" in cores
    assert "gives its tasks no GPUs" in gpus


def test_a_stopped_or_invalid_session_is_refused(run_script: RunScript) -> None:
    ended = run_script(
        """
        import os, sys
        from pyspark.sql import SparkSession
        from tfos_nb import errors, launch
        def main(args, ctx): ...
        os.environ["PYSPARK_PYTHON"] = "/bin/false"
        from tfos_nb.driver.feed_controller import check_feedable
        spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        tables = spark.range(2), spark.sparkContext.parallelize([1])
        for table in tables:
            check_feedable(table)
        for session in (spark, "local"):
            try:
                launch(main, spark=session)
            except errors.PlanError as error:
                print("SAID", error)
        spark.stop()
        try:
            launch(main, spark=spark)
        except errors.PlanError as error:
            print("SAID", error)
        again = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        for table in tables:
            try:
                check_feedable(table)
            except errors.PlanError as error:
                print("SAID", error)
        again.stop()
        """,
        PYSPARK_PYTHON=None,
    )
    said = [line for line in ended.stdout.splitlines() if line.startswith("SAID")]
    assert len(said) == 5, ended.stderr
    assert "/bin/false, does not run" in said[0]
    assert "set PYSPARK_PYTHON" in said[0]
    assert "spark must be a SparkSession, got a str" in said[1]
    assert "was stopped" in said[2]
    assert "this DataFrame is of a Spark session that was stopped" in said[3]
    assert "this RDD is of a Spark session that was stopped" in said[4]


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"slots": "local-cluster[2,2,1024]"}, "slots must be a whole number.*, got 'local-cluster.*spark.master"),
        ({"slots": 0}, "slots must be a whole number, 1 or more, got 0"),
        ({"slots": True}, "slots must be .*, got True"),
        ({"conf": "spark.ui.enabled=false"}, "conf must be a dictionary, as in conf="),
    ],
)
def test_invalid_arguments_of_a_session_are_refused(spark: SparkSession, wish: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        spark_session(**wish)
