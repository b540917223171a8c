"""Cause a fault every 30 s, and compare the rows/s of the training with those of the same training without faults."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import programs
from benchmarks.recovery import EPOCHS, feed
from benchmarks.session import spark_session
from benchmarks.table import Ratio, Result, median
from tests.faults import its_host, its_supervisor, itself
from tests.local_cluster import ARCHIVE, BRIEF_JAVA
from tfos_nb.driver.membership.events import (
    ContinueWithout,
    HeartbeatTimedOut,
    MessageReceived,
    RestartAll,
    StreamEnded,
    SupervisorConnected,
)
from tfos_nb.driver.membership.journal import ClusterEvent
from tfos_nb.runtime.control.lifecycle import MainRaised, MainStarted, NodeEnded, Reservation
from tfos_nb.runtime.node.warm_process import DAEMON_CONF, PYTHON_DAEMON

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from benchmarks.settings import Settings
    from tfos_nb import Cluster

__all__ = ["run"]

_GOODPUT = 0.9
_HEARTBEAT = 3.0  # the shortest limit: with a fault every 30 s a stopped process must be noticed soon
_EVERY = 30.0  # seconds between two faults
_CALM = 60.0  # seconds without faults, before the first one and after the last one
_OVER = 10.0  # seconds before the next fault, in which nothing of the last one is left
_ROWS, _BATCH = 40_000, 128
_BEGIN = 90.0  # seconds in which the first steps must be done
_FAULTS: tuple[tuple[str, Callable[[int], int], int], ...] = (
    ("a process is killed", itself, signal.SIGKILL),
    ("a supervisor is killed", its_supervisor, signal.SIGKILL),
    ("an executor and its supervisor are killed", its_host, signal.SIGKILL),
    ("a process is stopped by a signal", itself, signal.SIGSTOP),
)


class _Step(NamedTuple):
    """A step that was done; a recovery may have discarded it."""

    time: float
    generation: int
    epoch: int
    batch: int


@dataclass(frozen=True)
class _Cost:
    """Cost of one fault: the seconds of each phase, in order."""

    what: str
    at: float
    noticed: float
    gathered: float
    begun: float
    first_step: float
    again: float

    @property
    def whole(self) -> float:
        """Return the seconds until the training is back where it was."""
        return self.noticed + self.gathered + self.begun + self.first_step + self.again


def run(settings: Settings) -> Result:
    """Train for `settings.minutes` with faults of each kind in turn."""
    with spark_session(memory_mb=1024, settings=_LASTING) as spark, tempfile.TemporaryDirectory() as folder:
        with _training(spark, Path(folder)) as cluster:
            calm = _rate_alone(Path(folder))
            settings.say(f"goodput: left alone, {calm * _BATCH:,.0f} rows/s")
            began = time.time()
            costs = _hurt_often(settings, cluster, Path(folder), began + settings.minutes * 60)
            ended = time.time()
            calm = (calm + _rate_alone(Path(folder))) / 2  # machines are shared: before and after
        steps = _steps(Path(folder))
        wrong = _wrong_epochs(Path(folder))
    hurt = _useful(steps, began, ended) / (ended - began)
    settings.say(f"goodput: hurt {len(costs)} times, {hurt * _BATCH:,.0f} rows/s, {hurt / calm:.1%}")
    # A shared host may be slower in the calm minutes than between them; by then a fault is over.
    between = median([_useful(steps, one.at - _OVER, one.at) / _OVER for one in costs] or [calm])
    ratios = [
        Ratio(f"rows/s with a fault every {_EVERY:g} s", hurt * _BATCH, calm * _BATCH, "rows/s", _GOODPUT),
        Ratio(f"the same, and rows/s in the {_OVER:g} s before each fault", hurt * _BATCH, between * _BATCH, "rows/s"),
        Ratio("epochs that do not have every row once", float(wrong), 0.0, "epochs", 1.0, at_most=True),
    ]
    for what, _, _ in _FAULTS:
        of_this = [one for one in costs if one.what == what]
        rates = [_useful(steps, one.at, one.at + _EVERY) / _EVERY for one in of_this] or [0.0]
        ratios.append(
            Ratio(f"{what}: rows/s in the {_EVERY:g} s after", median(rates) * _BATCH, calm * _BATCH, "rows/s")
        )
        for part in ("noticed", "gathered", "begun", "first_step", "again"):
            values = [getattr(one, part) for one in of_this] or [0.0]
            ratios.append(Ratio(f"{what}: {_PARTS[part]}", median(values), _EVERY, "s"))
    figures = {"calm": calm, "hurt": hurt, "costs": [asdict(one) for one in costs]}
    return Result("goodput", tuple(ratios), figures, (f"heartbeat_timeout={_HEARTBEAT:g} s, min_workers=1",))


_LASTING = {
    "spark.task.maxFailures": "1000",
    "spark.deploy.maxExecutorRetries": "-1",
    # A new executor shares two cores with the training: it loads, compiles and imports less, as docs/recovery.md says.
    DAEMON_CONF: PYTHON_DAEMON,
    "spark.executor.extraJavaOptions": shlex.join((*BRIEF_JAVA, f"-XX:SharedArchiveFile={ARCHIVE}")),
}
_PARTS = {
    "noticed": "until it is noticed",
    "gathered": "then until the nodes have come",
    "begun": "then until main has begun",
    "first_step": "then until a step is done",
    "again": "steps that are done again",
}


@contextmanager
def _training(spark: SparkSession, folder: Path) -> Iterator[Cluster]:
    from tfos_nb import launch

    args = {"folder": str(folder), "batch_size": _BATCH, "epochs": EPOCHS}
    options: dict[str, Any] = {"restarts": 10_000, "min_workers": 1, "heartbeat_timeout": _HEARTBEAT}
    cluster = launch(programs.fit_and_tell, args, spark=spark, workers=2, name="goodput", **options)
    rows = spark.range(0, _ROWS, 1, 8).selectExpr("id", "double(0) as y")
    feeding = threading.Thread(target=feed, args=(cluster, rows), daemon=True)
    feeding.start()
    try:
        yield cluster
    finally:
        cluster.close()
        feeding.join(_BEGIN)


def _rate_alone(folder: Path) -> float:
    """Wait until the cluster trains, cause no faults for a while, and return its steps a second."""
    deadline, pause = time.monotonic() + _BEGIN, threading.Event()
    while len(_steps(folder)) < 50:
        if time.monotonic() > deadline:
            raise TimeoutError("the cluster does not train")
        pause.wait(0.1)
    began = time.time()
    pause.wait(_CALM)
    return _useful(_steps(folder), began, began + _CALM) / _CALM


def _hurt_often(settings: Settings, cluster: Cluster, folder: Path, until: float) -> list[_Cost]:
    costs: list[_Cost] = []
    planned_at = time.time() - (time.monotonic() - cluster._controller._planned_at)
    pause, number = threading.Event(), 0
    while time.time() + _EVERY <= until:
        what, find, how = _FAULTS[number % len(_FAULTS)]
        names = [node for node in cluster.snapshot().nodes if node.pid and node.status.value == "TRAINING"]
        node = names[(number // len(_FAULTS)) % len(names)]
        at = time.time()
        os.kill(find(node.pid or 0), how)
        pause.wait(_EVERY)
        number += 1
        cost = _cost(what, at, _steps(folder), [(planned_at + one.seconds, one) for one in cluster.events()])
        if cost is None:
            settings.say(f"goodput: {what} ({node.node}): no step since")
            continue
        costs.append(cost)
        settings.say(
            f"goodput: {what} ({node.node}): {cost.whole:.1f} s: noticed {cost.noticed:.1f}, gathered "
            f"{cost.gathered:.1f}, begun {cost.begun:.1f}, first step {cost.first_step:.1f}, again {cost.again:.1f}"
        )
    return costs


def _cost(what: str, at: float, steps: Sequence[_Step], events: Sequence[tuple[float, ClusterEvent]]) -> _Cost | None:
    """Divide the time after the fault at this time into its phases; a process may also go on where it was."""
    before = max((one.generation for one in steps if one.time <= at), default=0)
    later = [one for one in steps if one.generation > before and one.time > at]
    since = [(when, one.event) for when, one in events if when > at]
    again = next((when for when, event in since if isinstance(event, RestartAll)), None)
    if again is None:
        times = [at, *(one.time for one in steps if at < one.time < at + _EVERY)]
        pauses = itertools.pairwise(times)
        goes_on = max(pauses, key=lambda pause: pause[1] - pause[0], default=(at, at))[1]
        return _Cost(what, at, goes_on - at, 0.0, 0.0, 0.0, 0.0) if goes_on > at else None
    if not later:
        return None
    first = later[0].time
    begun = [when for when, event in since if again <= when <= first and _is_said(event, MainStarted)]
    begin = max(begun, default=again)
    came = [when for when, event in since if again <= when <= begin and _comes(event)]
    told = [when for when, event in since if when <= again and _tells_of_it(event)]
    noticed, gathered = told[0] if told else again, max(came, default=again)
    done = {(one.epoch, one.batch) for one in steps if one.time < first}
    repeats = len({(one.epoch, one.batch) for one in later} & done)
    a_step = median([after.time - one.time for one, after in itertools.pairwise(later[:100])] or [0.0])
    return _Cost(what, at, noticed - at, gathered - noticed, begin - gathered, first - begin, repeats * a_step)


def _comes(event: Any) -> bool:
    return isinstance(event, (SupervisorConnected, ContinueWithout)) or _is_said(event, Reservation)


def _is_said(event: Any, kind: type) -> bool:
    return isinstance(event, MessageReceived) and isinstance(event.message, kind)


def _tells_of_it(event: Any) -> bool:
    return (
        isinstance(event, (StreamEnded, HeartbeatTimedOut)) or _is_said(event, NodeEnded) or _is_said(event, MainRaised)
    )


def _steps(folder: Path) -> list[_Step]:
    """Read the steps that the first worker of each generation has written."""
    found: dict[tuple[int, int, int], _Step] = {}
    for file in folder.glob("steps-*"):
        for line in file.read_text().splitlines():
            parts = line.split()
            if len(parts) == 4:  # a killed process may have written half a line
                step = _Step(float(parts[0]), *map(int, parts[1:]))
                known = found.setdefault(step[1:], step)
                if step.time < known.time:
                    found[step[1:]] = step
    return sorted(found.values())


def _useful(steps: Sequence[_Step], began: float, ended: float) -> int:
    """Count the steps within a period that had not been done before."""
    first: dict[tuple[int, int], float] = {}
    for step in steps:
        first.setdefault((step.epoch, step.batch), step.time)
    return sum(began <= when < ended for when in first.values())


def _wrong_epochs(folder: Path) -> int:
    """Count the epochs after which the model's sum was wrong: every row must count once an epoch."""
    told = Counter(
        int(total) == (int(epoch) + 1) * sum(range(_ROWS)) % programs.PRIME
        for file in folder.glob("epochs-*")
        for epoch, total in (line.split() for line in file.read_text().splitlines())
    )
    assert told, "no epoch has ended"
    return told[False]
