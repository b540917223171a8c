"""Measure how soon a kernel shows a detached cluster of 64 nodes with its whole history, and has that history itself.

The cluster's process is one of its own, with the server of a detached cluster, and what a long training has left: the
most steps that a history keeps. It answers at a socket, as on the kernel's host, and at a door, as on an executor.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from benchmarks.settings import Settings
    from tfos_nb.state.history import History

__all__ = ["main", "run"]

WITHIN = 3.0  # seconds
STEPS, STEPS_OF_EACH, EPOCHS = 10_000, 8_000, 30
NAME = "imagenet"


def main(folder: str) -> None:
    """Be the cluster's process: publish where it answers, and serve until the standard input ends."""
    from benchmarks.panel import NODES, Busy
    from tfos_nb.detached import places
    from tfos_nb.detached.messages import HistoryParts, reports_of
    from tfos_nb.detached.on_executor import door_in_place
    from tfos_nb.detached.places import DetachedPlace
    from tfos_nb.detached.server import CallDesk, CallServer, StopRequests
    from tfos_nb.records.run import this_process
    from tfos_nb.runtime.control.door import Door
    from tfos_nb.state.chart_data import chart_data
    from tfos_nb.version import __version__

    busy, history = Busy(), _long_history(NODES)
    methods: dict[str, Callable[..., Any]] = {
        "plan": lambda: {"workers": NODES},
        "snapshot": busy.snapshot,
        "history": lambda: HistoryParts.of(history),
        "reports": lambda node: reports_of(history, node),
        "curves": lambda metric, by, node: chart_data(history.points(node), metric=metric, by=by, node=node),
    }
    server = CallServer(os.path.join(folder, "calls"), methods, StopRequests(busy))
    server.start()
    door = Door(CallDesk(server), host="127.0.0.1", bind="127.0.0.1")
    for name, address in (("", {}), ("far-", door_in_place(door.open()))):
        number = ("b" if address else "a") * 12
        calls = os.path.join(folder, "calls")
        places.publish(DetachedPlace(number, name + NAME, this_process(), __version__, calls, door=address))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    door.close()


def _long_history(nodes: int) -> History:
    from tfos_nb.runtime.control.reports import StepReport
    from tfos_nb.state import history as histories

    history, each = histories.History("worker:0", nodes), STEPS // EPOCHS
    for node in map("worker:{}".format, range(nodes)):
        for step in range(STEPS if node == "worker:0" else STEPS_OF_EACH):
            metrics = {"loss": 1 / (1 + step), "accuracy": 0.9431 + step / 1e6, "auc": 0.9, "lr": 0.001}
            ends = (step + 1) % each == 0
            history.record(
                node,
                StepReport(
                    epoch=step // each + 1, epochs=EPOCHS, step=step % each, steps=each, metrics=metrics, epoch_end=ends
                ),
            )
    return history


@contextmanager
def _served() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_DATA_HOME"] = folder
        command = [sys.executable, "-c", f"from benchmarks.attach import main; main({folder!r})"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, cwd=Path(__file__).parent.parent, **pipes) as process:  # type: ignore[call-overload]
            process.stdout.readline()
            yield
            process.stdin.close()


def run(settings: Settings) -> Result:
    """Attach several times, and take the times."""
    import tfos_nb
    from tfos_nb.widgets.cluster_display import cluster_bundle

    times: dict[str, dict[str, list[float]]] = {}
    with _served():
        for _ in range(settings.repeat):
            for way, name in (("", NAME), (", by a port", f"far-{NAME}")):
                taken = times.setdefault(way, {"panel": [], "history": [], "steps": [], "static": []})
                began = time.perf_counter()
                cluster = tfos_nb.attach(name)
                cluster.snapshot()
                cluster.curves("loss", "step")
                taken["panel"].append(time.perf_counter() - began)
                began = time.perf_counter()
                history = cluster.history
                assert len(history.steps()) >= STEPS
                taken["history"].append(time.perf_counter() - began)
                began = time.perf_counter()
                assert len(history.steps("worker:7")) >= 7000
                taken["steps"].append(time.perf_counter() - began)
                began = time.perf_counter()
                cluster_bundle(cluster)
                taken["static"].append(time.perf_counter() - began)
    what = {
        "panel": "attach, state and a chart",
        "history": "cluster.history",
        "steps": "the steps of another node",
        "static": "the panel without widgets",
    }
    ratios = [
        Ratio(f"64 nodes: {what[kind]}{way}", median(seconds), WITHIN, "s", 1.0, at_most=True)
        for way, taken in times.items()
        for kind, seconds in taken.items()
    ]
    settings.say(f"attach: {times}")
    return Result("attach", tuple(ratios), {"seconds": times}, ())
