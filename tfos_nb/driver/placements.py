"""The driver's part in inference: where tasks have their rows answered, and why not.

The driver carries no row and no result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfos_nb.driver.feed_desk import FeedDesk
from tfos_nb.driver.node_record import Record
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.placement import PlacementDesk

__all__ = ["Answering"]


class Answering:
    """Behind the door: everything about inference. Called with the roster's lock held.

    Parameters
    ----------
    records : mapping of str to Record
        The nodes.
    places : callable
        Returns where the nodes take rows.
    failures : sequence
        The cluster's failures, the first one first.
    feeds : FeedDesk
        It knows whether rows may come yet.
    """

    def __init__(
        self,
        records: Mapping[str, Record],
        places: Callable[[], Mapping[str, FeedPlace]],
        failures: Sequence[Any],
        feeds: FeedDesk,
    ) -> None:
        self._records = records
        self._places = places
        self._failures = failures
        self._feeds = feeds
        self._desk = PlacementDesk(self._able, self._why_nobody)

    def asked(self, message: Any) -> Any:
        """Answer a task's question."""
        return self._desk.asked(message)

    @property
    def quiet_for(self) -> float:
        """Seconds since a task asked last; Spark runs one that failed again."""
        return time.monotonic() - self._desk.asked_at

    def _able(self) -> dict[str, FeedPlace]:
        """Return the places of the nodes whose main may still answer rows."""
        records = self._records
        return {
            name: place
            for name, place in self._places().items()
            if not records[name].status.ended and not records[name].serving
        }

    def _why_nobody(self) -> str:
        """Say why no rows are answered any more: what a task hears that Spark runs again."""
        first = next((failure for failure in self._failures if not failure.collateral), None)
        if first is None:
            return self._feeds.closed
        cause = str(getattr(first.error, "cause", first.error))
        return cause if cause.startswith(first.node) else f"{first.node}: {cause}"
