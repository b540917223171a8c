"""Choose which node answers which partition in inference: the tasks' questions and the driver's answers.

Nodes on the task's own host come first. Among these, a node that has not tried this partition comes first, then the one
with the fewest current attempts, then the one with the fewest attempts so far. So a retry goes to another node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.wire import message

__all__ = ["AskPlaces", "ClaimNode", "InferencePlacement", "InferencePlaces", "ReleaseNode"]


@message
@dataclass(frozen=True)
class AskPlaces:
    """Question of a task of a stage of Spark's that has a partition's first row. Answer: :class:`InferencePlaces`."""

    queue: str
    stage: int = -1


@message
@dataclass(frozen=True)
class InferencePlaces:
    """Addresses where nodes take rows; ``refused`` says why no node does."""

    places: dict[str, FeedPlace] = field(default_factory=dict)
    refused: str = ""


@message
@dataclass(frozen=True)
class ClaimNode:
    """Question: which node answers this attempt at a partition? ``local``: those on the task's host. Answer: a name."""

    inference: str
    partition: int
    attempt: int
    local: tuple[str, ...]
    stage: int = -1


@message
@dataclass(frozen=True)
class ReleaseNode:
    """Statement: the attempt that claimed this node has ended."""

    inference: str
    partition: int
    attempt: int


QUESTIONS = (AskPlaces, ClaimNode, ReleaseNode)


class InferencePlacement:
    """The driver's assignment of partitions to nodes. Called with the lock of its owner held.

    Parameters
    ----------
    places : callable
        Returns the places of the nodes that take rows now.
    closed : callable
        Returns why no rows may come any more; empty if they may.
    """

    def __init__(self, places: Callable[[], dict[str, FeedPlace]], closed: Callable[[], str]) -> None:
        self._places = places
        self._closed = closed
        self._in_hand: dict[tuple[str, int, int], tuple[str, int]] = {}  # the node, and the attempt's stage
        self._tried: Counter[tuple[str, int, str]] = Counter()
        self._had: Counter[str] = Counter()

    def asked(self, message: Any) -> Any:
        """Answer a task's question."""
        if isinstance(message, AskPlaces):
            return self._answer_places()
        if isinstance(message, ClaimNode):
            return self._claim(message)
        released = self._in_hand.pop((message.inference, message.partition, message.attempt), None)
        return released[0] if released is not None else None

    @property
    def stages(self) -> set[int]:
        """The stages of Spark's whose tasks wait for results."""
        return {stage for _, stage in self._in_hand.values() if stage >= 0}

    def _answer_places(self) -> InferencePlaces:
        if self._closed():
            return InferencePlaces(refused=f"no node answers rows any more; launch the cluster again. {self._closed()}")
        places = self._places()
        if not places:
            return InferencePlaces(refused="no node answers rows: every main has returned, or serves other nodes")
        return InferencePlaces(places)

    def _claim(self, claim: ClaimNode) -> str:
        there: Collection[str] = self._places().keys()
        near = [name for name in claim.local if name in there] or list(there) or list(claim.local)
        if not near:
            return ""
        busy = Counter(name for name, _ in self._in_hand.values())
        node = min(
            near,
            key=lambda name: (
                self._tried[claim.inference, claim.partition, name],
                busy[name],
                self._had[name],
                name,
            ),
        )
        self._in_hand[claim.inference, claim.partition, claim.attempt] = node, claim.stage
        self._tried[claim.inference, claim.partition, node] += 1
        self._had[node] += 1
        return node
