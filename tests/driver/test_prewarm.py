"""Executors that import TensorFlow before the first cluster, with a real Spark and real processes."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.conftest import RunScript
from tests.faults import its_warm_process
from tfos_nb import launch
from tfos_nb.driver import prewarm
from tfos_nb.errors import PlanError
from tfos_nb.spark.contexts import context_of
from tfos_nb.spark.session import SparkJobs

SECONDS = 90.0


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable prewarming, as it is for users, for an application that is not warm yet."""
    monkeypatch.delenv(prewarm.VARIABLE, raising=False)
    monkeypatch.setattr(prewarm, "_begun", {})
    monkeypatch.setattr(prewarm, "_of_this_process", os.urandom(32))
    monkeypatch.setattr(
        prewarm, "_LOOK_SECONDS", SECONDS
    )  # Spark's Python daemon takes tens of seconds to start in the tests


def until_warm(spark: SparkSession) -> None:
    deadline = time.monotonic() + SECONDS
    while (states := prewarm.look(spark)) and set(states.values()) != {"warm"}:
        assert set(states.values()) <= {"importing", "warm"}
        assert time.monotonic() < deadline, states
        time.sleep(0.2)
    assert states, "nobody has answered"


def whose(args: Any, ctx: Any) -> tuple[int, int]:
    forker = its_warm_process(os.getpid())
    return forker, its_warm_process(forker)


def test_the_first_cluster_is_forked_from_the_warm_processes(spark: SparkSession, on: None) -> None:
    assert set(prewarm.look(spark).values()) == {"cold"}
    prewarm.begin(spark)
    until_warm(spark)
    with launch(whose, spark=spark, workers=2, input_mode="tensorflow", name="first") as cluster:
        cluster.wait()
    forkers, servers = zip(*cluster.results().values(), strict=True)
    assert len(set(forkers)) == 2, "each supervisor has its own"
    assert len(set(servers)) == 1
    assert "imports TensorFlow itself" not in "".join(cluster.logs(node) for node in ("worker:0", "worker:1"))
    assert set(prewarm.look(spark).values()) == {"warm"}


def test_prewarming_begins_once_and_not_if_the_variable_disables_it(
    spark: SparkSession, on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prewarm.VARIABLE, "0")
    prewarm.begin(spark)
    assert prewarm._begun == {}
    prewarm.settle(spark)
    monkeypatch.setenv(prewarm.VARIABLE, "1")
    prewarm.begin(spark)
    (job,) = prewarm._begun.values()
    prewarm.begin(spark)
    assert list(prewarm._begun.values()) == [job]
    assert job.done.wait(SECONDS)
    assert job.error is None
    assert set((job.result or {}).values()) <= {"importing", "warm"}


def test_a_cluster_finds_free_slots_while_executors_are_warmed(spark: SparkSession, on: None) -> None:
    prewarm.begin(spark)
    with launch(whose, spark=spark, workers=4, input_mode="tensorflow", name="at_once") as cluster:
        cluster.wait()
    assert len(cluster.results()) == 4


def test_prewarming_that_waits_for_slots_is_cancelled_when_a_cluster_starts(
    spark: SparkSession, on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prewarm, "_SETTLE_SECONDS", 0.5)
    jobs = SparkJobs(spark, "tfos_nb-test-holds")
    held = jobs.run(lambda: spark.range(0, 4, 1, 4).foreach(lambda _: time.sleep(300)), "holds all slots")
    deadline = time.monotonic() + SECONDS
    while context_of(spark).running(jobs.tag) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    prewarm.begin(spark)
    prewarm.settle(spark)
    (job,) = prewarm._begun.values()
    assert job.cancelled
    assert job.done.wait(SECONDS)  # while the slots are still held
    assert not held.done.is_set()
    assert jobs.cancel_all()
    assert held.done.is_set()
    jobs.wait_for_slots(SECONDS)


def test_a_host_that_cannot_be_warmed_says_why(spark: SparkSession, on: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfos_nb.runtime.node.warm_task import WarmTask

    monkeypatch.setattr("tfos_nb.runtime.node.warm_task.can_fork", lambda: False)
    (batch,) = WarmTask("token", 600.0, {})(iter(()))
    assert batch.to_pylist()[0]["state"].startswith("cannot be warmed: this system")
    monkeypatch.undo()
    monkeypatch.setattr("tfos_nb.runtime.node.warm_process.short_temporary_directory", lambda: "/no/such/place")
    (batch,) = WarmTask("token", 600.0, {})(iter(()))
    assert batch.to_pylist()[0]["state"].startswith("FileNotFoundError")


def test_spark_session_and_the_extension_begin_prewarming(run_script: RunScript) -> None:
    ended = run_script(
        """
        from IPython.core.interactiveshell import InteractiveShell
        from tfos_nb.driver import prewarm

        begun = []
        prewarm.begin = begun.append
        shell = InteractiveShell.instance(colors="nocolor")
        shell.run_cell("%load_ext tfos_nb")
        print("without a session", len(begun))
        import tfos_nb
        spark = tfos_nb.spark_session(2, conf={"spark.ui.enabled": "false"})
        print("a session", begun == [spark])
        shell.run_cell("%reload_ext tfos_nb")
        print("the extension", begun == [spark] * 2)
        shell.run_cell("%tfos_spark")
        print("the line", begun == [spark] * 3)
        shell.run_cell("%config TfosMagics.prewarm = False")
        shell.run_cell("%tfos_spark")
        print("switched off", begun == [spark] * 3)
        spark.stop()
        """,
        TFOS_NB_PREWARM=None,
    )
    told = [line for line in ended.stdout.splitlines() if line.startswith(("with", "a s", "the", "switch"))]
    assert told == ["without a session 0", "a session True", "the extension True", "the line True", "switched off True"]


def test_a_spark_without_pinned_threads_is_not_prewarmed(
    spark: SparkSession, on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> None:
        raise PlanError("PYSPARK_PIN_THREAD=false: unset it")

    monkeypatch.setattr("tfos_nb.spark.contexts.classic.Classic.check_threads", refuse)
    prewarm.begin(spark)
    assert prewarm._begun == {}


def test_a_job_that_was_cancelled_while_it_waited_for_executors_sends_no_task(
    spark: SparkSession, on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registering = threading.Event()
    monkeypatch.setattr(prewarm, "slots_total", lambda spark: registering.wait(SECONDS))
    monkeypatch.setattr(prewarm, "_SETTLE_SECONDS", 0.2)
    prewarm.begin(spark)
    prewarm.settle(spark)
    (job,) = prewarm._begun.values()
    assert job.cancelled
    registering.set()
    assert job.done.wait(SECONDS)
    assert (job.result, job.error) == ({}, None)
