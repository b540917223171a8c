"""Driver's side of inference: tell tasks which nodes answer rows, or why none does.

The driver carries no row and no result.

Nodes on the task's own host come first. Among these, a node that has not tried this partition comes first, then the one
with the fewest current attempts, then the one with the fewest attempts so far. So a retry goes to another node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from tfos_nb.driver.feed_controller import FeedController
from tfos_nb.driver.membership.machine import Membership
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.placement import AskPlaces, ClaimNode, InferencePlaces

__all__ = ["Answering", "InferencePlacement"]


class Answering:
    """Answer all questions about inference that come to the door. Called with the controller's lock held.

    Parameters
    ----------
    membership : Membership
        The nodes, the places where they take rows, and the failures.
    feeds : FeedController
        Knows whether more rows may come.
    """

    def __init__(self, membership: Membership, feeds: FeedController) -> None:
        self._membership = membership
        self._feeds = feeds
        self._placement = InferencePlacement(self._able, self._why_nobody)
        self._cancel: Callable[[int, str], object] | None = None
        self._ended = ""  # why no rows are answered, once the cluster has ended
        self.may_be_asked = False
        """Whether a result exists whose tasks may ask, also when the cluster has ended: it is computed when used."""

    def asked(self, message: Any) -> Any:
        """Answer a task's question."""
        answer = self._placement.asked(message)
        if self._cancel is not None and isinstance(message, AskPlaces) and message.stage >= 0:
            self._cancel(message.stage, self._ended)
        return answer

    def end(self, reason: str, cancel: Callable[[int, str], object], *, at_once: bool) -> None:
        """Give up all answers: Spark would run each task three times more, and wait for a Python worker each time.

        Parameters
        ----------
        reason : str
            Why no rows are answered any more.
        cancel : callable
            Called with each stage whose tasks ask from now on, and with the reason. It does not wait.
        at_once : bool
            Cancel the stages whose tasks wait for results, too. Otherwise these may read the last results.
        """
        self._ended, self._cancel = reason, cancel
        for stage in self._placement.stages if at_once else ():
            cancel(stage, reason)

    def _able(self) -> dict[str, FeedPlace]:
        """Return the places of the nodes whose main may still answer rows."""
        members = self._membership.members
        return {
            name: place
            for name, place in self._membership.feed_places.items()
            if not members[name].status.ended and not members[name].serving
        }

    def _why_nobody(self) -> str:
        """Return why no rows are answered any more, for a task that Spark retries."""
        if self._ended:
            return self._ended
        first = next((failure for failure in self._membership.failures if not failure.collateral), None)
        if first is None:
            return self._feeds.closed
        cause = str(getattr(first.error, "cause", first.error))
        return cause if cause.startswith(first.node) else f"{first.node}: {cause}"


class InferencePlacement:
    """Assignment of partitions to nodes. Called with the lock of its owner held.

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
