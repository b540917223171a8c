"""Measure faults while two nodes train: the time until the driver reports a fault, and until the next training step."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import programs
from benchmarks.session import spark_session
from benchmarks.table import Ratio, Result, median
from tests.faults import its_host, its_supervisor, its_warm_process, itself, itself_for_good

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from benchmarks.settings import Settings
    from tfos_nb import Cluster

__all__ = ["EPOCHS", "HEARTBEAT", "fed_for_ever", "feed", "is_whole", "run", "wait_for"]

_SECONDS_TO_STEP = 5.0  # if a surviving node or its supervisor can fork the next process
_SECONDS_TO_START = 15.0  # if everything has to be started
HEARTBEAT = 5.0
_GIVE_UP = 120.0
_ROWS = 20_000
EPOCHS = 100_000  # more than there will be time for


@dataclass(frozen=True)
class _Kind:
    """A fault of a node: which process receives which signal."""

    what: str
    find: Callable[[int], int]
    how: int
    allowed: float
    min_workers: int | None = None
    node: str = "worker:1"
    asynchronous: bool = False


def run(settings: Settings) -> Result:
    """Cause each kind of fault `settings.repeat` times in one cluster."""
    series: dict[str, list[tuple[float, float]]] = {}
    with spark_session(memory_mb=1024) as spark, tempfile.TemporaryDirectory() as folder:
        for kind in _KINDS:
            series[kind.what] = _hurt_often(settings, spark, folder, kind)
    ratios = []
    for kind in _KINDS:
        what, times, allowed = kind.what, series[kind.what], kind.allowed
        noticed, again = (median([pair[place] for pair in times]) for place in (0, 1))
        ratios.append(Ratio(f"{what}: until it is noticed", noticed, allowed, "s"))
        ratios.append(Ratio(f"{what}: until a step is done again", again, allowed, "s", 1.0, at_most=True))
    return Result("recovery", tuple(ratios), {"series": series}, (f"heartbeat_timeout={HEARTBEAT:g} s",))


def _hurt_often(settings: Settings, spark: SparkSession, folder: str, kind: _Kind) -> list[tuple[float, float]]:
    times = []
    options: dict[str, Any] = {"restarts": settings.repeat, "heartbeat_timeout": HEARTBEAT, "model_dir": folder}
    options["min_workers"] = kind.min_workers
    with fed_for_ever(spark, kind.asynchronous, settings.rows or _ROWS, **options) as cluster:
        for number in range(settings.repeat):
            times.append(_hurt(cluster, kind))
            noticed, again = times[-1]
            settings.say(f"recovery: {kind.what} {number + 1}/{settings.repeat}: {noticed:.2f} and {again:.2f} s")
    return times


@contextmanager
def fed_for_ever(spark: SparkSession, asynchronous: bool, rows: int, **options: Any) -> Iterator[Cluster]:
    """Launch a cluster of two workers, synchronous or asynchronous, that trains on rows until the block ends."""
    from tfos_nb import launch

    if asynchronous:
        options |= {"chief": True, "ps": 1}
    program = programs.step_forever if asynchronous else programs.sum_forever
    cluster = launch(program, spark=spark, workers=2, name="recovery", **options)
    feeding = threading.Thread(target=feed, args=(cluster, spark.range(0, rows, 1, 8)), daemon=True)
    feeding.start()
    try:
        yield cluster
    finally:
        cluster.close()
        feeding.join(_GIVE_UP)


def feed(cluster: Cluster, rows: Any) -> None:
    """Feed rows again and again, until the cluster is closed."""
    from tfos_nb.errors import ClusterClosed

    try:
        cluster.train(rows, epochs=EPOCHS)
    except ClusterClosed:
        return


def _hurt(cluster: Cluster, kind: _Kind) -> tuple[float, float]:
    """Cause a fault of a node that trains; return the seconds until it was noticed, and until the next step."""
    wait_for(lambda: _stepped(cluster) > 0 and cluster.state.value == "RUNNING" and is_whole(cluster))
    generation = cluster.snapshot().generation
    pid = next(node.pid for node in cluster.snapshot().nodes if node.node == kind.node)
    began = time.time()
    os.kill(kind.find(pid or 0), kind.how)
    wait_for(lambda: cluster.snapshot().generation > generation)
    noticed = time.time()
    wait_for(lambda: _stepped(cluster) > began)
    return noticed - began, _stepped(cluster) - began


def _stepped(cluster: Cluster) -> float:
    """Return the time of the first step of the chief's newest process, by its own clock; 0 before that step."""
    chief = cluster.snapshot().nodes[0]
    return chief.metrics.get("first_step", 0.0)


def is_whole(cluster: Cluster) -> bool:
    """Whether every node runs its program."""
    return all(node.status.value in ("FEEDING", "TRAINING") for node in cluster.snapshot().nodes)


def wait_for(reached: Callable[[], bool]) -> None:
    """Poll until a condition holds."""
    deadline, pause = time.monotonic() + _GIVE_UP, threading.Event()
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError("the cluster does not train")
        pause.wait(0.01)


_KINDS = (
    _Kind("its process is killed", itself, signal.SIGKILL, _SECONDS_TO_STEP),
    _Kind("the leader's process is killed", itself, signal.SIGKILL, _SECONDS_TO_STEP, node="worker:0"),
    _Kind("its supervisor is killed", its_supervisor, signal.SIGKILL, _SECONDS_TO_START),
    _Kind("its supervisor is killed, min_workers=1", its_supervisor, signal.SIGKILL, _SECONDS_TO_STEP, min_workers=1),
    _Kind("its warm process is killed", its_warm_process, signal.SIGKILL, _SECONDS_TO_START),
    _Kind("its executor and its supervisor are killed", its_host, signal.SIGKILL, _SECONDS_TO_START),
    _Kind("its executor and its supervisor are killed, min_workers=1", its_host, signal.SIGKILL, _SECONDS_TO_STEP, 1),
    _Kind("its process is stopped for good", itself_for_good, signal.SIGSTOP, HEARTBEAT + _SECONDS_TO_STEP),
    _Kind("its supervisor is frozen", its_supervisor, signal.SIGSTOP, HEARTBEAT + _SECONDS_TO_START),
    _Kind("a parameter server's process is killed", itself, signal.SIGKILL, _SECONDS_TO_START, None, "ps:0", True),
    _Kind("an asynchronous chief's is killed", itself, signal.SIGKILL, _SECONDS_TO_START, None, "chief:0", True),
)
