"""Interrupts of a waiting call: raised at once, but not in the middle of a request to the JVM."""

from __future__ import annotations

import signal
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.end_to_end.test_stop import until
from tfos_nb import launch
from tfos_nb.cluster import Cluster
from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.errors import ClusterClosed
from tfos_nb.interrupts import interruptible
from tfos_nb.spark.contexts import context_of
from tfos_nb.spark.contexts.classic import Classic
from tfos_nb.spark.session import SparkJobs, slots_busy
from tfos_nb.state import active_clusters

py4j = types.ModuleType("py4j.a_connection")
exec(  # the globals make it a function of py4j
    """
import signal, time
def ask(then):
    signal.raise_signal(signal.SIGINT)
    end = time.monotonic() + then
    while time.monotonic() < end:
        time.sleep(0.01)
    return "answered"
""",
    vars(py4j),
)


def test_an_interrupt_is_raised_at_once_and_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_waits_for_the_answer_of_the_jvm() -> None:
    said = []
    with pytest.raises(KeyboardInterrupt), interruptible():
        said.append(py4j.ask(0.2))
        threading.Event().wait(5.0)
        said.append("too late")
    assert said == ["answered"]


def test_a_delayed_interrupt_is_raised_when_the_call_returns_at_the_latest() -> None:
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            assert py4j.ask(0.0) == "answered"
        time.sleep(0.2)
        assert asked == [], "the other handler would have cancelled all of Spark's jobs"
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_does_not_wait_for_a_jvm_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfos_nb.interrupts._PATIENCE", 0.3)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interruptible():
        py4j.ask(30.0)
    assert time.monotonic() - began < 20


def take_slowly(args: Any, ctx: Any) -> None:
    for _ in ctx.dataset(10):
        if ctx.should_stop:
            return
        time.sleep(0.05)


def take_and_wait(args: Any, ctx: Any) -> None:
    """Take rows slowly, then end when the cluster is stopped."""
    take_slowly(args, ctx)
    until_it_should_stop(args, ctx)


def late(rows: Iterator[Any]) -> Iterator[Any]:
    """Return the rows after train() has checked once why none come."""
    time.sleep(5.0)
    return rows


def test_an_interrupt_while_train_asks_spark_does_not_restart_a_job(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, in_time = [], Classic.in_time

    def ask_slowly(self: Classic, ask: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not asked:
            asked.append(True)
            threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
            self.sc._jvm.java.lang.Thread.sleep(600)  # Spark's answer takes that long
        return in_time(self, ask)

    cluster = launch(take_slowly, spark=spark, workers=2, name="asked", grace=10)
    monkeypatch.setattr(Classic, "in_time", ask_slowly)
    with pytest.raises(KeyboardInterrupt):
        cluster.train(spark.range(0, 4000, 1, 8).rdd.mapPartitions(late), epochs=50)
    assert asked
    until(cluster, lambda: cluster.snapshot().status.ended)
    for _ in range(20):
        assert slots_busy(spark) == ()
        time.sleep(0.05)


def test_a_job_is_registered_before_it_begins(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: Any) -> None:
        raise KeyboardInterrupt

    jobs = SparkJobs(spark, "tfos_nb-known")
    thread = type(context_of(spark).thread(print, "one"))
    with monkeypatch.context() as patch:
        patch.setattr(thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jobs.run(lambda: 1, "never begun")
    assert [job.description for job in jobs.running()] == ["never begun"]


def until_it_should_stop(args: Any, ctx: Any) -> None:
    while not ctx.should_stop:
        time.sleep(0.05)


def interrupted_after(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the interrupt after a method's request to the JVM: it is raised where the public call ends."""
    asked = getattr(owner, name)

    def and_interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = asked(self, *args, **kwargs)
        assert py4j.ask(0.0) == "answered"
        return found

    monkeypatch.setattr(owner, name, and_interrupted)


@pytest.mark.parametrize("wait_until_up", [False, True])
def test_an_interrupt_of_launch_leaves_no_cluster_behind(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, wait_until_up: bool
) -> None:
    interrupted_after(Cluster, "start", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        launch(until_it_should_stop, spark=spark, workers=2, name="nobodys", wait_until_up=wait_until_up)
    assert [one.plan.name for one in active_clusters.active_clusters()] == []
    assert slots_busy(spark) == ()


def test_an_interrupt_at_the_end_of_train_stops_the_cluster(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = launch(take_and_wait, spark=spark, workers=2, name="fed", grace=10)
    with monkeypatch.context() as patch:
        interrupted_after(Cluster, "_feed", patch)
        with pytest.raises(KeyboardInterrupt):
            cluster.train(spark.range(0, 40, 1, 4))
    until(cluster, lambda: cluster.snapshot().status.ended)
    with pytest.raises(ClusterClosed):
        cluster.train(spark.range(0, 40, 1, 4))


def test_an_interrupt_of_scale_is_raised_after_the_request_to_spark(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launch(until_it_should_stop, spark=spark, workers=1, restarts=1, name="wider", grace=10) as cluster:
        interrupted_after(ClusterController, "scale", monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            cluster.scale(workers=2)
        until(cluster, lambda: all(node.host for node in cluster.snapshot().nodes))
        assert len(cluster.snapshot().nodes) == 2
        cluster.stop()


def test_an_interrupt_at_the_end_of_a_with_block_stops_the_cluster(spark: SparkSession) -> None:
    main_thread = threading.main_thread().ident
    with pytest.raises(KeyboardInterrupt), launch(until_it_should_stop, spark=spark, workers=2, grace=10) as cluster:
        threading.Timer(0.5, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    assert cluster.snapshot().status.ended
    assert slots_busy(spark) == ()
