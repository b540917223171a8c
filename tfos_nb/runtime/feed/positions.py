"""A state that was saved in the middle of a pass, and which rows of the pass it holds: both ends.

::

    node:    ctx.checkpoint(model, epoch=2, rows=640) ── PositionHeld(state, {partition: row}) ──▶ driver: HeldPositions
    driver:  Start(held=states) ──▶ node: ctx.resume(model) ── FeedFrom(passes=2, state) ──▶ the pass without these rows

A node's rows of a partition come in their order, so that one number for each partition says which ones it has been
through; which rows of the partition are the node's, the driver's books say (:mod:`tfos_nb.runtime.feed.ledger`). A
state of which a node has not said it, because it was lost first, is not gone on from.

A number means the same rows only if Spark reads the partition as it did. So a fingerprint goes with it
(:mod:`tfos_nb.runtime.rows.fingerprint`), and the task that reads the partition again compares.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.feed.ledger import FeedLedger, HeldRows, Reached

__all__ = ["HeldPositions", "PositionHeld"]

_KEPT = 16  # states: more than a program keeps


@message
@dataclass(frozen=True)
class PositionHeld:
    """From a node: the state of this name holds its rows of a feed's pass, in each partition those before a row.

    ``known`` has a fingerprint of these rows, and of those that came together with the last of them.
    """

    node: str
    feed: int
    state: str
    reached: dict[int, int]
    known: dict[int, Reached] = field(default_factory=dict)


class HeldPositions:
    """Behind the door: of which states all nodes have said how far they were."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], dict[str, PositionHeld]] = {}
        self._whole: dict[str, HeldRows] = {}

    def take(self, said: PositionHeld, nodes: Collection[str], book: FeedLedger) -> None:
        """Record a node's word; ``nodes`` are all those that share the feed's rows, ``book`` knows how."""
        told = self._parts.setdefault((said.state, said.feed), {})
        told[said.node] = said
        if told.keys() >= set(nodes):
            del self._parts[said.state, said.feed]
            spans = book.rows_before({node: one.reached for node, one in told.items()})
            known = book.known_rows({node: one.known for node, one in told.items()})
            self._whole[said.state] = HeldRows(spans, known)
        _leave_newest(self._parts)
        _leave_newest(self._whole)

    def forget_parts(self) -> None:
        """Learn that the nodes start again: who has not said it will not."""
        self._parts.clear()

    @property
    def states(self) -> tuple[str, ...]:
        """The states that can be gone on from."""
        return tuple(self._whole)

    def rows_of(self, state: str) -> HeldRows:
        """Return which rows a state holds of the pass in which it was saved.

        Raises
        ------
        KeyError
            If no such state is known.
        """
        return self._whole[state]


def _leave_newest(states: dict[Any, Any]) -> None:
    while len(states) > _KEPT:
        del states[next(iter(states))]
