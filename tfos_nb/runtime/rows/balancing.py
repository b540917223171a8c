"""Divide a partition's rows among nodes, so that their numbers of rows differ by at most one.

Rows are assigned in rounds. Each round gives most rows to the nodes that have the fewest. So the numbers are even after
every round, and not only at the end.

The first rounds are small, so that the nodes' rows are mixed. Later rounds are larger, so that many rows make few
pieces: a node's piece is a sixteenth of the rows before it. A piece must also fit into a node's buffer, because a task
sends the pieces of the nodes one after another. If nodes train in step, a node with a full buffer may wait for another
node whose piece is sent later. If the piece did not fit, both would wait forever. (If that happens anyway, the driver
tells the node to make room.)
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["PIECE_BYTES", "Dealt", "level", "piece_rows"]

PIECE_BYTES = (16 << 20) - (64 << 10)
_FIRST, _LARGEST, _PART = 8, 8192, 16


def piece_rows(row: int, fitting: int) -> int:
    """Return the number of rows of a node's next piece.

    Parameters
    ----------
    row : int
        Number of the piece's first row in the partition.
    fitting : int
        Maximum number of rows that fit into the node's buffer.

    Examples
    --------
    >>> piece_rows(0, 5000), piece_rows(1600, 5000), piece_rows(1 << 20, 5000), piece_rows(1 << 20, 1 << 20)
    (8, 100, 5000, 8192)
    """
    return max(1, min(max(_FIRST, row // _PART), fitting, _LARGEST))


def level(counts: Iterable[tuple[int, bool, str]], rows: int) -> list[tuple[str, int]]:
    """Return how many of ``rows`` each node gets, so that the numbers of rows become as even as possible.

    Parameters
    ----------
    counts : iterable of (int, bool, str)
        For each node: its number of rows, whether it comes after other nodes with the same number, and its name.
    rows : int
        Number of rows to assign.

    Returns
    -------
    list of (str, int)
        Names and numbers of rows of the nodes that get any.

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
    """Assignment of the rows of one partition to nodes, from the first row on.

    Nodes are numbers. Adjacent rows of one node are one piece. Pieces are stored in compact arrays, because an epoch of
    100 million rows may have some hundred thousand of them.

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
        """The first row that is not assigned."""
        return self._ends[-1] if self._ends else 0

    def add(self, node: int, end: int) -> None:
        """Assign the rows from :attr:`end` up to ``end`` (excluded) to a node."""
        if self._nodes and self._nodes[-1] == node:
            self._ends[-1] = end
        else:
            self._nodes.append(node)
            self._ends.append(end)

    def within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the assigned rows from ``start`` to ``end`` as (first row, row after the last, node)."""
        place = bisect_right(self._ends, start)
        while start < end and place < len(self._ends):
            until = min(end, self._ends[place])
            yield start, until, self._nodes[place]
            start, place = until, place + 1
