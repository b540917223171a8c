"""Which rows go to which node, decided once and remembered.

A partition of the DataFrame is cut into segments, by the numbers of its rows alone, so that every attempt at the
partition cuts it alike. The ledger at the door gives each segment to the node that has the fewest rows so far (one on
the same host, all else equal) and remembers it. A retried or speculative task is told the same places again, and each
node knows how far it has come in each partition (:mod:`tfos_nb.runtime.passes`): no row twice, no row lost, whatever
the
number of slots and however uneven the partitions.

Segments begin small and grow, so that a small DataFrame is shared out evenly and a big one costs few questions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tfos_nb.runtime.lifecycle import FeedPlace
from tfos_nb.runtime.wire import message

__all__ = [
    "ClaimSegments",
    "FeedBegins",
    "FeedEnds",
    "FeedLedger",
    "FeedSchema",
    "NoMoreFeeds",
    "OpenPartition",
    "PartitionDone",
    "PartitionFailed",
    "PassDone",
    "Places",
    "segment_end",
]

_FIRST, _LARGEST = 64, 65536
_ALIKE = 16  # segments of one size, before the size doubles: a segment is 1/8 of what came before it, or less


def segment_end(row: int) -> int:
    """Return the first row after the segment that holds ``row``.

    Examples
    --------
    >>> segment_end(0), segment_end(63), segment_end(64), segment_end(1024)
    (64, 64, 128, 1152)
    """
    doublings = min((row // (_FIRST * _ALIKE) + 1).bit_length() - 1, (_LARGEST // _FIRST).bit_length() - 1)
    base = _FIRST * _ALIKE * ((1 << doublings) - 1)
    size = _FIRST << doublings
    return base + ((row - base) // size + 1) * size


@message
@dataclass(frozen=True)
class FeedBegins:
    """To the nodes: rows of a new feed will come. ``spill`` tells to keep them for ``passes - 1`` replays.

    ``call`` numbers the calls of ``train``. ``validates``: the rows are kept for as long as the node lives, and are no
    pass; ``validation`` is the feed that has the validation rows of this one, 0 if none. ``batch`` is the number of a
    stream's micro-batch, and ``consecutive`` tells whether these numbers have no gaps. ``queue`` is the named queue
    that they are for.
    """

    feed: int
    passes: int
    spill: bool
    call: int = 0
    validates: bool = False
    validation: int = 0
    batch: int | None = None
    consecutive: bool = False
    queue: str = "input"


@message
@dataclass(frozen=True)
class FeedSchema:
    """To the nodes: what the rows look like, so that a node without a row knows it too.

    ``schema`` is Arrow's own encoding; ``lengths`` has the lengths of list columns in the first row, outermost first.
    """

    feed: int
    schema: bytes
    lengths: dict[str, tuple[int, ...]]


@message
@dataclass(frozen=True)
class FeedEnds:
    """To a node: its share of the feed is complete with so many rows; go through it ``replays`` times more."""

    feed: int
    rows: int
    replays: int


@message
@dataclass(frozen=True)
class NoMoreFeeds:
    """To the nodes: no feed will come any more; a dataset without a pass left is at its end."""


@message
@dataclass(frozen=True)
class PassDone:
    """From a node: its dataset has been through one pass (1 is the first) of a feed.

    ``enough``: it wants no more rows of the call of ``train`` to which the feed belongs.
    """

    node: str
    feed: int
    number: int
    rows: int
    enough: bool = False


@message
@dataclass(frozen=True)
class OpenPartition:
    """Question of a task that has a partition's first row. Answer: :class:`Places`."""

    feed: int
    partition: int
    schema: bytes
    lengths: dict[str, tuple[int, ...]]


@message
@dataclass(frozen=True)
class Places:
    """Where the nodes take rows. ``done``: the partition has been delivered already. ``refused`` says why not."""

    places: dict[str, FeedPlace] = field(default_factory=dict)
    done: bool = False
    refused: str = ""


@message
@dataclass(frozen=True)
class ClaimSegments:
    """Question: who gets the ``count`` segments from row ``start`` on? ``local``: the nodes on this host."""

    feed: int
    partition: int
    start: int
    count: int
    local: tuple[str, ...]


@message
@dataclass(frozen=True)
class PartitionDone:
    """Statement: the nodes have acknowledged all ``rows`` of the partition; ``spilled`` tells that all were kept."""

    feed: int
    partition: int
    rows: int
    spilled: bool


@message
@dataclass(frozen=True)
class PartitionFailed:
    """Statement: a row cannot be fed; trying again would not help."""

    feed: int
    partition: int
    text: str


class FeedLedger:
    """Who got what in one feed.

    Parameters
    ----------
    feed : int
        The feed's number in its cluster.
    nodes : iterable of str
        The nodes that are fed.
    """

    def __init__(self, feed: int, nodes: Iterable[str]) -> None:
        self.feed = feed
        self.claimed = dict.fromkeys(nodes, 0)
        self.spilled = True
        self._places: dict[int, dict[int, str]] = {}
        self._totals: dict[int, int] = {}

    def claim(self, partition: int, start: int, local: Iterable[str] = ()) -> str:
        """Return the node of a segment: the one remembered, else the one with the fewest rows so far."""
        places = self._places.setdefault(partition, {})
        if start not in places:
            rows = segment_end(start) - start
            near = frozenset(local)
            places[start] = min(
                self.claimed, key=lambda name: (self.claimed[name] + (0 if name in near else rows), name)
            )
            self.claimed[places[start]] += rows
        return places[start]

    def claim_many(self, partition: int, start: int, count: int, local: Iterable[str] = ()) -> list[str]:
        """Return the nodes of some segments in a row; of a partition that is done, no more than it had."""
        nodes = []
        for _ in range(count):
            if start >= self._totals.get(partition, start + 1):
                break
            nodes.append(self.claim(partition, start, local))
            start = segment_end(start)
        return nodes

    def finish(self, partition: int, rows: int, spilled: bool = True) -> None:
        """Record that all rows of a partition have been acknowledged.

        The segments are counted at their full size when they are claimed, some of them ahead; here those that were not
        filled are put right.
        """
        if partition in self._totals:
            return
        self._totals[partition] = rows
        self.spilled &= spilled
        for start, node in self._places.get(partition, {}).items():
            end = segment_end(start)
            self.claimed[node] -= max(0, end - max(start, rows))

    def is_done(self, partition: int) -> bool:
        """Whether the partition has been delivered."""
        return partition in self._totals

    @property
    def partitions_done(self) -> int:
        """How many partitions have been delivered."""
        return len(self._totals)

    @property
    def rows(self) -> int:
        """How many rows have been acknowledged, in partitions that are complete."""
        return sum(self._totals.values())
