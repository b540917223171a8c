"""Run the driver's components in a separate process, for simulated nodes.

Door, controller, ledger, lifecycle and panel are real. There is no Spark and no executor: the nodes are those of
:mod:`benchmarks.fleet_nodes`. Prints one line of JSON. The first cluster is measured in a steady state, and Stop
ends it. A second cluster, whose nodes restart, loses a node.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.fleet_nodes import Fleet
from benchmarks.panel import count_messages
from tfos_nb.cluster import Cluster
from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.driver.cluster_lifecycle import ClusterLifecycle
from tfos_nb.driver.outcome import ClusterOutcome
from tfos_nb.driver.settings import Settings
from tfos_nb.runtime.control.door import Door, Link
from tfos_nb.runtime.control.lifecycle import Stop
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.control.reports import Heartbeat

__all__ = ["Driver", "main"]

SETTLE_SECONDS = 3.0
STEADY_SECONDS = 12.0
PARTITIONS = 64
ROWS = 20_000  # in each partition
_PATIENCE = 180.0
_FEED_PATIENCE = 60.0  # for steps that take a second or two


class _Watched(ClusterController):
    """A controller that records how long each heartbeat was on its way."""

    def __init__(self, plan: ClusterPlan, heartbeat_timeout: float) -> None:
        super().__init__(plan, heartbeat_timeout=heartbeat_timeout)
        self.delays: deque[float] = deque(maxlen=200_000)
        self.messages = 0

    def received(self, link: Link, message: Any) -> None:
        """Handle a message, and record the delay of a heartbeat."""
        super().received(link, message)
        self.messages += 1
        if isinstance(message, Heartbeat):
            self.delays.append(time.time() - message.reports[0].time)


class _NoSpark:
    """Stand-in for Spark's jobs: none runs."""

    def cancel_all(self) -> bool:
        """Do nothing: no job runs."""
        return True

    def cancel_stage(self, stage: int, reason: str) -> None:
        """Do nothing: no stage runs."""

    def wait_for_slots(self) -> None:
        """Return at once: no slot is in use."""


class Driver(Cluster):
    """A cluster without Spark: it opens its Door, runs its lifecycle, and shows its state.

    Parameters
    ----------
    nodes : int
        Workers.
    heartbeat_timeout : float
        As :func:`tfos_nb.launch` takes it.
    """

    def __init__(self, nodes: int, heartbeat_timeout: float = 15.0) -> None:
        plan = ClusterPlan(nodes, name="fleet")
        self.id = uuid.uuid4().hex[:12]
        self._master, self._spark_ui, self._log_dir, self._tunnel = "simulated", "", "", ""
        self._settings = settings = Settings(rendezvous_timeout=_PATIENCE, heartbeat_timeout=heartbeat_timeout)
        self.controller = self._controller = _Watched(plan, heartbeat_timeout)
        self.outcome = self._outcome = ClusterOutcome(self.plan.name, self.controller)
        self._lifecycle = ClusterLifecycle(self.plan.name, self.controller, self.outcome, _NoSpark(), settings)
        self.door = Door(self.controller, host="127.0.0.1", bind="127.0.0.1")
        self.address = self.door.open()
        self._lifecycle.begin()
        self._lifecycle.run(self.door, self.address)

    def until(self, reached: Callable[[], Any], what: str, timeout: float = _PATIENCE) -> None:
        """Wait until a condition holds; the controller announces each change."""
        with self.controller.changed:
            if not self.controller.changed.wait_for(reached, timeout):
                raise TimeoutError(f"not {what} within {timeout:g} s")

    def ask_to_stop(self, grace: float) -> None:
        """Ask the cluster to stop, and return at once."""
        self.outcome.ask_to_stop(Stop("stopped by the user", grace))


@dataclass
class _Usage:
    """Processor seconds of this process, in total and by thread name."""

    wall: float
    process: float
    threads: dict[str, float]

    @classmethod
    def now(cls) -> _Usage:
        """Return the usage up to now."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        threads: dict[str, float] = {}
        for thread in psutil.Process().threads():
            name = names.get(thread.id, "gRPC and others").partition(" fleet")[0]
            threads[name] = threads.get(name, 0.0) + thread.user_time + thread.system_time
        return cls(time.monotonic(), time.process_time(), threads)

    def until(self, later: _Usage) -> dict[str, Any]:
        """Return the shares of one core that were used between this measurement and a later one."""
        wall = later.wall - self.wall
        by_thread = {name: (used - self.threads.get(name, 0.0)) / wall for name, used in later.threads.items()}
        return {
            "cpu": (later.process - self.process) / wall,
            "by_thread": {name: round(share, 4) for name, share in by_thread.items() if share > 0.001},
        }


@contextmanager
def _gathered(nodes: int) -> Iterator[tuple[Driver, Fleet, dict[str, Any]]]:
    """Yield a cluster whose nodes are all up, its nodes, and the figures of its rendezvous."""
    driver = Driver(nodes)
    try:
        with Fleet([str(node) for node in driver.plan.nodes], driver.address) as fleet:
            fleet.hear("ready", _PATIENCE)
            before, began = time.process_time(), fleet.order("come")
            started = fleet.hear("started", _PATIENCE)
            came = {
                "rendezvous": max(one["at"] for one in started) - began,
                "rendezvous_cpu": time.process_time() - before,
                "start_bytes": sum(one["bytes"] for one in started),
            }
            fleet.order("up")
            driver.until(lambda: driver.controller.all_up, "all up")
            yield driver, fleet, came
    finally:
        driver.close()


def main(nodes: int, every: float = 1.0, seconds: float = STEADY_SECONDS) -> dict[str, Any]:
    """Measure a cluster whose nodes send a heartbeat ``every`` so many seconds; ``ended`` says which step timed out."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    found: dict[str, Any] = {"nodes": nodes, "descriptors": limit, "every": every, "ended": ""}
    try:
        _measure(nodes, every, seconds, found)
    except TimeoutError as error:
        found["ended"] = str(error)
    return found


def _measure(nodes: int, every: float, seconds: float, found: dict[str, Any]) -> None:
    sizes = count_messages()
    before = psutil.Process().memory_info().rss
    with _gathered(nodes) as (driver, fleet, came):
        found |= came
        found |= _steady(driver, fleet, sizes, every, seconds)
        rss = psutil.Process().memory_info().rss
        found |= {"memory": rss, "memory_grown": rss - before, "fds": psutil.Process().num_fds()}
        found["most_memory"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            found |= _feed(driver, fleet)
        except TimeoutError as error:
            found["ended"] = str(error)  # a Stop may reach the nodes nevertheless
        found |= _stop(driver, fleet)
    with _gathered(nodes) as (driver, fleet, came):
        found["rendezvous_again"] = came["rendezvous"]
        fleet.order("beat", every=every)
        threading.Event().wait(SETTLE_SECONDS)
        found |= _lose(driver, fleet)


def _steady(driver: Driver, fleet: Fleet, sizes: list[int], every: float, seconds: float) -> dict[str, Any]:
    """Measure the driver while every node sends its heartbeats and the panel is shown."""
    from tfos_nb.widgets.live import LiveView
    from tfos_nb.widgets.panel import PanelScreen

    with contextlib.redirect_stdout(io.StringIO()), LiveView(driver, screen=PanelScreen()):
        fleet.order("beat", every=every)
        threading.Event().wait(SETTLE_SECONDS)
        fleet.order("tell")
        told = fleet.hear("told", _PATIENCE)
        driver.controller.delays.clear()
        sizes.clear()
        usage, messages = _Usage.now(), driver.controller.messages
        threading.Event().wait(seconds)
        later, taken, shown = _Usage.now(), driver.controller.messages - messages, list(sizes)
        delays = sorted(driver.controller.delays)
        fleet.order("tell")
        told_later = fleet.hear("told", _PATIENCE)
    wall = later.wall - usage.wall
    pairs = list(zip(told, told_later, strict=True))
    return {
        **usage.until(later),
        "cpu_a_message": (later.process - usage.process) / taken,
        "messages": taken / wall,
        "beats": len(delays) / wall,
        "beats_left_out": sum(after["late"] - first["late"] for first, after in pairs) / wall,
        "fleet_cpu": sum(after["cpu"] - first["cpu"] for first, after in pairs) / wall,
        "delay_median": delays[len(delays) // 2],
        "delay_99": delays[len(delays) * 99 // 100],
        "panel_messages": len(shown) / wall,
        "panel_bytes": max(shown, default=0),
    }


def _feed(driver: Driver, fleet: Fleet) -> dict[str, Any]:
    """Let simulated tasks send requests to the ledger, while the heartbeats continue."""
    from tfos_nb.runtime.feed.messages import PartitionDone  # noqa: F401 - the wire must know their messages

    feed = driver.controller.feeds.begin(1, False, 1, 1)
    began = fleet.order("feed", to=0, feed=feed.number, first=0, count=PARTITIONS, rows=ROWS)
    (fed,) = fleet.hear("fed", _FEED_PATIENCE, of=0)
    if feed.ledger.rows != PARTITIONS * ROWS:
        raise RuntimeError(f"the ledger has {feed.ledger.rows} rows of {PARTITIONS * ROWS}")
    return {"partition_seconds": (fed["at"] - began) / PARTITIONS, "partition_bytes": fed["bytes"] / PARTITIONS}


def _stop(driver: Driver, fleet: Fleet) -> dict[str, Any]:
    """Press Stop."""
    began = time.time()
    driver.ask_to_stop(30.0)
    stopped = fleet.hear("stopped", _PATIENCE)
    driver.outcome.over.wait(_PATIENCE)
    return {"stop": max(one["at"] for one in stopped) - began, "over": time.time() - began}


def _lose(driver: Driver, fleet: Fleet) -> dict[str, Any]:
    """Break one node's stream."""
    told: list[float] = []

    def wait() -> None:
        _await_failure(driver)
        told.append(time.time())

    waiter = threading.Thread(target=wait)
    waiter.start()
    fleet.order("lose", to=0, name=str(driver.plan.nodes[0]))
    (lost,) = fleet.hear("lost", _PATIENCE, of=0)
    waiter.join(_PATIENCE)
    stopped = fleet.hear("stopped", _PATIENCE)
    return {"loss_told": told[0] - lost["at"], "loss_stop": max(one["at"] for one in stopped) - lost["at"]}


def _await_failure(driver: Driver) -> None:
    driver.until(lambda: driver.controller.failures, "told of the loss")


if __name__ == "__main__":
    answer = main(int(sys.argv[1]), *(float(text) for text in sys.argv[2:]))
    sys.stdout.write(json.dumps(answer) + os.linesep)
