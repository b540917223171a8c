"""Stop: gracefully at first, so that a model that is being written is finished, and at once on a second request."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests import waiting
from tfos_nb import Cluster, launch, parallel
from tfos_nb.errors import ClusterClosed
from tfos_nb.spark.session import slots_busy
from tfos_nb.state.cluster_state import ClusterStatus, NodeStatus

SECONDS = 60.0


def run_until_stopped(args: Any, ctx: Any) -> str:
    """Run until the user asks for a stop, then return."""
    ctx.report(step=1)
    while not ctx.should_stop:
        threading.Event().wait(0.02)
    return f"{ctx.job_name}:{ctx.task_index} came to its end"


def listen_to_nobody(args: Any, ctx: Any) -> None:
    ctx.report(step=1)
    threading.Event().wait(600)


class SlowModel:
    """A model that takes long to write, like a large one on a slow disk."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def save(self, path: str) -> None:
        with open(path, "w") as file:
            file.write("first half, ")
            file.flush()
            threading.Event().wait(self.seconds)
            file.write("second half")


def save_slowly(args: Any, ctx: Any) -> str:
    ctx.report(step=1)
    while not ctx.should_stop:
        threading.Event().wait(0.02)
    return str(ctx.save(SlowModel(args["seconds"])))


def start(main: Callable[[Any, Any], Any], spark: SparkSession, args: Any = None, **options: Any) -> Cluster:
    cluster = launch(main, args, spark=spark, workers=2, input_mode="tensorflow", **options)
    until(cluster, lambda: all(node.step for node in cluster.snapshot().nodes))
    return cluster


def until(cluster: Cluster, reached: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline, cluster.snapshot()
        threading.Event().wait(0.05)


def test_request_stop_returns_at_once_and_every_main_ends_by_itself(spark: SparkSession) -> None:
    with start(run_until_stopped, spark, name="polite") as cluster:
        said = cluster.request_stop()
        assert said == "stopping polite: its nodes have 30 s to end; ask again to end them at once"
        assert cluster.results() == {f"worker:{i}": f"worker:{i} came to its end" for i in range(2)}
    assert cluster.state is ClusterStatus.STOPPED
    assert cluster.request_stop() == "polite has ended already"


def leave_a_trace(args: Any, ctx: Any) -> None:
    Path(args).touch()
    threading.Event().wait(600)


def test_request_stop_before_the_nodes_have_started_prevents_every_main(spark: SparkSession, tmp_path: Path) -> None:
    trace = tmp_path / "called"
    cluster = launch(leave_a_trace, str(trace), workers=2, spark=spark, name="early", grace=600.0, wait_until_up=False)
    cluster.request_stop()
    until(cluster, lambda: cluster.state.ended)
    assert cluster.state is ClusterStatus.STOPPED
    assert {node.status for node in cluster.snapshot().nodes} == {NodeStatus.STOPPED}
    assert not trace.exists()


def test_a_second_request_stop_ends_the_nodes_at_once(spark: SparkSession) -> None:
    cluster = start(listen_to_nobody, spark, name="deaf", grace=600.0)
    cluster.request_stop()
    until(cluster, lambda: cluster.state is ClusterStatus.STOPPING)
    assert cluster.request_stop() == "ending deaf at once"
    with pytest.raises(ClusterClosed, match="deaf was stopped before its nodes were done"):
        cluster.wait(SECONDS)
    assert {node.status for node in cluster.snapshot().nodes} == {NodeStatus.STOPPED}


def test_a_model_that_is_being_written_is_finished_after_the_grace_period(spark: SparkSession, tmp_path: Path) -> None:
    cluster = start(save_slowly, spark, {"seconds": 6.0}, name="slow", grace=1.0, model_dir=str(tmp_path))
    cluster.request_stop()
    path = Path(cluster.result())
    assert path.read_text() == "first half, second half"
    assert [file.name for file in path.parent.iterdir()] == [path.name], "no half of one is left"


def test_a_second_request_stop_does_not_wait_for_a_model_that_is_being_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    cluster = start(save_slowly, spark, {"seconds": 600.0}, name="endless", grace=1.0, model_dir=str(tmp_path))
    cluster.request_stop()
    until(cluster, lambda: list(tmp_path.glob(".*")))
    cluster.request_stop()
    with pytest.raises(ClusterClosed):
        cluster.wait(SECONDS)
    assert not list(tmp_path.glob("[!.]*.keras")), "and half a model has not taken a model's name"


def test_a_stop_before_main_was_called_ends_the_nodes(spark: SparkSession) -> None:
    # Forked nodes would call main at once. These import TensorFlow first.
    options = {"name": "early", "input_mode": "tensorflow", "wait_until_up": False, "warm": False}
    cluster = launch(run_until_stopped, spark=spark, workers=2, **options)
    until(cluster, lambda: all(node.status is not NodeStatus.PLANNED for node in cluster.snapshot().nodes))
    cluster.request_stop()
    with pytest.raises(ClusterClosed):
        cluster.wait(SECONDS)


def dawdle(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the rows, then sleep like a long query of the user, which does not react to Spark's cancellation."""
    for batch in batches:
        yield batch
        time.sleep(600)


@pytest.mark.parametrize("asked", [1, 2])
def test_the_slots_are_free_after_the_end_even_if_rows_were_being_fed(spark: SparkSession, asked: int) -> None:
    rows = spark.range(16, numPartitions=2).mapInArrow(dawdle, "id long")
    cluster = launch(run_until_stopped, spark=spark, workers=2)
    feeding = threading.Thread(target=feed, args=(cluster, rows), daemon=True)
    feeding.start()
    try:
        until(cluster, lambda: any("feed" in stage.description for stage in slots_busy(spark)))
        for _ in range(asked):
            cluster.request_stop()
    finally:
        cluster.stop()
    assert slots_busy(spark) == ()
    feeding.join(SECONDS)
    assert not feeding.is_alive()


def feed(cluster: Cluster, rows: Any) -> None:
    with pytest.raises(ClusterClosed):
        cluster.train(rows)


def read_slowly(args: Any, ctx: Any) -> int:
    rows = 0
    for _ in range(50):
        for batch in ctx.dataset(10, columns=["id"]):
            rows += int(batch["id"].shape[0])
            ctx.report(step=rows)
            threading.Event().wait(0.05)
    return rows


def interrupt_when(reached: Callable[[], bool]) -> None:
    """Interrupt this thread as Ctrl-C does, once the condition holds."""
    main = threading.main_thread().ident
    assert main == threading.get_ident()

    def interrupt() -> None:
        assert waiting.until(reached)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def test_an_interrupted_train_stops_the_cluster_and_later_calls_do_not_wait(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = launch(read_slowly, spark=spark, workers=2, restarts=1, name="broken-off")
    interrupt_when(lambda: all(node.step for node in cluster.snapshot().nodes))
    with pytest.raises(KeyboardInterrupt):
        cluster.train(spark.range(400), epochs=50)
    assert "train() was interrupted: stopping broken-off" in caplog.text
    with pytest.raises(ClusterClosed):
        cluster.train(spark.range(1000, 1400))
    with contextlib.suppress(ClusterClosed):
        cluster.wait(SECONDS)
    assert cluster.state is ClusterStatus.STOPPED


def test_an_interrupted_wait_leaves_the_cluster_running(spark: SparkSession) -> None:
    cluster = start(run_until_stopped, spark)
    interrupt_when(lambda: cluster._controller.feeds.closed)
    with pytest.raises(KeyboardInterrupt):
        cluster.wait()
    assert cluster.state is ClusterStatus.RUNNING
    cluster.request_stop()
    cluster.wait(SECONDS)
    assert cluster.state is ClusterStatus.STOPPED


def wait_for_long(args: Any, ctx: Any) -> None:
    Path(args["begun"]).touch()
    threading.Event().wait(600)


def test_an_interrupt_of_parallel_run_does_not_affect_another_cluster(spark: SparkSession, tmp_path: Path) -> None:
    """PySpark's own handler cancels all of Spark's jobs."""
    begun = tmp_path / "begun"
    with start(run_until_stopped, spark, name="bystander") as bystander:
        interrupt_when(begun.exists)
        with pytest.raises(KeyboardInterrupt):
            parallel.run(wait_for_long, {"begun": str(begun)}, nodes=1, spark=spark)
        assert bystander.state is ClusterStatus.RUNNING
        bystander.request_stop()
    assert bystander.state is ClusterStatus.STOPPED
