"""Find nodes that do not reach each other, when nothing moves and the driver reaches all of them.

::

    nothing moves for 10 s ──▶ AskLinks to all supervisors ──▶ a pair does not reach each other ──▶ log
        once more, and heartbeat_timeout is over ──▶ the pair is reported: nodes start again, or the cluster ends

    a worker that was left out has come again ──▶ AskLinks to its supervisor ──▶ it may join

Nodes are watched from their start on, since TensorFlow already connects before the first step. That nothing moves is
not enough: a program need not use the links. TensorFlow must listen on a node of the pair, and a node must wait for
others, or not answer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfos_nb.driver.hangs.explanation import Finding, Situation, explain
from tfos_nb.runtime.node.links import Pair
from tfos_nb.runtime.node.stacks import StacksTaken

__all__ = ["LinkWatch", "LinksFound", "LinksWatched", "waits_for_a_link"]

logger = logging.getLogger(__name__)

_FIRST, _LAST = 10.0, 300.0  # seconds without a move before the nodes are asked; the pause doubles while all is well
_AGAIN = 1.0  # seconds until a cut link is looked at again
_WITHIN = 3.0  # seconds for the stacks
_RESTORED_EVERY = 5.0  # seconds


@dataclass(frozen=True)
class LinksFound:
    """Pairs of nodes that do not reach each other; ``used``: those for which TensorFlow listens on one of both.

    A worker makes its own server only when it has reached the leader's.
    """

    cut: frozenset[Pair] = frozenset()
    used: frozenset[Pair] = frozenset()


class LinksWatched(Protocol):
    """Watched nodes; :class:`tfos_nb.driver.cluster_controller.ClusterController` implements it."""

    @property
    def heartbeat_timeout(self) -> float:
        """Seconds after which a node or a link counts as lost."""

    def start_marks(self) -> Mapping[str, Any] | None:
        """Return by node what changes when it moves, from its start on; None if no node needs a link to another."""

    def look_at_links(self) -> LinksFound:
        """Ask all nodes that train which others they reach."""

    def stacks(self, timeout: float, nodes: Collection[str] | None = None) -> Mapping[str, StacksTaken]:
        """Ask the nodes for their stacks."""

    def situations(self, stacks: Mapping[str, StacksTaken]) -> list[Situation]:
        """Return what is known of each node that trains."""

    def describe_cut(self, pairs: Collection[Pair]) -> str:
        """Return a sentence about nodes that do not reach each other."""

    def report_cut(self, pairs: Collection[Pair]) -> None:
        """Fail by links that are cut."""

    def restore_links(self) -> None:
        """Let nodes join that were left out and reach all others now."""


class LinkWatch:
    """Watch the links between the nodes of one cluster.

    Parameters
    ----------
    name : str
        The cluster's.
    watched : LinksWatched
        Its nodes.
    """

    def __init__(self, name: str, watched: LinksWatched) -> None:
        self._name, self._watched = name, watched
        self._marks: Mapping[str, Any] | None = None
        self._moved = self._due = self._restored_due = 0.0
        self._pause = _FIRST
        self._cut: frozenset[Pair] = frozenset()

    def look(self, now: float) -> None:
        """Look once; ``now`` is a time of the monotonic clock."""
        if now >= self._restored_due:
            self._restored_due = now + _RESTORED_EVERY
            self._watched.restore_links()
        marks = self._watched.start_marks()
        if marks is None or marks != self._marks:
            self._marks, self._moved, self._due = marks, now, now + _FIRST
            self._pause, self._cut = _FIRST, frozenset()
        elif now >= self._due:
            self._look_at_links(now)

    def _look_at_links(self, now: float) -> None:
        before, found = self._cut, self._watched.look_at_links()
        self._cut = found.used
        if not found.cut:
            self._pause = min(2 * self._pause, _LAST)
        if not self._cut or not self._matters():
            self._due = now + self._pause
            return
        self._due = now + _AGAIN
        if not before:
            logger.warning("cluster %s: no step for %.0f s: %s", self._name, now - self._moved, self._text(self._cut))
        sure = before & self._cut
        if sure and now - self._moved >= self._watched.heartbeat_timeout:
            self._watched.report_cut(sure)

    def _matters(self) -> bool:
        """Whether the nodes still do not move, and wait for others."""
        _, findings = explain(self._watched.situations(self._watched.stacks(_WITHIN)))
        return self._watched.start_marks() == self._marks and waits_for_a_link(findings)

    def _text(self, pairs: Collection[Pair]) -> str:
        return self._watched.describe_cut(pairs)


def waits_for_a_link(findings: Sequence[Finding]) -> bool:
    """Return whether nodes that do not move may wait for others that they do not reach.

    Examples
    --------
    >>> waits_for_a_link([Finding("worker:0", "waits in TensorFlow", waits=True), Finding("worker:1", "saves")])
    True
    >>> waits_for_a_link([Finding("worker:0", "computes in TensorFlow", works=True)])
    False
    """
    computes = any(one.works and not one.waits for one in findings)
    return not computes and any(one.waits or one.blocked for one in findings)
