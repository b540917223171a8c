"""Measure faults that must not stop other nodes: the pause of the training, and the time until the node is back."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.recovery import HEARTBEAT, fed_for_ever, is_whole, wait_for
from benchmarks.session import spark_session
from benchmarks.table import Ratio, Result, median
from tests.faults import its_executor, itself, itself_for_good

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from benchmarks.settings import Settings
    from tfos_nb import Cluster

__all__ = ["run"]

_PAUSE = 1.0  # seconds: a shorter pause does not count as a stop
_ROWS = 20_000_000  # an epoch takes longer than the measurement
_WATCHED = 12.0  # seconds
_NODE = "worker:1"


@dataclass(frozen=True)
class _Kind:
    """A fault of a worker, and whether another process must replace it."""

    what: str
    find: Callable[[int], int]
    how: int
    asynchronous: bool
    replaced: bool


_KINDS = (
    _Kind("an asynchronous worker's process is killed", itself, signal.SIGKILL, True, True),
    _Kind("an asynchronous worker's process is stopped for good", itself_for_good, signal.SIGSTOP, True, True),
    _Kind("the executor (the JVM) of an asynchronous worker is killed", its_executor, signal.SIGKILL, True, False),
    _Kind("the executor (the JVM) of a worker in step is killed", its_executor, signal.SIGKILL, False, False),
)


def run(settings: Settings) -> Result:
    """Cause each kind of fault `settings.repeat` times."""
    series: dict[str, list[tuple[float, float]]] = {}
    for kind in _KINDS:
        for number in range(settings.repeat):  # a node that outlived its executor has none to kill: start a new Spark
            with spark_session(memory_mb=1024) as spark, tempfile.TemporaryDirectory() as folder:
                pair = _hurt_once(settings, spark, folder, kind)
            settings.say(f"going_on: {kind.what} {number + 1}/{settings.repeat}: {pair[0]:.2f} and {pair[1]:.2f} s")
            series.setdefault(kind.what, []).append(pair)
    ratios = []
    for kind in _KINDS:
        pause, back = (median([pair[place] for pair in series[kind.what]]) for place in (0, 1))
        ratios.append(Ratio(f"{kind.what}: the longest time between steps", pause, _PAUSE, "s", 1.0, at_most=True))
        if kind.replaced:
            ratios.append(Ratio(f"{kind.what}: until another takes its place", back, HEARTBEAT, "s"))
    return Result("going_on", tuple(ratios), {"series": series}, (f"heartbeat_timeout={HEARTBEAT:g} s",))


def _hurt_once(settings: Settings, spark: SparkSession, folder: str, kind: _Kind) -> tuple[float, float]:
    options = {"restarts": 1, "heartbeat_timeout": HEARTBEAT, "model_dir": folder}
    with fed_for_ever(spark, kind.asynchronous, settings.rows or _ROWS, **options) as cluster:
        return _hurt(cluster, kind)


def _hurt(cluster: Cluster, kind: _Kind) -> tuple[float, float]:
    """Cause a fault; return the longest time between two steps, and the time until the new process, in seconds."""
    wait_for(lambda: _step(cluster) > 0 and cluster.state.value == "RUNNING" and is_whole(cluster))
    generation, pid = cluster.snapshot().generation, _pid(cluster)
    os.kill(kind.find(pid), kind.how)
    began = changed = time.monotonic()
    step, pause, back, never = _step(cluster), 0.0, 0.0, threading.Event()
    while (now := time.monotonic()) < began + _WATCHED or (kind.replaced and not back):
        if _step(cluster) != step:
            step, changed = _step(cluster), now
        pause = max(pause, now - changed)
        if not back and _pid(cluster) not in (0, pid) and is_whole(cluster):
            back = now - began
        if cluster.snapshot().generation != generation:
            raise RuntimeError("the nodes started again")
        never.wait(0.01)
    return pause, back


def _step(cluster: Cluster) -> int:
    return cluster.snapshot().nodes[0].step or 0


def _pid(cluster: Cluster) -> int:
    return next(node.pid or 0 for node in cluster.snapshot().nodes if node.node == _NODE)
