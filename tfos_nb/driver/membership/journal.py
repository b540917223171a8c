"""Journal of a cluster's events, and the state that they make."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.driver.membership.events import Planned
from tfos_nb.driver.membership.machine import Membership

__all__ = ["ClusterEvent", "Condensed", "Journal", "replay"]


@dataclass(frozen=True)
class ClusterEvent:
    """Change of a cluster's members: the time, in seconds since the cluster was planned, and what happened."""

    seconds: float
    event: Any


@dataclass(frozen=True)
class Condensed:
    """The oldest events of a long training, as the state that they have made."""

    events: int
    state: Membership = field(repr=False, compare=False)


class Journal:
    """Events of one cluster. Of many, the newest are kept, and the others are condensed into their state.

    Parameters
    ----------
    most : int
        How many events are kept as they are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._newest: deque[ClusterEvent] = deque()
        self._dropped = 0
        self._dropped_until = 0.0
        self._state: Membership | None = None  # as the dropped events have made it

    def note(self, seconds: float, event: Any) -> None:
        """Add an event."""
        self._newest.append(ClusterEvent(seconds, event))
        if len(self._newest) > self._most:
            oldest = self._newest.popleft()
            self._state = _after(self._state, oldest.event)
            self._dropped, self._dropped_until = self._dropped + 1, oldest.seconds

    def events(self) -> list[ClusterEvent]:
        """Return all events, the oldest first; :func:`replay` makes the cluster's state of them."""
        if self._state is None:
            return list(self._newest)
        condensed = Condensed(self._dropped, copy.deepcopy(self._state))
        return [ClusterEvent(self._dropped_until, condensed), *self._newest]


def replay(events: Iterable[Any]) -> Membership:
    """Return the state that a cluster's events make, such as those of :meth:`tfos_nb.Cluster.events`.

    Raises
    ------
    ValueError
        If the first event is missing.
    """
    state: Membership | None = None
    for one in events:
        state = _after(state, one.event if isinstance(one, ClusterEvent) else one)
    if state is None:
        raise ValueError("there are no events to replay: give those of cluster.events()")
    return state


def _after(state: Membership | None, event: Any) -> Membership:
    """Return the state after one more event: the given one, changed, or that of a first event."""
    if isinstance(event, Planned):
        return Membership(event.plan, event.restarts, event.durable)
    if isinstance(event, Condensed):
        return copy.deepcopy(event.state)
    if state is None:
        raise ValueError(f"the first event must be Planned, got {event!r}: replay all that cluster.events() returns")
    state.apply(event)
    return state
