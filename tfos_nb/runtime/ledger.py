"""Which rows go to which node, decided once and remembered.

A partition of the DataFrame is cut into segments, by the numbers of its rows alone, so that every attempt at the
partition cuts it alike. The ledger at the door gives each segment to the node that has the fewest rows so far (one on
the same host, all else equal) and remembers it. A retried or speculative task is told the same places again, and each
node knows how far it has come in each partition (:mod:`tfos_nb.runtime.passes`): no row twice, no row lost, whatever
the number of slots and however uneven the partitions.

A task whose input breaks off, because Spark has ended it or could not read on, sees the same end as one that has read
all: PySpark closes the stream in either case. So what a task says of a partition's end holds until another attempt
comes further, and is final when Spark's job has succeeded.

How a partition is cut is in :mod:`tfos_nb.runtime.segments`; how large the rows are is known with a feed's first one.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tfos_nb.runtime.lifecycle import FeedPlace
from tfos_nb.runtime.segments import Segments
from tfos_nb.runtime.spans import Spans, merged, rows_within
from tfos_nb.runtime.wire import message

__all__ = [
    "ClaimSegments",
    "FeedBegins",
    "FeedEnds",
    "FeedFrom",
    "FeedLedger",
    "FeedSchema",
    "MakeRoom",
    "NoMoreFeeds",
    "OpenPartition",
    "PartitionDone",
    "PartitionFailed",
    "PassDone",
    "Places",
    "StillFed",
    "WherePlaces",
    "WorkerThrough",
]

_MOST_AT_ONCE = 1024  # segments of one question: a task asks for 16


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
    """To a node: its share of the feed is complete with so many rows; go through it ``replays`` times more.

    ``total`` are the rows of all nodes that are fed, ``least`` and ``most`` the smallest and the largest share.
    """

    feed: int
    rows: int
    replays: int
    total: int = 0
    least: int = 0
    most: int = 0


@message
@dataclass(frozen=True)
class MakeRoom:
    """To a node for which rows of a feed wait: take more of them in, for another node waits for rows behind them."""

    feed: int


@message
@dataclass(frozen=True)
class NoMoreFeeds:
    """To the nodes: no feed will come any more; a dataset without a pass left is at its end."""


@message
@dataclass(frozen=True)
class FeedFrom:
    """From a node of a later generation that wants its first row: its state holds so many ``passes`` already.

    They are counted over all calls of ``train``. The rows that follow them are fed again, but for those of the next
    pass that ``state`` holds, if that was saved in the middle of it.
    """

    node: str
    passes: int
    state: str = ""


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
class WorkerThrough:
    """From a coordinator: every row of so many passes of a worker, in this generation, has been through a step."""

    node: str
    passes: int


@message
@dataclass(frozen=True)
class OpenPartition:
    """Question of a task, on a host of this address, that has a partition's first row. Answer: :class:`Places`."""

    feed: int
    partition: int
    schema: bytes
    lengths: dict[str, tuple[int, ...]]
    host: str = ""
    row_bytes: int = 0


@message
@dataclass(frozen=True)
class Places:
    """Where nodes take rows: all of a few, or those of many that are on the task's host, or that it has asked for.

    ``nodes`` is how many are fed, none if the feed is over; ``refused`` says why not; ``skip`` are rows of the
    partition that nobody wants; ``largest`` are the most rows of a segment
    (:class:`~tfos_nb.runtime.segments.Segments`).
    """

    places: dict[str, FeedPlace] = field(default_factory=dict)
    refused: str = ""
    nodes: int = 0
    skip: tuple[tuple[int, int], ...] = ()
    largest: int = Segments().largest


@message
@dataclass(frozen=True)
class WherePlaces:
    """Question of a task that has been told these nodes, and not where they are. Answer: :class:`Places`."""

    feed: int
    nodes: tuple[str, ...]


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
    """Statement: the nodes have acknowledged all ``rows`` that this attempt read; ``spilled``: all were kept."""

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


@message
@dataclass(frozen=True)
class StillFed:
    """Question of a task that does not reach a node any more: whether the driver wants the feed to go on."""

    feed: int


class FeedLedger:
    """Who got what in one feed.

    Parameters
    ----------
    feed : int
        The feed's number in its cluster.
    nodes : iterable of str
        The nodes that are fed.
    skip : mapping, optional
        By partition, rows that no node is sent: the state that the nodes went on from holds them.

    Attributes
    ----------
    claimed : dict of str to int
        About how many rows each node gets, by which the next segment's node is chosen. A segment counts in full when it
        is claimed, and some are claimed ahead; what was not filled is put right when its partition is finished.
    spilled : bool
        Whether all rows were kept.
    segments : Segments
        How partitions are cut; set before the first segment is claimed, if at all.
    """

    def __init__(self, feed: int, nodes: Iterable[str], skip: Mapping[int, Spans] | None = None) -> None:
        self.feed = feed
        self.skip = dict(skip or {})
        self.claimed = dict.fromkeys(nodes, 0)
        self.spilled = True
        self.segments = Segments()
        self._places: dict[int, dict[int, _Claim]] = {}
        self._totals: dict[int, int] = {}
        self._fewest: list[tuple[int, str]] = []  # a heap; what is there of a node may be of before
        self._sort_anew()

    def claim(self, partition: int, start: int, local: Iterable[str] = ()) -> str:
        """Return the node of a segment: the one remembered, else the one with the fewest rows so far."""
        claims = self._places.setdefault(partition, {})
        if start not in claims:
            rows = self._filled(partition, start, self.segments.end(start))
            node = self._least(rows, local)
            claims[start] = _Claim(node, rows)
            self._count(node, rows)
        return claims[start].node

    def _least(self, rows: int, local: Iterable[str]) -> str:
        """Return the node with the fewest rows; one that is not local counts as if it had the segment already."""
        while self._fewest[0][0] != self.claimed[self._fewest[0][1]]:
            heapq.heappop(self._fewest)
        least, name = self._fewest[0]
        return min([(least + rows, name), *((self.claimed[near], near) for near in local if near in self.claimed)])[1]

    def _count(self, node: str, rows: int) -> None:
        self.claimed[node] += rows
        heapq.heappush(self._fewest, (self.claimed[node], node))
        if len(self._fewest) > 2 * len(self.claimed) + 64:
            self._sort_anew()

    def _sort_anew(self) -> None:
        self._fewest = sorted((rows, node) for node, rows in self.claimed.items())

    def claim_many(self, partition: int, start: int, count: int, local: Collection[str] = ()) -> list[str]:
        """Return the nodes of some segments in a row.

        Raises
        ------
        ValueError
            If there are no such segments: no task of this version asks for them.
        """
        if partition < 0 or start < 0 or self.segments.start(start) != start or not 0 <= count <= _MOST_AT_ONCE:
            raise ValueError(f"{count} segments from row {start} of partition {partition} on: there are none")
        nodes = []
        for _ in range(count):
            nodes.append(self.claim(partition, start, local))
            start = self.segments.end(start)
        return nodes

    def finish(self, partition: int, rows: int, spilled: bool = True) -> None:
        """Record that an attempt has come to a partition's end, and that all ``rows`` of it have been acknowledged.

        One that was broken off says so too: the attempt that came furthest counts.

        Raises
        ------
        ValueError
            If there can be no such partition, or not so many rows.
        """
        if partition < 0 or rows < 0:
            raise ValueError(f"{rows} rows of partition {partition}: there are none")
        before = self._totals.get(partition)
        if before is None or rows > before:
            self._totals[partition] = rows
            self.spilled &= spilled
        total = self._totals[partition]
        for start, claim in self._places.get(partition, {}).items():
            filled = self._filled(partition, start, total)
            if filled != claim.counted:
                self._count(claim.node, filled - claim.counted)
                claim.counted = filled

    def shares(self) -> dict[str, int]:
        """Return how many rows each node has been sent, in the partitions that an attempt has come to the end of."""
        if len(self.claimed) == 1:  # a single node's segments need not be claimed
            sent = sum(total - rows_within(self._skipped(one), 0, total) for one, total in self._totals.items())
            return dict.fromkeys(self.claimed, sent)
        shares = dict.fromkeys(self.claimed, 0)
        for partition, total in self._totals.items():
            for start, claim in self._places.get(partition, {}).items():
                shares[claim.node] += self._filled(partition, start, total)
        return shares

    def rows_before(self, reached: Mapping[str, Mapping[int, int]]) -> dict[int, Spans]:
        """Return the rows that nodes have been through, by partition, and those that were not sent.

        ``reached`` has by node and partition the row before which the node has been through all of its own.
        """
        through: dict[int, list[tuple[int, int]]] = {one: list(spans) for one, spans in self.skip.items()}
        for node, rows in reached.items():
            for partition, row in rows.items():
                through.setdefault(partition, []).extend(self._segments_of(node, partition, row))
        return {partition: merged(spans) for partition, spans in through.items()}

    def _segments_of(self, node: str, partition: int, before: int) -> Iterable[tuple[int, int]]:
        if len(self.claimed) == 1:
            return [(0, before)]
        claims = self._places.get(partition, {}).items()
        return [(start, min(self.segments.end(start), before)) for start, claim in claims if claim.node == node]

    def _filled(self, partition: int, start: int, total: int) -> int:
        """Return how many rows of a segment are sent, of a partition of so many."""
        end = max(start, min(self.segments.end(start), total))
        return end - start - rows_within(self._skipped(partition), start, end)

    def _skipped(self, partition: int) -> Spans:
        return self.skip.get(partition, ())

    @property
    def partitions_done(self) -> int:
        """How many partitions an attempt has come to the end of."""
        return len(self._totals)

    @property
    def rows(self) -> int:
        """How many rows have been acknowledged, in these partitions."""
        return sum(self._totals.values())


@dataclass(slots=True)  # of an epoch of 100 million rows there are some hundred thousand
class _Claim:
    """Whose a segment is, and with how many rows it has been counted."""

    node: str
    counted: int
