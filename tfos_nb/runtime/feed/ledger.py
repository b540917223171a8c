"""Which rows go to which node, decided once and remembered.

A task that has rows in hand asks whose they are. The ledger at the door deals them out so that all nodes have equally
many, to a row (:mod:`tfos_nb.runtime.rows.balancing`), and remembers it. A retried or speculative task is told the same
places again, however it cuts its rows into questions, and each node knows how far it has come in each partition
(:mod:`tfos_nb.runtime.feed.feed_rows`): no row twice, no row lost, whatever the number of slots and however uneven the
partitions.

Nodes on the task's host are preferred where that can be made up for. A task that holds rows back says how many, and
the ledger lets the near nodes be ahead by so many rows that the held ones bring the others level. A task deals out all
that it has when it comes to its partition's end. So once every partition has been read, no two nodes' counts differ by
more than one: the last task to let its near nodes be ahead has had the rows for the others.

A task whose input breaks off, because Spark has ended it or could not read on, sees the same end as one that has read
all: PySpark closes the stream in either case. So what a task says of a partition's end holds until another attempt
comes further, and is final when Spark's job has succeeded.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.rows.balancing import Dealt, level, piece_rows
from tfos_nb.runtime.rows.spans import Spans, merged, row_behind, rows_within, without

__all__ = [
    "ClaimRows",
    "Claimed",
    "FeedBegins",
    "FeedEnds",
    "FeedFrom",
    "FeedLedger",
    "FeedSchema",
    "HeldRows",
    "KnownRows",
    "MakeRoom",
    "NoMoreFeeds",
    "OpenPartition",
    "PartitionDone",
    "PartitionFailed",
    "PassDone",
    "Places",
    "Reached",
    "StillFed",
    "WherePlaces",
    "WorkerThrough",
]

_MOST_AT_ONCE = 1 << 32  # rows of one question: more than a record batch has
_MOST_ROUNDS = 2048  # for one question
_ALL_LEVEL = 128  # of so many nodes each is brought level by every question; a task opens a stream to each
_SOME, _FEWEST_ROWS = 32, 64  # of more, the nodes that share the rows of a question, and the rows that one gets of them


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


@message
@dataclass(frozen=True)
class Reached:
    """How far a node has come in one partition.

    Parameters
    ----------
    row : int
        The row behind the last that it has.
    rows, fingerprint : int
        How many of the last of them the fingerprint is of, and it.
    """

    row: int = 0
    rows: int = 0
    fingerprint: int = 0


@message
@dataclass(frozen=True)
class KnownRows:
    """Fingerprint that the rows of a partition in these spans had when they were fed."""

    spans: Spans
    fingerprint: int


@dataclass(frozen=True)
class HeldRows:
    """Rows of one pass that a saved state was trained on, by partition, and fingerprints to compare them by.

    A fingerprint may cover some rows behind them, which came in the same batch.
    """

    spans: Mapping[int, Spans] = field(default_factory=dict)
    known: Mapping[int, tuple[KnownRows, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.spans)


@message
@dataclass(frozen=True)
class Places:
    """Where nodes take rows: all of a few, or those of many that are on the task's host, or that it has asked for.

    ``nodes`` is how many are fed, none if the feed is over; ``refused`` says why not; ``skip`` are rows of the
    partition that nobody wants, and ``known`` those that have to be what they were.
    """

    places: dict[str, FeedPlace] = field(default_factory=dict)
    refused: str = ""
    nodes: int = 0
    skip: tuple[tuple[int, int], ...] = ()
    known: tuple[KnownRows, ...] = ()


@message
@dataclass(frozen=True)
class WherePlaces:
    """Question of a task that has been told these nodes, and not where they are. Answer: :class:`Places`."""

    feed: int
    nodes: tuple[str, ...]


@message
@dataclass(frozen=True)
class ClaimRows:
    """Question of a task that has them in hand: whose are the ``rows`` from ``start`` on? Answer: :class:`Claimed`.

    No row before them may be unclaimed. The task has ``held`` rows more behind them; ``fitting`` is the most rows that
    a node takes in one piece; ``local`` are the nodes on the task's host.
    """

    feed: int
    partition: int
    start: int
    rows: int
    held: int = 0
    fitting: int = 1 << 20
    local: tuple[str, ...] = ()


@message
@dataclass(frozen=True)
class Claimed:
    """The rows that were asked for, up to each of these ``ends`` in turn, are those of the node in the same place."""

    ends: list[int]
    nodes: list[str]


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
    held : HeldRows, optional
        Rows that no node is sent: the state that the nodes went on from holds them.

    Attributes
    ----------
    claimed : dict of str to int
        How many rows each node has been promised.
    spilled : bool
        Whether all rows were kept.
    """

    def __init__(self, feed: int, nodes: Iterable[str], held: HeldRows | None = None) -> None:
        self.feed = feed
        self.skip = dict(held.spans) if held is not None else {}
        self.known = dict(held.known) if held is not None else {}
        self.claimed = dict.fromkeys(nodes, 0)
        self.spilled = True
        self._names = list(self.claimed)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._dealt: dict[int, Dealt] = {}
        self._totals: dict[int, int] = {}
        self._fewest = [(0, name) for name in sorted(self._names)]  # a heap, of which no count is of before
        self._counted: tuple[int, int] | None = None  # when it is closed: partitions, and rows

    def claim(self, question: ClaimRows) -> Claimed:
        """Return whose rows these are: as remembered, and of those with the fewest where no task has asked before.

        Raises
        ------
        ValueError
            If there are no such rows: no task of this version asks for them.
        """
        partition, start, rows = question.partition, question.start, question.rows
        dealt = self._dealt.get(partition, Dealt())
        if partition < 0 or not 0 <= start <= dealt.end or not 0 <= rows <= _MOST_AT_ONCE or question.held < 0:
            raise ValueError(f"{rows} rows from row {start} of partition {partition} on: there are none")
        end = start + rows
        if dealt.end < end:
            self._dealt[partition] = dealt
            self._deal(dealt, end, question)
        claimed = Claimed([], [])
        for _, until, node in dealt.within(start, end):
            claimed.ends.append(until)
            claimed.nodes.append(self._names[node])
        return claimed

    def _deal(self, dealt: Dealt, end: int, question: ClaimRows) -> None:
        """Deal a partition's rows up to this one, in rounds, each of which makes the nodes level."""
        skip = self._skipped(question.partition)
        left = end - dealt.end - rows_within(skip, dealt.end, end)
        nodes = self._to_share(left)
        near = {name for name in question.local if name in self.claimed}
        ahead = question.held // (len(self.claimed) - len(near)) if len(near) < len(self.claimed) else 0
        fewest = -(-left // (_MOST_ROUNDS * len(nodes)))
        while left:
            counts = ((self.claimed[name] - ahead * (name in near), name not in near, name) for name in nodes)
            rows = min(left, len(nodes) * max(fewest, piece_rows(dealt.end, question.fitting)))
            for name, more in level(counts, rows):
                dealt.add(self._numbers[name], row_behind(skip, dealt.end, more))
                self.claimed[name] += more
            left -= rows
        if dealt.end < end:  # rows that nobody wants
            dealt.add(self._numbers[nodes[0]], end)
        self._put_back(nodes)

    def _to_share(self, rows: int) -> list[str]:
        """Return the nodes that share some rows: of many, some with the fewest rows so far."""
        if len(self._names) <= _ALL_LEVEL:
            return self._names
        count = min(_SOME, max(1, rows // _FEWEST_ROWS))
        return [heapq.heappop(self._fewest)[1] for _ in range(count)]

    def _put_back(self, nodes: Iterable[str]) -> None:
        if nodes is not self._names:
            for name in nodes:
                heapq.heappush(self._fewest, (self.claimed[name], name))

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

    def shares(self) -> dict[str, int]:
        """Return how many rows each node has been sent, in the partitions that an attempt has come to the end of."""
        shares = dict.fromkeys(self.claimed, 0)
        for partition, total in self._totals.items():
            skip = self._skipped(partition)
            for start, end, node in self._places(partition, total):
                shares[self._names[node]] += end - start - rows_within(skip, start, end)
        return shares

    def rows_before(self, reached: Mapping[str, Mapping[int, int]]) -> dict[int, Spans]:
        """Return the rows that nodes have been through, by partition, and those that were not sent.

        ``reached`` has by node and partition the row before which the node has been through all of its own.
        """
        through: dict[int, list[tuple[int, int]]] = {one: list(spans) for one, spans in self.skip.items()}
        for node, rows in reached.items():
            for partition, before in rows.items():
                through.setdefault(partition, []).extend(self._places_of(node, partition, before))
        return {partition: merged(spans) for partition, spans in through.items()}

    def known_rows(self, reached: Mapping[str, Mapping[int, Reached]]) -> dict[int, tuple[KnownRows, ...]]:
        """Return fingerprints of the nodes' rows by partition, beside those that this feed began with.

        A fingerprint counts only if it covers all rows before ``reached`` that the node was sent.
        """
        known = {partition: list(rows) for partition, rows in self.known.items()}
        for node, partitions in reached.items():
            for partition, one in partitions.items():
                spans = without(merged(self._places_of(node, partition, one.row)), self._skipped(partition))
                if one.rows and one.rows == rows_within(spans, 0, one.row):
                    known.setdefault(partition, []).append(KnownRows(spans, one.fingerprint))
        return {partition: tuple(rows) for partition, rows in known.items()}

    def cut_short(self) -> tuple[int, int, int] | None:
        """Return the first partition with fewer rows than before: its number, its rows now, the fewest it had before.

        None if all have as many.
        """
        for partition in sorted({*self.skip, *self.known}):
            spans = [self._skipped(partition), *(one.spans for one in self.known.get(partition, ()))]
            before = max((one[-1][1] for one in spans if one), default=0)
            if (now := self._totals.get(partition, 0)) < before:
                return partition, now, before
        return None

    def _places_of(self, node: str, partition: int, before: int) -> list[tuple[int, int]]:
        places = self._places(partition, before)
        return [(start, end) for start, end, one in places if self._names[one] == node]

    def _places(self, partition: int, before: int) -> Iterable[tuple[int, int, int]]:
        """Return which rows before this one are whose; a single node's need not be claimed."""
        if len(self._names) == 1:
            return [(0, before, 0)]
        return self._dealt.get(partition, Dealt()).within(0, before)

    def _skipped(self, partition: int) -> Spans:
        return self.skip.get(partition, ())

    def close(self) -> None:
        """Forget whose the rows were: nobody will ask again. How many there were stays known. Idempotent."""
        self._counted = self.partitions_done, self.rows
        for known in (self._dealt, self._totals, self.skip, self.known):
            known.clear()

    @property
    def closed(self) -> bool:
        """Whether it is known no more whose the rows were."""
        return self._counted is not None

    @property
    def partitions_done(self) -> int:
        """How many partitions an attempt has come to the end of."""
        return self._counted[0] if self._counted is not None else len(self._totals)

    @property
    def rows(self) -> int:
        """How many rows have been acknowledged, in these partitions."""
        return self._counted[1] if self._counted is not None else sum(self._totals.values())
