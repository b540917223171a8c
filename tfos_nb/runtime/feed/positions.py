"""Record which rows of a pass a saved state includes, if it was saved in the middle of the pass: both ends.

::

    node:    ctx.checkpoint(model, epoch=2, rows=640) ── PositionHeld(state, {partition: row}) ──▶ driver: HeldPositions
    driver:  Start(held=states) ──▶ node: ctx.resume(model) ── FeedFrom(passes=2, state) ──▶ the pass without these rows

A node's rows of a partition come in order, so one number for each partition says which ones it has finished. The
driver's ledger (:mod:`tfos_nb.runtime.feed.ledger`) says which rows of the partition belong to the node. If a node was
lost before it reported its position, that state is not used.

A number means the same rows only if Spark reads the partition the same way again. So it comes with a fingerprint
(:mod:`tfos_nb.runtime.rows.fingerprint`), which the task compares when it reads the partition again.
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
    """From a node: which of its rows of a pass a state includes: in each partition, those before a row.

    ``known`` has a fingerprint of these rows, and of those that came in one batch with the last of them.
    """

    node: str
    feed: int
    state: str
    reached: dict[int, int]
    known: dict[int, Reached] = field(default_factory=dict)


class HeldPositions:
    """The driver's record of the states for which all nodes have reported their positions."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], dict[str, PositionHeld]] = {}
        self._whole: dict[str, HeldRows] = {}

    def take(self, said: PositionHeld, nodes: Collection[str], book: FeedLedger) -> None:
        """Record a node's report; ``nodes`` are all nodes that share the feed's rows, ``book`` is its ledger."""
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
        """Drop incomplete records: the nodes start again, so missing reports will not come."""
        self._parts.clear()

    @property
    def states(self) -> tuple[str, ...]:
        """The states from which training can continue."""
        return tuple(self._whole)

    def rows_of(self, state: str) -> HeldRows:
        """Return which rows a state includes of the pass in which it was saved.

        Raises
        ------
        KeyError
            If the state is not known.
        """
        return self._whole[state]


def _leave_newest(states: dict[Any, Any]) -> None:
    while len(states) > _KEPT:
        del states[next(iter(states))]
