"""The states from which training can continue in the middle of a pass, and which rows of the pass each includes.

The nodes report their positions with :class:`~tfos_nb.runtime.feed.positions.PositionHeld`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tfos_nb.runtime.feed.ledger import FeedLedger, HeldRows
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.rows.spans import Spans, merged, without

__all__ = ["HeldPositions"]

_KEPT = 16  # states: more than a program keeps


class HeldPositions:
    """The driver's record of the states for which all nodes have reported their positions."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], dict[str, PositionHeld]] = {}
        self._whole: dict[str, _State] = {}

    def take(self, said: PositionHeld, nodes: Collection[str], book: FeedLedger) -> bool:
        """Record a node's report; ``nodes`` are all nodes that share the feed's rows, ``book`` is its ledger.

        Return whether training can continue from the state, as all of them have reported now.
        """
        told = self._parts.setdefault((said.state, said.feed), {})
        told[said.node] = said
        if is_known := told.keys() >= set(nodes):
            del self._parts[said.state, said.feed]
            self._whole[said.state] = _State(told, book)
        _leave_newest(self._parts)
        _leave_newest(self._whole)
        return is_known

    def keep_rows_of(self, book: FeedLedger) -> None:
        """Find out which rows the states include that were saved with this ledger, as it is about to forget them."""
        for state in self._whole.values():
            if state.book is book:
                _ = state.rows

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
        return self._whole[state].rows


@dataclass
class _State:
    """Reports of the nodes about a state. The rows are found only after a loss, since states are saved often."""

    told: Mapping[str, PositionHeld]
    book: FeedLedger

    @functools.cached_property
    def rows(self) -> HeldRows:
        left = _by_partition(one.left for one in self.told.values())
        spans = self.book.rows_before({node: one.reached for node, one in self.told.items()})
        known = self.book.known_rows({node: one.known for node, one in self.told.items()})
        return HeldRows({one: without(rows, left.get(one, ())) for one, rows in spans.items()}, known)


def _by_partition(several: Iterable[Mapping[int, Spans]]) -> dict[int, Spans]:
    rows: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in several:
        for partition, spans in one.items():
            rows[partition] += spans
    return {partition: merged(spans) for partition, spans in rows.items()}


def _leave_newest(states: dict[Any, Any]) -> None:
    while len(states) > _KEPT:
        del states[next(iter(states))]
