"""Limit the fits of this program that run at the same time to Spark's slots. The others wait in order.

Spark would start the nodes of two clusters alternately until no slot is left, and both would wait for their remaining
nodes. So only one fit starts at a time, when its slots are free. It counts as using them until it has ended::

    CrossValidator(parallelism=4) ─▶ fit ─▶ admitted(…) ─▶ its nodes are up ─▶ place.started() ─▶ the next one starts
                                     fit ─▶ waits: for the fits before it, or for other users of Spark's slots
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from tfos_nb.errors import PlanError
from tfos_nb.spark.contexts import context_of
from tfos_nb.spark.session import check_slots, most_slots, resource_profile

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

__all__ = ["Need", "Place", "admitted"]

_LOOK_SECONDS = 1.0
"""Seconds between two checks of Spark's slots, since Spark offers Python no event for a slot that becomes free."""

_SAY_AFTER = 5.0
"""Seconds after which the user is informed that a fit waits."""

_lines: dict[Hashable, _FitQueue] = {}
_lines_lock = threading.Lock()


@dataclass(frozen=True)
class Need:
    """Resources that one fit needs.

    Parameters
    ----------
    nodes : int
        Number of nodes that need a slot.
    cpus, gpus : int
        CPUs and GPUs of each node.
    feeding : bool
        Whether rows are fed to the nodes, which needs one more slot.
    writes : tuple of str
        Directories that no other fit may write at the same time.
    """

    nodes: int
    cpus: int = 1
    gpus: int = 0
    feeding: bool = True
    writes: tuple[str, ...] = ()


class Place:
    """One fit's place among the fits that run or wait. It ends with the block of :func:`admitted`."""

    def __init__(self, line: _FitQueue, need: Need, total: int) -> None:
        self._line = line
        self.need = need
        self.total = total
        self.starting = False

    @property
    def share(self) -> float:
        """The fraction of the slots that its nodes hold. If rows are fed, one slot is not counted if possible."""
        spare = int(self.need.feeding and self.total > self.need.nodes)
        return self.need.nodes / max(self.total - spare, 1)

    def started(self) -> None:
        """Record that the nodes run, so that the next fit may start."""
        self._line.has_started(self)

    def feeders(self) -> int | None:
        """Return how many tasks may feed these nodes at once, so that other fits have slots; None: no limit."""
        return self._line.feeders(self)


class _FitQueue:
    """The fits of one Spark application: those that run, and those that wait, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: list[Place] = []
        self._waiting: list[Place] = []

    def enter(self, place: Place, may_start: Callable[[], bool]) -> None:
        """Wait until the fits before this one leave enough slots, and ``may_start`` returns True."""
        with self._changed:
            self._refuse_same_directory(place)
            self._waiting.append(place)
        try:
            with self._changed:
                # No timeout here: the other fits have their own, and each one notifies this condition when it ends.
                while not self._has_room(place):
                    self._changed.wait(_LOOK_SECONDS)
                place.starting = True
                self._waiting.remove(place)
                self._inside.append(place)
            while not may_start():
                with self._changed:
                    self._changed.wait(_LOOK_SECONDS)
        except BaseException:
            self.leave(place)
            raise

    def _refuse_same_directory(self, place: Place) -> None:
        taken = {directory for other in (*self._inside, *self._waiting) for directory in other.need.writes}
        for directory in place.need.writes:
            if directory in taken:
                raise PlanError(
                    f"two fits at once would write {directory}, each over the other's: leave model_dir and export_dir "
                    "out, and each fit gets a directory of its own; or fit one after the other (parallelism=1)"
                )

    def _has_room(self, place: Place) -> bool:
        if self._waiting[0] is not place or any(other.starting for other in self._inside):
            return False
        return not self._inside or sum(other.share for other in self._inside) + place.share <= 1 + 1e-9

    def has_started(self, place: Place) -> None:
        with self._changed:
            place.starting = False
            self._changed.notify_all()

    def leave(self, place: Place) -> None:
        with self._changed:
            for places in (self._inside, self._waiting):
                if place in places:
                    places.remove(place)
            self._changed.notify_all()

    def feeders(self, place: Place) -> int | None:
        with self._changed:
            fits = len(self._inside) + len(self._waiting)
            if fits < 2:
                return None
            nodes = sum(other.need.nodes for other in self._inside)
            nodes += max((other.need.nodes for other in self._waiting), default=0)
            return max((place.total - nodes) // fits, 1)


def _line_of(spark: SparkSession) -> _FitQueue:
    with _lines_lock:
        return _lines.setdefault(context_of(spark).key, _FitQueue())


@contextlib.contextmanager
def admitted(spark: SparkSession, need: Need, timeout: float, say: Callable[[str], Any]) -> Iterator[Place]:
    """Wait until Spark has slots for a fit, and count it as running during the block.

    Parameters
    ----------
    spark : SparkSession
        The session in which it will run.
    need : Need
        The resources that it needs.
    timeout : float
        Seconds to wait for slots that are held by something other than fits of this program.
    say : callable
        Called with a line for the user if the wait is long.

    Yields
    ------
    Place
        The fit's place.

    Raises
    ------
    PlanError
        If Spark has too few slots in total, or they are not free in time. The message says what to change.
    """
    free = _Free(spark, need, resource_profile(spark, need.cpus, need.gpus), timeout, say)
    line = _line_of(spark)
    place = Place(line, need, free.total)
    line.enter(place, free)
    try:
        yield place
    finally:
        line.leave(place)


class _Free:
    """Callable that returns whether Spark's slots for a fit are free now, and raises after the timeout."""

    def __init__(
        self,
        spark: SparkSession,
        need: Need,
        profile: ResourceProfile | None,
        timeout: float,
        say: Callable[[str], Any],
    ) -> None:
        self._spark, self._need, self._profile = spark, need, profile
        self._timeout, self._say = timeout, say
        self.total = most_slots(spark, profile, cpus=need.cpus, gpus=need.gpus, at_least=need.nodes + int(need.feeding))
        # If there are as many nodes as slots, the nodes' tasks leave their slots to the tasks that feed rows.
        self._feeding = need.feeding and self.total > need.nodes
        if self.total < need.nodes:
            self._check()
        self._begun = time.monotonic()
        self._turn = 0.0
        self._told = False

    def _check(self) -> None:
        need = self._need
        check_slots(self._spark, need.nodes, self._feeding, cpus=need.cpus, gpus=need.gpus, profile=self._profile)

    def __call__(self) -> bool:
        self._turn = self._turn or time.monotonic()  # the wait for other fits does not count
        try:
            self._check()
        except PlanError as error:
            now = time.monotonic()
            if now - self._turn > self._timeout:
                waited = f"this fit has waited for its slots for {self._timeout:g} s (slot_timeout)"
                raise PlanError(f"{waited}: {error}") from None
            if not self._told and now - self._begun > _SAY_AFTER:
                self._told = True
                self._say(f"waiting for slots: {error}")
            return False
        return True
