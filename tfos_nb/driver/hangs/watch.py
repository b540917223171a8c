"""Thread that notices that a training does not move, and says why (:mod:`tfos_nb.driver.hangs.explanation`).

::

    nothing moves for max(10 s, five usual steps) ──▶ AskStacks to all supervisors ──▶ explain() ──▶ log, panel

    before the first step ──▶ AskStacks again and again ──▶ are_still() for 10 s ──▶ explain_start() ──▶ log, panel

    never_ends(), after 10 s and once more a second later ──▶ the cluster fails

    nothing moves, and two nodes do not reach each other (:mod:`tfos_nb.driver.hangs.links`) ──▶ log, a failure

    the others wait for a worker in 20 steps (:mod:`tfos_nb.driver.hangs.stragglers`) ──▶ AskStacks ──▶ log, panel

A process that was stopped by a signal is reported after four seconds: TensorFlow ends its peers after ten. Heartbeats
say whether there is one.

Something has moved if a node has reported or has taken rows. A cluster is watched from the time when ``main`` runs on
all nodes that train. Until all that are fed have begun, models and graphs are made and files are loaded. So a node must
then have been still between two looks (:mod:`tfos_nb.driver.hangs.starting`). A program that has taken all its
rows may do something of its own for as long as it likes, unless a node waits for the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfos_nb.driver.hangs.explanation import Finding, explain, never_ends
from tfos_nb.driver.hangs.links import LinksWatched, LinkWatch
from tfos_nb.driver.hangs.starting import Look, are_still, explain_start
from tfos_nb.driver.hangs.stragglers import Mark, Stragglers, say_slow

__all__ = ["HangWatch", "Watched"]

logger = logging.getLogger(__name__)

_EVERY = 1.0  # seconds between two looks
_LEAST, _STEPS = 10.0, 5.0  # seconds, and usual steps
_AT_FIRST, _LATER = 2.0, 0.1  # seconds, and part of the time without a move, until starting nodes are asked again
_ASKED_A_SECOND = 100  # nodes, at most, that are asked again and again
_SOON = 4.0  # seconds, after which a stopped process is reported
_WITHIN = 3.0  # seconds for the supervisors' answers
_SAMPLES = 5  # stacks of a slow worker, which is not always where it loses its time


class Watched(LinksWatched, Protocol):
    """Watched nodes; :class:`tfos_nb.driver.cluster_controller.ClusterController` implements it."""

    def marks(self) -> Mapping[str, Any] | None:
        """Return by node what changes when it moves; None while nothing can be expected of the nodes."""

    @property
    def starts(self) -> bool:
        """Whether a node that is fed has neither taken a row nor reported a step yet."""

    def worked(self) -> Mapping[str, float]:
        """Return by node the CPU time in seconds that it has used."""

    @property
    def some_are_stopped(self) -> bool:
        """Whether a signal has stopped the process of a node that trains."""

    @property
    def has_rows_left(self) -> bool:
        """Whether a node that trains has rows to take."""

    @property
    def returned(self) -> Sequence[str]:
        """The nodes that trained and whose main has returned."""

    def write_findings(self, findings: Sequence[Finding]) -> None:
        """Show what the nodes do; with none, that they move again."""

    def step_marks(self) -> Mapping[str, Mark]:
        """Return by node how far it has come; empty unless all of them wait for each other in their steps."""

    def show_slow(self, texts: Mapping[str, str]) -> None:
        """Show why the others wait for these nodes; of the others, no more."""

    def fail(self, node: str, cause: str) -> None:
        """End the cluster by a node's failure, which is the program's fault."""


class HangWatch:
    """Watch one cluster until it is over.

    Parameters
    ----------
    name : str
        The cluster's.
    watched : Watched
        Its nodes.
    over : threading.Event
        Set when the cluster has ended.
    """

    def __init__(self, name: str, watched: Watched, over: threading.Event) -> None:
        self._name, self._watched, self._over = name, watched, over
        self._marks: Mapping[str, Any] | None = None
        self._moved = self._asked = time.monotonic()
        self._before: Look | None = None  # at nodes that start: since then they are still
        self._usual = 0.0  # seconds between two moves
        self._has_moved = False
        self._was_starting = False  # at the last move, a node had not begun: the next one may be its first row
        self._told = self._looked = self._suspected = self._failed = False
        self._stragglers = Stragglers()
        self._links = LinkWatch(name, watched)
        self._slow: dict[str, str] = {}

    def start(self) -> None:
        """Watch from now on."""
        threading.Thread(target=self._run, name=f"tfos_nb hang watch {self._name}", daemon=True).start()

    def _run(self) -> None:
        while not self._over.wait(_EVERY):
            self.look(time.monotonic())
            self.look_for_stragglers()
            self._links.look(time.monotonic())

    def look(self, now: float) -> None:
        """Look once; ``now`` is a time of the monotonic clock."""
        marks = self._watched.marks()
        if marks is None or marks != self._marks:
            self._note_move(marks, now)
        elif not self._told and now - self._asked >= self._pause(now):
            self._asked = now
            self._look_why(now)
        elif not self._looked and now - self._moved >= _SOON and self._watched.some_are_stopped:
            self._looked = True
            self._explain(now - self._moved, stopped=True)
        elif self._told and not self._failed and now - self._asked >= (_EVERY if self._suspected else _LEAST):
            self._asked = now
            self._ask_again(now)

    def _look_why(self, now: float) -> None:
        """Look why nothing moves, and tell it."""
        if self._is_starting:
            self._explain_start(now)
        else:
            self._explain(now - self._moved)

    def _ask_again(self, now: float) -> None:
        """Look whether what was told is so for ever, or is over."""
        if self._watched.returned:
            self._fail_if_endless()
        elif self._is_starting:
            self._end_if_not_still(now)

    def look_for_stragglers(self) -> None:
        """Look once whether the others wait for a worker in each step; tell it once, and when it is over."""
        found = {one.node: one for one in self._stragglers.take(self._watched.step_marks())}
        if found.keys() == self._slow.keys():
            return
        new = [one for name, one in found.items() if name not in self._slow]
        asked = [one.node for one in new]
        samples = [self._watched.stacks(_WITHIN, asked) for _ in range(_SAMPLES)] if new else []
        texts = {one.node: say_slow(one, [taken[one.node] for taken in samples if one.node in taken]) for one in new}
        for node in self._slow.keys() - found.keys():
            logger.warning("cluster %s: %s is no longer slow", self._name, node)
        for node, text in texts.items():
            logger.warning("cluster %s: %s %s", self._name, node, text)
        self._slow = {name: texts.get(name) or self._slow[name] for name in found}
        self._watched.show_slow(self._slow)

    def _note_move(self, marks: Mapping[str, Any] | None, now: float) -> None:
        """Record that something has moved, or that nothing can be expected to."""
        same_nodes = marks is not None and self._marks is not None and marks.keys() == self._marks.keys()
        if same_nodes and not self._was_starting:
            if self._has_moved and not self._told:  # the first step takes longer than usual: TensorFlow traces it
                self._usual += ((now - self._moved) - self._usual) / (4 if self._usual else 1)
            self._has_moved = True
        self._was_starting = self._watched.starts
        self._end(now, marks is not None)
        self._marks, self._moved, self._asked, self._looked, self._before = marks, now, now, False, None

    @property
    def _is_starting(self) -> bool:
        return self._watched.starts and not self._watched.returned

    def _pause(self, now: float) -> float:
        """Return the seconds after which nodes that do not move are asked, or asked again."""
        if self._is_starting:
            pause = min(_LEAST, max(_AT_FIRST, _LATER * (now - self._moved)))
            return max(pause, len(self._marks or ()) / _ASKED_A_SECOND)
        return _LEAST if self._watched.returned else self._patience

    @property
    def _patience(self) -> float:
        """Seconds without a move after which a training counts as hanging."""
        return max(_LEAST, _STEPS * self._usual)

    def _ask(self) -> tuple[str, list[Finding], str]:
        """Ask the nodes; return what all and each of them do, and why this never ends; empty if it may."""
        situations, returned = self._watched.situations(self._watched.stacks(_WITHIN)), self._watched.returned
        told, findings = explain(situations, returned)
        return told, findings, never_ends(findings, returned)

    def _explain(self, seconds: float, *, stopped: bool = False) -> None:
        """Ask the nodes, and tell; with ``stopped``, only if a process was stopped by a signal."""
        told, findings, endless = self._ask()
        has_moved = self._watched.marks() != self._marks
        if has_moved or all(one.works for one in findings):  # a graph may be made, or compiled
            return
        if stopped and not any(one.stopped for one in findings):
            return
        if not stopped and not endless and seconds < self._patience:
            return
        if not self._watched.has_rows_left and not any(one.waits or one.stopped for one in findings):
            return  # every main has all its rows, and does something of its own
        self._suspected = bool(endless)
        self._tell(seconds, told, findings)

    def _explain_start(self, now: float) -> None:
        """Ask nodes that have not come to their first step, and tell if none of them has done anything for 10 s."""
        look = self._look_at_start(now)
        before = self._before or look
        if now - before.at < _LEAST or self._watched.marks() != self._marks:
            return
        told, findings = explain_start(before, look)
        if told and (self._watched.has_rows_left or any(one.waits for one in findings)):
            self._tell(now - self._moved, told, findings)

    def _end_if_not_still(self, now: float) -> None:
        """Ask the nodes again; tell that they continue if one does, though it has not come to its first step."""
        before = self._before
        self._look_at_start(now)
        if before is not None and self._before is not before:
            self._end(now, True)

    def _look_at_start(self, now: float) -> Look:
        """Ask the nodes, and keep this look if there was none, or if a node has done something since."""
        situations = self._watched.situations(self._watched.stacks(_WITHIN))
        look = Look(now, situations, self._watched.worked())
        if self._before is None or not are_still(self._before, look):
            self._before = look
        return look

    def _tell(self, seconds: float, told: str, findings: Sequence[Finding]) -> None:
        self._told = True
        self._watched.write_findings(findings)
        logger.warning("cluster %s: no step for %.0f s: %s. cluster.stacks() shows more", self._name, seconds, told)

    def _fail_if_endless(self) -> None:
        """Ask the nodes again; end the cluster if twice they waited for one whose ``main`` has returned."""
        _, findings, endless = self._ask()
        is_sure = bool(endless) and self._watched.marks() == self._marks
        if is_sure and self._suspected:
            self._failed = True
            self._watched.fail(findings[0].node, endless)
        self._suspected = is_sure

    def _end(self, now: float, goes_on: bool) -> None:
        self._suspected = False
        if self._told:
            self._told = False
            self._watched.write_findings(())
            if goes_on:
                logger.warning("cluster %s: continues after %.0f s", self._name, now - self._moved)
