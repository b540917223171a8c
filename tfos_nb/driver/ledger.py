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

:class:`HeldPositions` are the states from which training can continue in the middle of a pass. From the ledger they
find which rows of the pass each state includes.
"""

from __future__ import annotations

import functools
import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tfos_nb.runtime.feed.messages import SAME_VERSION, Claimed, ClaimRows, HeldRows, KnownRows, PassPosition, Reached
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.rows.balancing import Dealt, level, piece_rows
from tfos_nb.runtime.rows.spans import Spans, merged, row_behind, rows_within, without

__all__ = ["FeedLedger", "HeldPositions"]

_MOST_AT_ONCE = 1 << 32  # rows of one question: more than fit into a record batch
_MOST_ROUNDS = 2048  # for one question
_ALL_LEVEL = 128  # up to so many nodes, every question balances all of them; a task opens a stream to each
_SOME, _FEWEST_ROWS = 32, 64  # with more: the nodes that share a question's rows, and the fewest rows for one of them
_KEPT = 16  # states: more than a program keeps


_Value = TypeVar("_Value")


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

    def sent(self, partition: int) -> int | None:
        """Return how many rows of a partition were acknowledged; None if no attempt has finished it."""
        return self._totals.get(partition)

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
        for partition, before in _inverted(reached).items():
            of_nodes = self._spans_of_nodes(partition, before).values()
            through.setdefault(partition, []).extend(span for spans in of_nodes for span in spans)
        return {partition: merged(spans) for partition, spans in through.items()}

    def known_rows(self, reached: Mapping[str, Mapping[int, Reached]]) -> dict[int, tuple[KnownRows, ...]]:
        """Return fingerprints of the nodes' rows by partition, with those that this feed began with.

        A fingerprint counts only if it covers all rows before ``reached`` that the node was sent.
        """
        known = {partition: list(rows) for partition, rows in self.known.items()}
        for partition, nodes in _inverted(reached).items():
            of_nodes = self._spans_of_nodes(partition, {node: one.row for node, one in nodes.items()})
            for node, one in nodes.items():
                spans = without(merged(of_nodes[node]), self._skipped(partition))
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

    def _spans_of_nodes(self, partition: int, before: Mapping[str, int]) -> dict[str, list[tuple[int, int]]]:
        """Return for each node its own rows of a partition before the row that is given for it."""
        spans: dict[str, list[tuple[int, int]]] = {node: [] for node in before}
        for start, end, number in self._places(partition, max(before.values())):
            name = self._names[number]
            if start < before.get(name, 0):
                spans[name].append((start, min(end, before[name])))
        return spans

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


class HeldPositions:
    """The driver's record of the states for which all nodes have reported their positions.

    States in memory follow each other within a tenth of a second, and only the newest are continued from. Those that
    are written to the ``model_dir`` are kept apart: hundreds of states in memory may follow one of them.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], dict[str, PositionHeld]] = {}
        self._whole: dict[str, _State] = {}
        self._given: dict[str, HeldRows] = {}  # of states of an earlier cluster
        self._stored: dict[str, None] = {}  # their names, in order

    def take(
        self, said: PositionHeld, nodes: Collection[str], book: FeedLedger, before: HeldRows | None = None
    ) -> bool:
        """Record a node's report; ``nodes`` are all nodes that share the feed's rows, ``book`` is its ledger.

        ``before`` are the rows of the state with which this generation goes on with the feed. Return whether training
        can continue from the new state, as all nodes have reported now.
        """
        told = self._parts.setdefault((said.state, said.feed), {})
        told[said.node] = said
        if is_known := told.keys() >= set(nodes):
            del self._parts[said.state, said.feed]
            self._whole[said.state] = _State(told, book, before or HeldRows())
        if said.stored:
            self._stored[said.state] = None
        _leave_newest(self._stored)
        _leave_newest(self._parts)
        _leave_newest(self._whole, beside=self._stored)
        return is_known

    def keep_rows_of(self, book: FeedLedger) -> None:
        """Find out which rows the states include that were saved with this ledger, as it is about to forget them."""
        for state in self._whole.values():
            if state.book is book:
                _ = state.rows

    def forget_parts(self) -> None:
        """Drop incomplete records: the nodes start again, so missing reports will not come."""
        self._parts.clear()

    def give(self, state: str, rows: HeldRows) -> None:
        """Record which rows a state of an earlier cluster includes."""
        self._given[state] = rows

    @property
    def states(self) -> tuple[str, ...]:
        """The states from which training can continue."""
        return (*self._given, *self._whole)

    def rows_of(self, state: str) -> HeldRows:
        """Return which rows a state includes of the pass in which it was saved.

        Raises
        ------
        KeyError
            If the state is not known.
        """
        return self._given[state] if state in self._given else self._whole[state].rows

    def forget_order(self, feed: int, nodes: Collection[str]) -> None:
        """Record that nodes get the rows of a feed once more, perhaps in another order than in the states."""
        for state in self._whole.values():
            for node in nodes:
                if node in state.told and state.told[node].feed == feed:
                    state.told[node] = replace(state.told[node], at=None)

    def positions_in(self, feed: int, state: str) -> dict[str, PassPosition] | None:
        """Return how each node begins the pass once more in which a state was saved; None if that is not known.

        The pass must be one over this feed. A state of whole epochs has no name, and includes no row of a pass.
        """
        if not state:
            return {}
        told = self._whole[state].told if state in self._whole else {}
        found = {node: one.at for node, one in told.items() if one.feed == feed and one.at is not None}
        return found if found and found.keys() == told.keys() else None

    def knows(self, state: str) -> bool:
        """Return whether it is known which rows a state includes; one of whole epochs has no name."""
        return not state or state in self._given or state in self._whole

    def writer_of(self, state: str) -> str:
        """Return the node that writes a state to the ``model_dir``; an empty string if none does."""
        told = self._whole[state].told if state in self._whole else {}
        return next((node for node, one in told.items() if one.stored), "")


@dataclass
class _State:
    """Reports of the nodes about a state. The rows are found only after a loss, since states are saved often."""

    told: dict[str, PositionHeld]
    book: FeedLedger
    before: HeldRows  # in the state from which the nodes continue that report only the rows besides those

    @functools.cached_property
    def rows(self) -> HeldRows:
        left = _by_partition(one.left for one in self.told.values())
        spans = self.book.rows_before({node: one.reached for node, one in self.told.items()})
        if any(one.adds for one in self.told.values()):
            spans = _by_partition((spans, self.before.spans))
        known = self.book.known_rows({node: one.known for node, one in self.told.items()})
        return HeldRows({one: without(rows, left.get(one, ())) for one, rows in spans.items()}, known)


def _inverted(by_node: Mapping[str, Mapping[int, _Value]]) -> dict[int, dict[str, _Value]]:
    """Return by partition and node what is given by node and partition."""
    inverted: dict[int, dict[str, _Value]] = {}
    for node, partitions in by_node.items():
        for partition, value in partitions.items():
            inverted.setdefault(partition, {})[node] = value
    return inverted


def _by_partition(several: Iterable[Mapping[int, Spans]]) -> dict[int, Spans]:
    rows: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in several:
        for partition, spans in one.items():
            rows[partition] += spans
    return {partition: merged(spans) for partition, spans in rows.items()}


def _leave_newest(states: dict[Any, Any], beside: Collection[Any] = ()) -> None:
    """Delete all but the newest states; those in ``beside`` are not counted."""
    for old in [state for state in states if state not in beside][:-_KEPT]:
        del states[old]
