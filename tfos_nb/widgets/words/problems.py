"""Find the nodes with problems, and the line of the user's program that caused an error."""

from __future__ import annotations

import math
import re
import statistics
from typing import NamedTuple

from tfos_nb.errors import SPARK_ENDED
from tfos_nb.runtime.control.reports import silent_after
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, NodeState, NodeStatus

__all__ = ["NO_NUMBER", "OwnLine", "aside", "headline", "own_line", "problem_first"]

SLOW_BELOW = 0.6
"""A node is slow if its rows per second are below this fraction of the median of the nodes of its role."""

ENOUGH_PEERS = 4
"""Minimum number of nodes of a role to judge whether one is slow. Among three nodes, one always seems slow."""

NO_NUMBER = "loss is NaN"
"""Problem of a node whose newest reported loss is NaN."""

_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_CELL = re.compile(r"Cell In\[(\d+)\]$")
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ", "/tfos_nb/")


def problem_first(nodes: tuple[NodeState, ...]) -> list[tuple[NodeState, str]]:
    """Return the nodes, the most important one first, each with its problem or an empty text.

    A problem is ``"silent"``, ``"stuck"``, :data:`NO_NUMBER` or ``"slow"``.
    """
    medians, silent = _medians(nodes), silent_after(len(nodes))
    judged = [(node, _problem(node, medians.get(_role(node)), silent)) for node in nodes]

    def urgency(pair: tuple[NodeState, str]) -> tuple[int, int, int]:
        node, wrong = pair
        broken = node.status in (NodeStatus.FAILED, NodeStatus.LOST)
        return (0 if broken else 1 if wrong else 2, node.epoch or 0, node.step or 0)

    return sorted(judged, key=urgency)


def _problem(node: NodeState, median: float | None, silent: float) -> str:
    if node.status.ended:
        return ""
    if node.heartbeat_age is not None and node.heartbeat_age > silent:
        return "silent"
    if node.stuck:
        return "stuck"
    if node.loss is not None and math.isnan(node.loss):
        return NO_NUMBER
    if node.slow:
        return "slow"
    rate = node.rows_per_second
    return "slow" if rate is not None and median is not None and rate < SLOW_BELOW * median else ""


def _medians(nodes: tuple[NodeState, ...]) -> dict[str, float]:
    """Return the median rows per second of each role that has enough nodes to compare."""
    rates: dict[str, list[float]] = {}
    for node in nodes:
        if node.rows_per_second is not None and not node.status.ended:
            rates.setdefault(_role(node), []).append(node.rows_per_second)
    return {role: statistics.median(of_role) for role, of_role in rates.items() if len(of_role) >= ENOUGH_PEERS}


def _role(node: NodeState) -> str:
    return node.node.partition(":")[0]


def headline(error: str, longest: int | None = None) -> tuple[str, str]:
    """Split an error into its first line, cut to ``longest`` characters, and the rest."""
    first, _, rest = error.strip().partition("\n")
    first = first.strip()
    cut = longest is not None and len(first) > longest
    return (f"{first[:longest].rstrip()}…" if cut else first), rest.rstrip()


def aside(state: ClusterState) -> str:
    """Return a text about the effect of a failure on the other nodes and about the next step; empty if none failed."""
    if state.status is not ClusterStatus.FAILED or not headline(state.error)[0]:
        return ""
    stopped = sum(node.status is NodeStatus.STOPPED for node in state.nodes)
    other = "other " if any(node.status in (NodeStatus.FAILED, NodeStatus.LOST) for node in state.nodes) else ""
    others = f"{stopped} {other}node{'s were' if stopped > 1 else ' was'} stopped because of it. " if stopped else ""
    if state.error.startswith(SPARK_ENDED):  # the error itself says what to do next
        return others.strip()
    return f"{others}The Spark session is free: fix the cell and run it again."


class OwnLine(NamedTuple):
    """The last line of the user's own program in a traceback: its place and its code."""

    where: str
    code: str


def own_line(error: str) -> OwnLine | None:
    r"""Return the line of the user's program that caused an error; None if the traceback has none.

    Examples
    --------
    >>> own_line('ValueError\n  File "Cell In[4]", line 12, in main\n    model.fit(rows)')
    OwnLine(where='cell 4, line 12, in main', code='model.fit(rows)')
    """
    lines = error.splitlines()
    found = None
    for number, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame is None or any(part in frame["file"] for part in _NOT_THE_USERS):
            continue
        cell = _CELL.search(frame["file"])
        file = f"cell {cell[1]}" if cell else frame["file"]
        code = lines[number + 1].strip() if number + 1 < len(lines) and not _FRAME.match(lines[number + 1]) else ""
        found = OwnLine(f"{file}, line {frame['line']}, in {frame['function']}", code)
    return found
