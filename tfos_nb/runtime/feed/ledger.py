"""Decide once which rows go to which node, and remember it.

A task that has rows in hand asks for their nodes. The ledger in the driver divides them so that all nodes get equally
many, to within one row (:mod:`tfos_nb.runtime.rows.balancing`), and remembers the division. A retried or speculative
task gets the same answers again, even if it asks in other pieces. Each node knows its position in each partition
(:mod:`tfos_nb.runtime.feed.feed_rows`). So no row comes twice and no row is lost, with any number of slots and with
partitions of any size.

Nodes on the task's host are preferred as long as the difference can be corrected. A task that holds rows back says how
many. The ledger lets the near nodes get ahead by as many rows as the held rows can correct. At the end of its partition
a task sends all the rows that it has. So once every partition has been read, no two nodes' counts differ by more than
one: the last task that let its near nodes get ahead still had the rows for the others.

When a task's input is interrupted, because Spark has ended the task or could not read on, the task sees a normal end:
PySpark closes the stream in either case. So a task's report of a partition's end is valid only until another attempt
gets further. It is final when Spark's job has succeeded.
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

SAME_VERSION = "Use the same version of tfos_nb on the driver and on the executors"
"""Remedy for a message that no task of this version sends."""

_MOST_AT_ONCE = 1 << 32  # rows of one question: more than fit into a record batch
_MOST_ROUNDS = 2048  # for one question
_ALL_LEVEL = 128  # up to so many nodes, every question balances all of them; a task opens a stream to each
_SOME, _FEWEST_ROWS = 32, 64  # with more: the nodes that share a question's rows, and the fewest rows for one of them


@message
@dataclass(frozen=True)
class FeedBegins:
    """To the nodes: rows of a new feed will come. ``spill`` says to keep them for ``passes - 1`` replays.

    ``call`` numbers the calls of ``train``. ``validates`` marks validation rows, which are kept until the node ends and
    do not count as a pass. ``validation`` is the feed with the validation rows of this one, 0 if none. ``batch`` is the
    number of a stream's micro-batch. ``consecutive`` says that these numbers have no gaps. ``queue`` is the named queue
    that gets the rows.
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
    """To the nodes: the schema of the rows, so that a node without rows knows it too.

    ``schema`` is in Arrow's encoding. ``lengths`` has the lengths of list columns in the first row, outermost first.
    """

    feed: int
    schema: bytes
    lengths: dict[str, tuple[int, ...]]


@message
@dataclass(frozen=True)
class FeedEnds:
    """To a node: its share of the feed is complete with ``rows`` rows; repeat it ``replays`` times.

    ``total`` is the number of rows of all fed nodes, ``least`` and ``most`` are the smallest and the largest share.
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
    """To a node with a full queue: take more rows of a feed, because another node waits for rows after them."""

    feed: int


@message
@dataclass(frozen=True)
class NoMoreFeeds:
    """To the nodes: no feed will come any more; a dataset ends after its last pass."""


@message
@dataclass(frozen=True)
class FeedFrom:
    """From a node of a later generation that wants its first row: its restored state includes ``passes`` passes.

    They are counted over all calls of ``train``. All later rows are fed again. If ``state`` was saved in the middle of
    a pass, the rows of that pass that it includes are not.
    """

    node: str
    passes: int
    state: str = ""


@message
@dataclass(frozen=True)
class PassDone:
    """From a node: its dataset has finished one pass (1 is the first) of a feed.

    ``enough``: the node wants no more rows of the call of ``train`` to which the feed belongs.
    """

    node: str
    feed: int
    number: int
    rows: int
    enough: bool = False


@message
@dataclass(frozen=True)
class WorkerThrough:
    """From a coordinator: all rows of ``passes`` passes of a worker, in this generation, were used in a step."""

    node: str
    passes: int


@message
@dataclass(frozen=True)
class OpenPartition:
    """Question of a task on ``host`` that has read a partition's first row. Answer: :class:`Places`."""

    feed: int
    partition: int
    schema: bytes
    lengths: dict[str, tuple[int, ...]]
    host: str = ""


@message
@dataclass(frozen=True)
class Reached:
    """Position of a node in one partition.

    Parameters
    ----------
    row : int
        The row after the last one that it has.
    rows, fingerprint : int
        The number of rows that the fingerprint covers, and the fingerprint. These rows end at ``row``.
    """

    row: int = 0
    rows: int = 0
    fingerprint: int = 0


@message
@dataclass(frozen=True)
class KnownRows:
    """Fingerprint of a partition's rows in some spans, from when they were fed."""

    spans: Spans
    fingerprint: int


@dataclass(frozen=True)
class HeldRows:
    """Rows of one pass that a saved state was trained on, by partition, with fingerprints to compare them.

    A fingerprint may also cover some later rows, which came in the same batch.
    """

    spans: Mapping[int, Spans] = field(default_factory=dict)
    known: Mapping[int, tuple[KnownRows, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.spans)


@message
@dataclass(frozen=True)
class Places:
    """Addresses at which nodes take rows.

    With few nodes, all of them. With many, those on the task's host, or those that it asked for. ``nodes`` is the
    number of nodes that are fed, 0 if the feed is over. ``refused`` is the reason if the rows are refused. ``skip`` are
    rows of the partition that no node wants. ``known`` are rows that must be the same as before.
    """

    places: dict[str, FeedPlace] = field(default_factory=dict)
    refused: str = ""
    nodes: int = 0
    skip: tuple[tuple[int, int], ...] = ()
    known: tuple[KnownRows, ...] = ()


@message
@dataclass(frozen=True)
class WherePlaces:
    """Question of a task for the addresses of nodes that it knows by name only. Answer: :class:`Places`."""

    feed: int
    nodes: tuple[str, ...]


@message
@dataclass(frozen=True)
class ClaimRows:
    """Question of a task: which nodes get the ``rows`` rows that begin at ``start``? Answer: :class:`Claimed`.

    All rows before them must have been claimed. The task has ``held`` more rows after them. ``fitting`` is the most
    rows that a node takes in one piece. ``local`` are the nodes on the task's host.
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
    """Answer: the rows before each of these ``ends``, in order, belong to the node at the same index."""

    ends: list[int]
    nodes: list[str]


@message
@dataclass(frozen=True)
class PartitionDone:
    """Statement: the nodes have acknowledged all ``rows`` that this attempt read; ``spilled``: all are on disk."""

    feed: int
    partition: int
    rows: int
    spilled: bool


@message
@dataclass(frozen=True)
class PartitionFailed:
    """Statement: a row cannot be fed, and a retry would not help."""

    feed: int
    partition: int
    text: str


@message
@dataclass(frozen=True)
class StillFed:
    """Question of a task that cannot reach a node any more: whether the driver wants the feed to continue."""

    feed: int


class FeedLedger:
    """Record of which node got which rows in one feed.

    Parameters
    ----------
    feed : int
        The feed's number in its cluster.
    nodes : iterable of str
        The nodes that are fed.
    held : HeldRows, optional
        Rows that are not sent to any node, because the restored state includes them.

    Attributes
    ----------
    claimed : dict of str to int
        How many rows each node was assigned.
    spilled : bool
        Whether all rows were kept on disk.
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
        self._fewest = [(0, name) for name in sorted(self._names)]  # a heap; its counts are never stale
        self._counted: tuple[int, int] | None = None  # once it is closed: partitions, and rows

    def claim(self, question: ClaimRows) -> Claimed:
        """Return the nodes of these rows: as remembered, else the nodes with the fewest rows.

        Raises
        ------
        ValueError
            If the row numbers are impossible: no task of this version asks for such.
        """
        partition, start, rows = question.partition, question.start, question.rows
        dealt = self._dealt.get(partition, Dealt())
        if partition < 0 or not 0 <= start <= dealt.end or not 0 <= rows <= _MOST_AT_ONCE or question.held < 0:
            raise ValueError(f"{rows} rows from row {start} of partition {partition} cannot be claimed. {SAME_VERSION}")
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
        """Assign a partition's rows before ``end``, in rounds; each round balances the nodes."""
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
        if dealt.end < end:  # rows that no node wants
            dealt.add(self._numbers[nodes[0]], end)
        self._put_back(nodes)

    def _to_share(self, rows: int) -> list[str]:
        """Return the nodes that share some rows: all of a few, or of many those with the fewest rows so far."""
        if len(self._names) <= _ALL_LEVEL:
            return self._names
        count = min(_SOME, max(1, rows // _FEWEST_ROWS))
        return [heapq.heappop(self._fewest)[1] for _ in range(count)]

    def _put_back(self, nodes: Iterable[str]) -> None:
        if nodes is not self._names:
            for name in nodes:
                heapq.heappush(self._fewest, (self.claimed[name], name))

    def finish(self, partition: int, rows: int, spilled: bool = True) -> None:
        """Record that an attempt has come to a partition's end, and that all its ``rows`` were acknowledged.

        An interrupted attempt reports an end too; the attempt that came furthest counts.

        Raises
        ------
        ValueError
            If the partition's number or the number of rows is impossible.
        """
        if partition < 0 or rows < 0:
            raise ValueError(f"partition {partition} cannot have {rows} rows. {SAME_VERSION}")
        before = self._totals.get(partition)
        if before is None or rows > before:
            self._totals[partition] = rows
            self.spilled &= spilled

    def shares(self) -> dict[str, int]:
        """Return how many rows each node was sent, in the partitions that an attempt has finished."""
        shares = dict.fromkeys(self.claimed, 0)
        for partition, total in self._totals.items():
            skip = self._skipped(partition)
            for start, end, node in self._places(partition, total):
                shares[self._names[node]] += end - start - rows_within(skip, start, end)
        return shares

    def rows_before(self, reached: Mapping[str, Mapping[int, int]]) -> dict[int, Spans]:
        """Return by partition the rows that nodes have finished, and the rows that were not sent.

        ``reached`` has by node and partition a row; the node has finished all its own rows before it.
        """
        through: dict[int, list[tuple[int, int]]] = {one: list(spans) for one, spans in self.skip.items()}
        for node, rows in reached.items():
            for partition, before in rows.items():
                through.setdefault(partition, []).extend(self._places_of(node, partition, before))
        return {partition: merged(spans) for partition, spans in through.items()}

    def known_rows(self, reached: Mapping[str, Mapping[int, Reached]]) -> dict[int, tuple[KnownRows, ...]]:
        """Return fingerprints of the nodes' rows by partition, with those that this feed began with.

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
        """Return the node of each span of rows before ``before``; a single node gets all of them without claims."""
        if len(self._names) == 1:
            return [(0, before, 0)]
        return self._dealt.get(partition, Dealt()).within(0, before)

    def _skipped(self, partition: int) -> Spans:
        return self.skip.get(partition, ())

    def close(self) -> None:
        """Forget the assignment of rows, which no task will ask for again. The counts stay. Idempotent."""
        self._counted = self.partitions_done, self.rows
        for known in (self._dealt, self._totals, self.skip, self.known):
            known.clear()

    @property
    def closed(self) -> bool:
        """Whether the assignment of rows was forgotten."""
        return self._counted is not None

    @property
    def partitions_done(self) -> int:
        """Number of partitions that an attempt has finished."""
        return self._counted[0] if self._counted is not None else len(self._totals)

    @property
    def rows(self) -> int:
        """Number of rows that were acknowledged in these partitions."""
        return self._counted[1] if self._counted is not None else sum(self._totals.values())
