"""Runs of tfos_nb that several benchmarks need."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import programs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tfos_nb import Cluster

__all__ = ["Passes", "count_through_cluster", "span_rate"]

WORKERS = 2
BATCH_SIZE = 1024
_READY_SECONDS = 180.0


@dataclass(frozen=True)
class Passes:
    """Measurements of each pass on the nodes, and of the whole run on the driver.

    Parameters
    ----------
    nodes : list of list of dict
        For each node, its passes: begin, first, last, rows, first_rows.
    train_seconds : float
        From the call of ``train`` until it had returned and the last row was in its node.
    """

    nodes: list[list[dict[str, float]]]
    train_seconds: float

    def of(self, number: int) -> list[dict[str, float]]:
        """Return pass `number` of each node."""
        return [passes[number] for passes in self.nodes]

    def rows(self, number: int) -> int:
        """Rows that all nodes took in pass `number`."""
        return int(sum(one["rows"] for one in self.of(number)))


def count_through_cluster(spark: SparkSession, frame: DataFrame, passes: int = 1) -> Passes:
    """Feed `frame` to two workers that only count, `passes` times."""
    from tfos_nb import launch

    args = {"passes": passes, "batch_size": BATCH_SIZE}
    with launch(programs.count_rows, args, spark=spark, workers=WORKERS, name="bench") as cluster:
        _await_ready(cluster)
        started = time.time()
        cluster.train(frame, epochs=passes)
        returned = time.time()
        cluster.wait()
        results: dict[str, Any] = cluster.results()
    nodes = [results[node]["passes"] for node in sorted(results)]
    finished = max(returned, *(one["last"] for one in (passes[-1] for passes in nodes)))
    return Passes(nodes, finished - started)


def span_rate(spans: list[dict[str, float]]) -> float:
    """Rows a second from the first row in any node to the last row in any node."""
    rows = sum(one["rows"] - one["first_rows"] for one in spans)
    return rows / (max(one["last"] for one in spans) - min(one["first"] for one in spans))


def _await_ready(cluster: Cluster) -> None:
    """Wait until every main has loaded TensorFlow; otherwise rows would gather in the nodes before the clock starts."""
    deadline = time.monotonic() + _READY_SECONDS
    pause = threading.Event()
    while any(node.step is None for node in cluster.snapshot().nodes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the nodes did not report that they are ready within {_READY_SECONDS:.0f} s")
        pause.wait(0.05)
