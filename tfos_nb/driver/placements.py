"""Driver's side of inference: tell tasks which nodes answer rows, or why none does.

The driver carries no row and no result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfos_nb.driver.feed_controller import FeedController
from tfos_nb.driver.membership.machine import Membership
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.placement import AskPlaces, InferencePlacement

__all__ = ["Answering"]


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
