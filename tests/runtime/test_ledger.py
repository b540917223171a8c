"""Who gets which rows: alike for every attempt, and about as many for each node."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfos_nb.runtime.feedtask import _CLAIMED_AHEAD
from tfos_nb.runtime.ledger import FeedLedger
from tfos_nb.runtime.segments import PIECE_BYTES, Segments

CUT = Segments()
bounded = settings(deadline=None, max_examples=60)
rows_of_partitions = st.lists(st.integers(0, 6000), min_size=1, max_size=8)


def segments(rows: int) -> list[tuple[int, int]]:
    """Return the segments of a partition, as (first row, first row after)."""
    found, start = [], 0
    while start < rows:
        found.append((start, CUT.end(start)))
        start = found[-1][1]
    return found


@bounded
@given(st.integers(0, 10_000_000), st.integers(0, 40 << 20))
def test_a_segment_begins_and_ends_where_every_row_of_it_says_and_fits_into_a_piece(row: int, row_bytes: int) -> None:
    cut = Segments.of_rows(row_bytes)
    start, end = cut.start(row), cut.end(row)
    assert start <= row < end
    assert {(cut.start(one), cut.end(one)) for one in (start, end - 1)} == {(start, end)}
    assert end - start == 1 or (end - start) * row_bytes <= PIECE_BYTES


@pytest.mark.parametrize("largest", [0, -1, 3, 1 << 17])
def test_segments_that_there_can_be_none_of_are_refused(largest: int) -> None:
    with pytest.raises(ValueError, match=f"segments of {largest} rows at most"):
        Segments(largest)


def test_segments_follow_each_other_without_a_gap_and_stay_small_beside_what_came_before() -> None:
    for start, end in segments(4_000_000):
        assert CUT.end(start) == end
        size = end - start
        assert size == 64 if start < 1024 else size <= start / 8
        assert size <= 8192


def test_a_big_partition_costs_few_questions() -> None:
    assert len(segments(1_000_000)) < 240


@dataclass
class Reading:
    """An attempt at a partition: segment by segment, as a Spark task does it."""

    ledger: FeedLedger
    partition: int
    rows: int
    near: tuple[str, ...] = ()
    row: int = 0
    ahead: list[str] = field(default_factory=list)

    def step(self) -> bool:
        """Go on to the next segment, claiming some ahead, or finish; tell whether that was the end."""
        if self.row < self.rows:
            self.ahead = self.ahead or self.ledger.claim_many(self.partition, self.row, _CLAIMED_AHEAD, self.near)
            self.ahead.pop(0)
            self.row = CUT.end(self.row)
            return False
        self.ledger.finish(self.partition, self.rows)
        return True


def names(count: int) -> list[str]:
    return [f"worker:{index}" for index in range(count)]


def largest(sizes: list[int]) -> int:
    return max((end - start for rows in sizes for start, end in segments(rows)), default=0)


def spread(ledger: FeedLedger) -> int:
    return max(ledger.claimed.values()) - min(ledger.claimed.values())


@bounded
@given(rows_of_partitions, st.integers(1, 5))
def test_partitions_read_one_by_one_differ_by_one_segment_at_most(sizes: list[int], nodes: int) -> None:
    ledger = FeedLedger(1, names(nodes))
    for partition, rows in enumerate(sizes):
        reading = Reading(ledger, partition, rows)
        while not reading.step():
            pass
        assert spread(ledger) <= largest(sizes)
    assert sum(ledger.claimed.values()) == ledger.rows == sum(sizes)


@bounded
@given(rows_of_partitions, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.data())
def test_the_shares_differ_by_what_is_claimed_ahead_for_partitions_that_are_read_at_once(
    sizes: list[int], nodes: int, at_once: int, local: bool, data: st.DataObject
) -> None:
    """Segments are claimed some ahead and count in full until their partition is finished; and a node on the same host
    is preferred to one that has a segment less: hence the bound."""
    ledger = FeedLedger(1, names(nodes))
    waiting = [
        Reading(ledger, number, rows, (names(nodes)[number % nodes],) if local else ())
        for number, rows in enumerate(sizes)
    ]
    running: list[Reading] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop())
        chosen = data.draw(st.sampled_from(running), label="who asks next") if len(running) > 1 else running[0]
        if chosen.step():
            running.remove(chosen)
    assert spread(ledger) <= (1 + local + _CLAIMED_AHEAD * (at_once - 1)) * largest(sizes)
    assert sum(ledger.claimed.values()) == ledger.rows == sum(sizes)
    assert ledger.shares() == ledger.claimed
    assert ledger.partitions_done == len(sizes)


@pytest.mark.parametrize(("partitions", "rows"), [(1, 1797), (4, 450), (8, 25_000), (200, 7)])
def test_nodes_get_equal_shares_within_an_eighth(partitions: int, rows: int) -> None:
    ledger = FeedLedger(1, names(2))
    for partition in range(partitions):
        reading = Reading(ledger, partition, rows)
        while not reading.step():
            pass
    assert spread(ledger) <= max(64, rows / 8)


@bounded
@given(rows_of_partitions, st.integers(1, 5), st.data())
def test_every_attempt_is_told_the_same_places(sizes: list[int], nodes: int, data: st.DataObject) -> None:
    ledger = FeedLedger(1, names(nodes))
    asked = [(partition, start) for partition, rows in enumerate(sizes) for start, _ in segments(rows)]
    told: dict[tuple[int, int], str] = {}
    for partition, start in data.draw(st.lists(st.sampled_from(asked), max_size=200) if asked else st.just([])):
        near = data.draw(st.sampled_from([(), ("worker:0",), (f"worker:{nodes - 1}",)]))
        node = ledger.claim(partition, start, near)
        assert told.setdefault((partition, start), node) == node
    assert sum(ledger.claimed.values()) == sum(CUT.end(start) - start for _, start in told)


def test_a_node_on_the_same_host_is_preferred_until_it_has_a_segment_more() -> None:
    ledger = FeedLedger(1, names(2))
    assert [ledger.claim(0, start, ["worker:1"]) for start in (0, 64, 128, 192)] == [
        "worker:1",  # both have none
        "worker:0",  # the one on this host has a segment more, which weighs as much as the host does
        "worker:1",
        "worker:0",
    ]  # fmt: skip


def test_without_a_node_on_the_same_host_the_one_with_the_fewest_rows_is_chosen() -> None:
    ledger = FeedLedger(1, names(3))
    assert [ledger.claim(0, start) for start in (0, 64, 128, 192)] == ["worker:0", "worker:1", "worker:2", "worker:0"]


def test_finishing_twice_counts_once() -> None:
    ledger = FeedLedger(1, names(2))
    reading = Reading(ledger, 0, 100)
    while not reading.step():
        pass
    claimed = dict(ledger.claimed)
    ledger.finish(0, 100)
    assert ledger.claimed == claimed
    assert (ledger.rows, ledger.partitions_done) == (100, 1)


def test_one_partition_that_was_not_kept_makes_the_feed_not_kept() -> None:
    ledger = FeedLedger(1, names(2))
    ledger.finish(0, 1, spilled=True)
    assert ledger.spilled
    ledger.finish(1, 1, spilled=False)
    ledger.finish(2, 1, spilled=True)
    assert not ledger.spilled


def test_of_a_partition_whose_end_is_known_no_row_is_counted_that_it_has_not() -> None:
    ledger = FeedLedger(1, names(2))
    first = ledger.claim_many(0, 0, 16)
    assert first == ["worker:0", "worker:1"] * 8
    ledger.finish(0, 100)
    assert ledger.claimed == {"worker:0": 64, "worker:1": 36}
    assert ledger.claim_many(0, 0, 16) == first
    assert len(ledger.claim_many(0, 1024, 16)) == 16  # a later attempt asks ahead
    assert ledger.shares() == {"worker:0": 64, "worker:1": 36}
    ledger.finish(0, 100)
    assert ledger.claimed == {"worker:0": 64, "worker:1": 36}


@bounded
@given(st.lists(st.integers(0, 6000), min_size=1, max_size=6), st.integers(1, 4))
def test_attempts_that_were_broken_off_count_as_the_one_that_came_furthest(ends: list[int], nodes: int) -> None:
    ledger = FeedLedger(1, names(nodes))
    for rows in ends:
        reading = Reading(ledger, 0, rows)
        while not reading.step():
            pass
        assert ledger.shares() == ledger.claimed
    assert ledger.rows == max(ends) == sum(ledger.claimed.values())
    assert ledger.partitions_done == 1


def test_what_comes_after_a_broken_off_attempt_is_shared_out_evenly() -> None:
    ledger = FeedLedger(1, names(2))
    for rows in (2000, 60_000):
        reading = Reading(ledger, 0, rows)
        while not reading.step():
            pass
    assert spread(ledger) <= 60_000 / 8


@pytest.mark.parametrize(
    ("partition", "start", "count"), [(0, 0, 2**63), (0, 0, -1), (0, 7, 1), (0, -64, 1), (-1, 0, 1), (0, 2**62 + 1, 1)]
)
def test_segments_that_there_are_none_of_are_refused_at_once(partition: int, start: int, count: int) -> None:
    """The driver answers in one thread: a count without end would have been the end of all questions."""
    ledger = FeedLedger(1, ["worker:0", "worker:1"])
    with pytest.raises(ValueError, match="there are none"):
        ledger.claim_many(partition, start, count)
    assert ledger.claimed == {"worker:0": 0, "worker:1": 0}


def test_rows_that_there_cannot_be_are_refused() -> None:
    ledger = FeedLedger(1, ["worker:0"])
    for partition, rows in ((0, -1), (-1, 5)):
        with pytest.raises(ValueError, match="there are none"):
            ledger.finish(partition, rows)
    assert (ledger.rows, ledger.partitions_done) == (0, 0)
