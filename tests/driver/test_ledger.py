"""The feed ledger: all attempts get the same answer, and the nodes' shares differ by at most one row."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfos_nb.driver import ledger as ledger_module
from tfos_nb.driver.ledger import FeedLedger
from tfos_nb.runtime.feed.messages import Claimed, ClaimRows, HeldRows
from tfos_nb.runtime.rows.balancing import Dealt, level, piece_rows
from tfos_nb.runtime.rows.spans import Spans, merged, row_behind, rows_within

bounded = settings(deadline=None, max_examples=100)


def names(count: int) -> list[str]:
    return [f"worker:{index}" for index in range(count)]


def spread(counts: dict[str, int]) -> int:
    return max(counts.values()) - min(counts.values())


def claim(ledger: FeedLedger, partition: int, start: int, rows: int, **options: Any) -> list[tuple[int, str]]:
    """Claim rows; return the end of each piece, and the node that gets it."""
    answer = ledger.claim(ClaimRows(1, partition, start, rows, **options))
    return list(zip(answer.ends, answer.nodes, strict=True))


# --- dealing --------------------------------------------------------------------------------------


@bounded
@given(st.lists(st.tuples(st.integers(-9, 40), st.booleans()), min_size=1, max_size=7), st.integers(1, 200))
def test_each_row_goes_to_the_node_with_the_fewest_rows(nodes: list[tuple[int, bool]], rows: int) -> None:
    counts = [(count, behind, f"n{number}") for number, (count, behind) in enumerate(nodes)]
    left = {name: (count, behind, name) for count, behind, name in counts}
    for _ in range(rows):
        count, behind, name = min(left.values(), key=lambda one: one[0])
        left[name] = (count + 1, behind, name)
    gets = dict(level(counts, rows))
    assert sum(gets.values()) == rows
    assert all(gets.values())
    assert sorted(count + gets.get(name, 0) for count, _, name in counts) == sorted(c for c, _, _ in left.values())


@bounded
@given(st.integers(0, 10_000_000), st.integers(1, 10_000))
def test_a_piece_fits_and_is_small_compared_with_the_rows_before_it(row: int, fitting: int) -> None:
    rows = piece_rows(row, fitting)
    assert 1 <= rows <= min(fitting, 8192)
    assert rows <= max(8, row / 16)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=20), st.integers(0, 99), st.integers(0, 99))
def test_rows_that_were_dealt_are_found_again(dealt: list[tuple[int, int]], start: int, end: int) -> None:
    places, rows = Dealt(), []
    for node, count in dealt:
        rows += [node] * count
        places.add(node, len(rows))
    found = list(places.within(start, end))
    assert [node for first, last, node in found for _ in range(first, last)] == rows[start : max(start, end)]
    assert all(one[1] == other[0] and one[2] != other[2] for one, other in itertools.pairwise(found))
    assert places.end == len(rows)


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5).map(merged)


@given(spans, st.integers(0, 70), st.integers(1, 70))
def test_row_behind_does_not_count_skipped_rows(skip: Spans, start: int, count: int) -> None:
    end = row_behind(skip, start, count)
    assert end - start - rows_within(skip, start, end) == count
    assert not rows_within(skip, end - 1, end)


# --- attempts at partitions -----------------------------------------------------------------------


@dataclass
class Attempt:
    """An attempt at a partition: it reads batches, claims what it does not hold back, and may be interrupted.

    ``told`` has for each row the node that the attempts were told.
    """

    ledger: FeedLedger
    partition: int
    batches: list[int]
    told: dict[int, str]
    near: tuple[str, ...] = ()
    part: int = 0  # it holds back 1/part of the rows that it has read; none if 0
    fitting: int = 5000
    fails_at: int | None = None
    claimed: int = 0
    row: int = 0

    def step(self) -> bool:
        """Read a batch and claim rows; at the end of the batches claim all that is left. Return whether it is over."""
        if self.fails_at is not None and self.row >= self.fails_at:
            return True
        self.row += self.batches.pop(0) if self.batches else 0
        skip = self.ledger.skip.get(self.partition, ())
        held = self._rows(0, self.row) // self.part if self.part and self.batches else 0
        end = self.row
        while self._rows(end, self.row) < held:
            end -= 1
        if end > self.claimed:
            self._claim(end, rows_within(((end, self.row),), end, self.row) - rows_within(skip, end, self.row))
        if not self.batches:
            self.ledger.finish(self.partition, self.row)
        return not self.batches

    def _rows(self, start: int, end: int) -> int:
        return end - start - rows_within(self.ledger.skip.get(self.partition, ()), start, end)

    def _claim(self, end: int, held: int) -> None:
        options: dict[str, Any] = {"held": held, "local": self.near, "fitting": self.fitting}
        row = self.claimed
        for until, node in claim(self.ledger, self.partition, row, end - row, **options):
            for one in range(row, until):
                assert self.told.setdefault(one, node) == node
            assert until > row
            row = until
        assert row == self.claimed + (end - self.claimed)
        self.claimed = end


@dataclass
class Work:
    """A partition: its rows, the rows to skip, the incomplete attempts, and the batches of the last, complete one."""

    rows: int
    skip: Spans = ()
    attempts: list[tuple[list[int], int | None]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    def cut(self, sizes: list[int], rows: int) -> list[int]:
        """Cut rows into batches of these sizes; the remaining rows are one more batch."""
        batches: list[int] = []
        for size in sizes:
            if sum(batches) + size < rows:
                batches.append(size)
        return [*batches, rows - sum(batches)] if rows else []

    def plan(self) -> list[tuple[list[int], int | None]]:
        """Return the batches of each attempt, and the row at which it dies; input that breaks off has fewer batches."""
        tried = [(self.cut(sizes, end), None) for sizes, end in self.attempts if end is not None and end < self.rows]
        died = [(self.cut(sizes, self.rows), self.rows // 2) for sizes, end in self.attempts if end is None]
        return [*died, *tried, (self.cut(self.last, self.rows), None)]


sizes_of_batches = st.lists(st.integers(1, 400), max_size=6)
works = st.builds(
    Work,
    rows=st.integers(0, 700) | st.integers(0, 5000),
    skip=st.just(()) | st.lists(st.tuples(st.integers(0, 800), st.integers(0, 800)), max_size=3).map(merged),
    attempts=st.lists(st.tuples(sizes_of_batches, st.none() | st.integers(0, 700)), max_size=2),
    last=sizes_of_batches,
)


@settings(deadline=None, max_examples=200)
@example([Work(64)], 2, 1, 0, None)
@example([Work(90), Work(6)], 2, 1, 0, None)
@example([Work(1)] * 100, 2, 3, 0, None)
@given(
    plan=st.lists(works, min_size=1, max_size=5),
    nodes=st.integers(2, 6),
    at_once=st.integers(1, 4),
    part=st.sampled_from([0, 2, 5]),
    data=st.data(),
)
def test_all_attempts_give_a_row_to_the_same_node_and_the_shares_are_equal(
    plan: list[Work], nodes: int, at_once: int, part: int, data: st.DataObject | None
) -> None:
    """Partitions are read at once, by attempts that die or break off, in other batches, and with preferred nodes."""
    ledger = FeedLedger(1, names(nodes), HeldRows({number: work.skip for number, work in enumerate(plan) if work.skip}))
    told: list[dict[int, str]] = [{} for _ in plan]
    waiting = []
    for number, work in enumerate(plan):
        near = tuple(data.draw(st.sets(st.sampled_from(names(nodes))), label="near")) if data else ()
        tries = [Attempt(ledger, number, batches, told[number], near, part, 50, at) for batches, at in work.plan()]
        waiting.append([one for one in tries if one.batches])
    running: list[list[Attempt]] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop())
        chosen = data.draw(st.sampled_from(running), label="who asks next") if data else running[0]
        if not chosen or chosen[0].step():
            del chosen[:1]
        running = [one for one in running if one]
    for number, work in enumerate(plan):
        assert sorted(told[number]) == list(range(work.rows)) or work.skip
    wanted = [work.rows - rows_within(work.skip, 0, work.rows) for work in plan]
    assert ledger.rows == sum(work.rows for work in plan)
    assert sum(ledger.shares().values()) == sum(wanted)
    assert ledger.shares() == ledger.claimed
    assert spread(ledger.shares()) <= 1


def read_all(ledger: FeedLedger, sizes: list[int], **options: Any) -> None:
    """Read partitions of these sizes, one after another, in batches of 10,000 rows."""
    for partition, rows in enumerate(sizes):
        for start in range(0, rows, 10_000):
            claim(ledger, partition, start, min(10_000, rows - start), **options)
        ledger.finish(partition, rows)


@pytest.mark.parametrize(
    "sizes", [[37], [64, 64], [3], [1] * 1000, [1_000_000] * 2, [90, 6], [0, 1, 0]], ids=lambda sizes: str(sizes)[:12]
)
@pytest.mark.parametrize("nodes", [2, 3, 16, 128])
@pytest.mark.parametrize("fitting", [27, 1 << 20], ids=["rows of 600 KB", "small rows"])
def test_shares_differ_by_at_most_one_row_for_any_partitions(sizes: list[int], nodes: int, fitting: int) -> None:
    ledger = FeedLedger(1, names(nodes))
    read_all(ledger, sizes, fitting=fitting)
    assert sum(ledger.shares().values()) == sum(sizes)
    assert spread(ledger.shares()) <= 1


def test_many_rows_make_few_pieces_and_the_first_ones_are_small() -> None:
    ledger = FeedLedger(1, names(2))
    pieces = [one for start in range(0, 1_000_000, 10_000) for one in claim(ledger, 0, start, 10_000)]
    assert [end for end, _ in pieces[:4]] == [8, 16, 24, 32]
    assert len(pieces) < 500
    same = sum(one[1] == other[1] for one, other in itertools.pairwise(pieces))
    assert len(ledger._dealt[0]._ends) == len(pieces) - same


def test_rows_stay_on_their_host_as_far_as_held_rows_can_balance_the_shares() -> None:
    """Two tasks on two hosts hold rows back: no row goes to the other host, except for the last ones."""
    ledger = FeedLedger(1, names(2))
    for start in range(0, 100_000, 10_000):
        for partition, near in ((0, "worker:0"), (1, "worker:1")):
            told = claim(ledger, partition, start, 10_000, held=10_000, local=(near,))
            assert {node for _, node in told} == {near}


def test_a_node_on_the_same_host_is_ahead_only_as_far_as_held_rows_can_balance() -> None:
    ledger = FeedLedger(1, names(4))
    claim(ledger, 0, 0, 500, held=120, local=("worker:1",))
    least = min(ledger.claimed.values())
    assert ledger.claimed["worker:1"] - least <= 120 // 3 + 1
    claim(ledger, 0, 500, 120, local=("worker:1",))
    assert spread(ledger.claimed) <= 1


def test_among_equal_nodes_the_one_on_the_same_host_comes_first() -> None:
    assert claim(FeedLedger(1, names(3)), 0, 0, 1, local=("worker:2",)) == [(1, "worker:2")]


def test_with_very_many_nodes_a_claim_goes_to_some_and_the_shares_stay_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task opens a stream to every node that it has rows for."""
    monkeypatch.setattr(ledger_module, "_ALL_LEVEL", 7)
    monkeypatch.setattr(ledger_module, "_SOME", 3)
    ledger = FeedLedger(1, names(8))
    assert len({node for _, node in claim(ledger, 0, 0, 100)}) == 1
    for start in range(100, 100_000, 900):
        told = claim(ledger, 0, start, 900)
        assert len({node for _, node in told}) == 3
        assert spread(ledger.claimed) <= 600
    ledger.finish(0, 100_000)
    assert sum(ledger.shares().values()) == 100_000


def test_finishing_twice_counts_once() -> None:
    ledger = FeedLedger(1, names(2))
    read_all(ledger, [100])
    claimed = dict(ledger.claimed)
    ledger.finish(0, 100)
    assert ledger.claimed == claimed == {"worker:0": 50, "worker:1": 50}
    assert (ledger.rows, ledger.partitions_done) == (100, 1)


def test_a_feed_is_spilled_only_if_every_partition_is() -> None:
    ledger = FeedLedger(1, names(2))
    ledger.finish(0, 1, spilled=True)
    assert ledger.spilled
    ledger.finish(1, 1, spilled=False)
    ledger.finish(2, 1, spilled=True)
    assert not ledger.spilled


def test_rows_claimed_behind_the_end_of_an_attempt_are_in_no_share() -> None:
    ledger = FeedLedger(1, names(2))
    first = claim(ledger, 0, 0, 500)  # by an attempt that dies
    ledger.finish(0, 100)  # by an attempt whose input breaks off
    assert sum(ledger.shares().values()) == 100
    assert claim(ledger, 0, 0, 500) == first
    ledger.finish(0, 500)
    assert ledger.shares() == {"worker:0": 250, "worker:1": 250}


@bounded
@given(st.lists(st.integers(0, 6000), min_size=1, max_size=6), st.integers(1, 4))
def test_interrupted_attempts_count_as_the_one_that_got_furthest(ends: list[int], nodes: int) -> None:
    ledger = FeedLedger(1, names(nodes))
    for rows in ends:
        claim(ledger, 0, 0, rows)
        ledger.finish(0, rows)
        assert ledger.shares() == ledger.claimed
    assert ledger.rows == max(ends) == sum(ledger.claimed.values())
    assert ledger.partitions_done == 1
    assert spread(ledger.claimed) <= 1


@given(st.integers(2, 4), st.lists(st.integers(1, 300), min_size=1, max_size=4), spans, st.data())
def test_rows_before_a_position_are_those_that_nodes_read_and_those_skipped(
    nodes: int, batches: list[int], skip: Spans, data: st.DataObject
) -> None:
    ledger, row, whose = FeedLedger(1, names(nodes), HeldRows({0: skip})), 0, []
    for rows in batches:
        for end, node in claim(ledger, 0, row, rows):
            whose += [node] * (end - len(whose))
        row += rows
    reached = {name: {0: data.draw(st.integers(0, row))} for name in names(nodes)}
    through = {one for start, end in ledger.rows_before(reached).get(0, ()) for one in range(start, end)}
    skipped = {one for start, end in skip for one in range(start, end)}
    assert through == skipped | {one for one, node in enumerate(whose) if one < reached[node][0]}


@pytest.mark.parametrize(
    ("partition", "start", "rows", "held"),
    [(0, 0, 2**63, 0), (0, 0, -1, 0), (0, 7, 1, 0), (0, -64, 1, 0), (-1, 0, 1, 0), (0, 2**62 + 1, 1, 0), (0, 0, 1, -1)],
)
def test_impossible_claims_are_refused_at_once(partition: int, start: int, rows: int, held: int) -> None:
    """The driver answers in one thread: a claim of this size would block all other questions."""
    ledger = FeedLedger(1, ["worker:0", "worker:1"])
    with pytest.raises(ValueError, match="cannot be claimed|cannot have"):
        claim(ledger, partition, start, rows, held=held)
    assert ledger.claimed == {"worker:0": 0, "worker:1": 0}


def test_a_claim_makes_a_bounded_number_of_pieces() -> None:
    assert len(claim(FeedLedger(1, names(2)), 0, 0, 1 << 32, fitting=1)) <= 4096


def test_a_claim_of_no_rows_goes_to_no_node() -> None:
    assert FeedLedger(1, names(2)).claim(ClaimRows(1, 0, 0, 0)) == Claimed([], [])


def test_impossible_ends_of_partitions_are_refused() -> None:
    ledger = FeedLedger(1, ["worker:0"])
    for partition, rows in ((0, -1), (-1, 5)):
        with pytest.raises(ValueError, match="cannot be claimed|cannot have"):
            ledger.finish(partition, rows)
    assert (ledger.rows, ledger.partitions_done) == (0, 0)


def test_a_closed_ledger_keeps_its_counts_and_forgets_who_has_which_rows() -> None:
    ledger = FeedLedger(1, names(2))
    for partition in range(20):
        claim(ledger, partition, 0, 100, held=0, fitting=100, local=())
        ledger.finish(partition, 100)
    assert (ledger.rows, ledger.partitions_done) == (2000, 20)
    for _ in range(2):
        ledger.close()
        assert (ledger.rows, ledger.partitions_done) == (2000, 20)
        assert not ledger._dealt
        assert not ledger._totals
