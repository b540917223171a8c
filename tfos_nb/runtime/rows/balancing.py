"""Divide rows among nodes: all get equally many, to within one row, in pieces that a node can take.

Rows are assigned in rounds. Each round balances the nodes: those with the fewest rows get most of it. So the counts are
even after every round, and not only at the end.

The first rounds are small, so that the nodes' rows are mixed. Later rounds are larger, so that many rows make few
pieces: a node's piece is a sixteenth of the rows before it. No piece is larger than a node takes at once. A task sends
one node's pieces after another's. Where nodes train in step, a full node may wait for another one whose piece comes
next. If the full node's own piece did not fit, it would wait for ever. (If that happens anyway, the driver tells the
node to make room.)
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["PIECE_BYTES", "Dealt", "level", "piece_rows"]

PIECE_BYTES = (16 << 20) - (64 << 10)
_FIRST, _LARGEST, _PART = 8, 8192, 16


def piece_rows(row: int, fitting: int) -> int:
    """Return how many rows a node gets in one piece, from a row of a partition on; ``fitting`` is the most it takes.

    Examples
    --------
    >>> piece_rows(0, 5000), piece_rows(1600, 5000), piece_rows(1 << 20, 5000), piece_rows(1 << 20, 1 << 20)
    (8, 100, 5000, 8192)
    """
    return max(1, min(max(_FIRST, row // _PART), fitting, _LARGEST))


def level(counts: Iterable[tuple[int, bool, str]], rows: int) -> list[tuple[str, int]]:
    """Return which nodes get how many of these rows, so that those with the fewest have equally many, to a row.

    Parameters
    ----------
    counts : iterable of (int, bool, str)
        The nodes' rows, whether a node comes behind others that have as many, and its name.
    rows : int
        How many rows there are.

    Examples
    --------
    >>> level([(0, False, "a"), (3, False, "b"), (9, False, "c")], 8)
    [('a', 6), ('b', 2)]
    >>> level([(5, True, "a"), (5, False, "b")], 1)
    [('b', 1)]
    """
    order = sorted(counts)
    raised = held = 0
    for count, _, _ in order:
        if raised and count * raised - held >= rows:
            break
        raised, held = raised + 1, held + count
    height, over = divmod(rows + held, raised)
    gets = [(node, height + (place < over) - count) for place, (count, _, node) in enumerate(order[:raised])]
    return [(node, more) for node, more in gets if more]


class Dealt:
    """Record of which node has which rows of one partition, from its first row on.

    Nodes are numbers here, and adjacent rows of one node are stored as one piece. An epoch of 100 million rows may have
    some hundred thousand pieces.

    Examples
    --------
    >>> dealt = Dealt()
    >>> dealt.add(0, 8), dealt.add(1, 16), dealt.add(1, 20)
    (None, None, None)
    >>> list(dealt.within(4, 18))
    [(4, 8, 0), (8, 18, 1)]
    """

    __slots__ = ("_ends", "_nodes")

    def __init__(self) -> None:
        self._ends, self._nodes = array("q"), array("l")

    @property
    def end(self) -> int:
        """The first row that has not been dealt."""
        return self._ends[-1] if self._ends else 0

    def add(self, node: int, end: int) -> None:
        """Record that a node has the rows up to this one, as far as no node has them."""
        if self._nodes and self._nodes[-1] == node:
            self._ends[-1] = end
        else:
            self._nodes.append(node)
            self._ends.append(end)

    def within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield which rows from ``start`` to ``end`` are whose: first, behind the last, node."""
        place = bisect_right(self._ends, start)
        while start < end and place < len(self._ends):
            until = min(end, self._ends[place])
            yield start, until, self._nodes[place]
            start, place = until, place + 1
