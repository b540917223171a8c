"""After a state saved in the middle of a pass, exactly the rows that it does not contain are fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.feed.test_row_queue import Node, block_of, node
from tests.runtime.feed.test_transfer import Driver, cut, driver_of, ids_of_partition, send
from tfos_nb.driver.feed_controller import Feed
from tfos_nb.driver.ledger import FeedLedger, HeldPositions
from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed.messages import ClaimRows, FeedEnds, FeedFrom, HeldRows, KnownRows, Reached
from tfos_nb.runtime.feed.pass_record import PassRecord
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.rows.spans import end_of_span, merged, next_span, rows_within

__all__ = ["node"]

# --- which rows are fed again ---------------------------------------------------------------------

sizes = st.lists(st.integers(0, 60), max_size=8)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    generations=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_every_row_is_trained_once_however_often_training_resumes(
    rows: list[int], generations: list[int], data: st.DataObject
) -> None:
    """Each generation has its own number of nodes, reads part of the pass, is saved and then lost."""
    held_rows = HeldRows()
    held: list[int] = []
    for nodes in (*generations, 2):
        with driver_of(nodes, buffer_bytes=1 << 30) as driver:
            feed = driver.controller.begin(1, False, 1, 1, held=held_rows)
            feed_all(driver, feed, rows, data)
            seen = {name: one.seen[0] for name, one in driver.nodes.items()}
            assert {name: len(ids) for name, ids in seen.items()} == feed.ledger.shares()
            everything = [one for number, count in enumerate(rows) for one in ids_of_partition(number, count)]
            assert sorted([*held, *(one for ids in seen.values() for one in ids)]) == everything
            taken = {name: data.draw(st.integers(0, len(ids)), f"rows of {name}") for name, ids in seen.items()}
            orders = {name: order_of(len(ids), data) for name, ids in seen.items()}
            held += [ids[place] for name, ids in seen.items() for place in orders[name][: taken[name]]]
            held_rows = held_by(driver, feed, taken, orders)


def order_of(rows: int, data: st.DataObject) -> list[int]:
    """Return the order in which a node reads its rows: as they arrive, or shuffled."""
    order = list(range(rows))
    return data.draw(st.permutations(order)) if rows < 100 and data.draw(st.booleans(), "shuffled") else order


def held_by(
    driver: Driver, feed: Feed, taken: Mapping[str, int], orders: Mapping[str, Sequence[int]] | None = None
) -> HeldRows:
    """Return the rows of a state for which each node reports how many rows it has read."""
    held = HeldPositions()
    for name, rows in taken.items():
        there = driver.nodes[name].passes.feed_rows(feed.number)
        order = np.array(orders[name] if orders else range(rows), np.int64)
        record = PassRecord()
        record.shuffle()
        record.came(len(order))
        record.given_out(order, rows + 3)
        end, others = record.first(rows)
        reached, known = there.reached(end)
        left = there.rows_at(others.tolist())
        held.take(PositionHeld(name, feed.number, "state", reached, known, left), taken.keys(), feed.ledger)
    return held.rows_of("state")


def feed_all(driver: Driver, feed: Feed, rows: list[int], data: st.DataObject) -> None:
    driver.read()
    for number, count in enumerate(rows):
        batches = cut(ids_of_partition(number, count), data.draw(sizes, "batches"))
        assert send(driver, feed, batches, number) == count
    assert feed.ledger.rows == sum(rows)
    driver.finish(feed)
    driver.await_readers()


def test_a_retried_partition_skips_the_same_rows() -> None:
    ids = ids_of_partition(0, 1000)
    with driver_of(2, buffer_bytes=1 << 30) as driver:
        feed = driver.controller.begin(1, False, 1, 1, held=HeldRows({0: ((0, 100), (130, 131), (640, 900))}))
        driver.read()
        for sizes_of_batches in ([37] * 27, [500]):
            assert send(driver, feed, cut(ids, sizes_of_batches)) == 1000
        driver.finish(feed)
        driver.await_readers()
        seen = sorted(row for one in driver.nodes.values() for row in one.seen[0])
    assert seen == [*ids[100:130], *ids[131:640], *ids[900:]]


def test_a_pass_is_empty_if_the_state_contains_all_its_rows() -> None:
    with driver_of(2) as driver:
        feed = driver.controller.begin(1, False, 1, 1, held=HeldRows({0: ((0, 50),)}))
        driver.read()
        assert send(driver, feed, cut(ids_of_partition(0, 50), ())) == 50
        driver.finish(feed)
        driver.await_readers()
        assert [one.seen for one in driver.nodes.values()] == [[[]], [[]]]


def held_after(nodes: int, batches: list[int], taken: int) -> HeldRows:
    """Return the rows of a state in which each node has read ``taken`` of the 200 rows of partition 0."""
    with driver_of(nodes, buffer_bytes=1 << 30) as driver:
        feed = driver.controller.begin(1, False, 1, 1)
        driver.read()
        send(driver, feed, cut(ids_of_partition(0, 200), batches))
        driver.finish(feed)
        driver.await_readers()
        return held_by(driver, feed, dict.fromkeys(driver.nodes, taken))


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("batches", [[], [50] * 4], ids=["at once", "one after the other"])
def test_a_partition_is_refused_if_the_rows_in_the_state_have_changed(nodes: int, batches: list[int]) -> None:
    ids, held = ids_of_partition(0, 200), held_after(nodes, batches, 10)
    assert [rows_within(spans, 0, 200) for spans in held.spans.values()] == [10 * nodes]
    swapped = [*ids[3:0:-1], ids[0], *ids[4:]]
    with driver_of(nodes, buffer_bytes=1 << 30) as driver:
        for others in (ids[::-1], swapped, [*ids[:5], 999, *ids[6:]]):
            feed = driver.controller.begin(1, False, 1, 1, held=held)
            with pytest.raises(FeedFailed, match=r"partition 0 gave other rows when Spark read it again: the nodes"):
                send(driver, feed, cut(others, [7] * 30))
            assert feed.ledger.partitions_done == 0
    assert_taken(nodes, held, ids)


def assert_taken(nodes: int, held: HeldRows, ids: list[int]) -> None:
    with driver_of(nodes, buffer_bytes=1 << 30) as driver:
        feed = driver.controller.begin(1, False, 1, 1, held=held)
        driver.read()
        assert send(driver, feed, cut(ids, [7] * 30)) == len(ids)
        driver.finish(feed)
        driver.await_readers()
        seen = sorted(row for one in driver.nodes.values() for row in one.seen[0])
        assert seen == sorted(set(ids) - {ids[row] for start, end in held.spans[0] for row in range(start, end)})
        assert feed.ledger.cut_short() is None


def test_rows_far_behind_those_in_the_state_may_change_their_order() -> None:
    held, ids = held_after(1, [50] * 4, 10), ids_of_partition(0, 200)
    (known,) = held.known[0]
    assert known.spans == ((0, 50),)
    assert_taken(1, held, [*ids[:50], *ids[:49:-1]])


def test_a_partition_with_fewer_rows_than_the_state_contains_is_reported() -> None:
    ledger = FeedLedger(
        1, ["worker:0"], HeldRows({0: ((0, 5),), 1: (), 2: ((3, 9),)}, {2: (KnownRows(((3, 12),), 1),)})
    )
    assert ledger.cut_short() == (0, 0, 5)
    ledger.finish(0, 5)
    ledger.finish(2, 11)
    assert ledger.cut_short() == (2, 11, 12)
    ledger.finish(2, 12)
    assert ledger.cut_short() is None


def test_a_fingerprint_of_rows_that_were_not_sent_to_the_node_is_ignored() -> None:
    ledger = FeedLedger(1, ["worker:0", "worker:1"])
    ledger.claim(ClaimRows(1, 0, 0, 16))
    known = ledger.known_rows({"worker:0": {0: Reached(8, 8, 5)}, "worker:1": {0: Reached(16, 7, 6)}})
    assert known == {0: (KnownRows(((0, 8),), 5),)}


# --- intervals ------------------------------------------------------------------------------------

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


@given(intervals, st.integers(0, 45), st.integers(0, 45))
def test_spans_contain_the_rows_of_their_intervals(pairs: list[tuple[int, int]], row: int, other: int) -> None:
    rows = {one for start, end in pairs for one in range(start, end)}
    spans = merged(pairs)
    assert [one for start, end in spans for one in range(start, end)] == sorted(rows)
    assert rows_within(spans, row, other) == len(rows & set(range(row, other)))
    assert end_of_span(spans, row) == next(one for one in range(row, 99) if one not in rows)
    behind = [start for start, _ in spans if start > row]
    assert next_span(spans, row) == (behind[0] if behind else None)


# --- the node's end -------------------------------------------------------------------------------


@pytest.mark.parametrize("replays", [0, 1], ids=["as they come", "from disk"])
def test_a_node_reports_a_states_position_in_each_partition(node: Node, replays: int) -> None:
    node.begin(1, 1 + replays, bool(replays))
    rows_in_feed = node.queue.feed_rows(1)
    for partition, start, count in ((3, 0, 10), (1, 100, 10), (3, 10, 10)):
        rows_in_feed.accept(partition, ((start, start + count),), block_of(start, count))
    node.queue.end(FeedEnds(1, 30, replays))
    for _ in range(1 + replays):
        assert len(node.take()) == 30
    for rows, reached in ((0, {}), (4, {3: 4}), (10, {3: 10}), (25, {3: 15, 1: 110}), (30, {3: 20, 1: 110})):
        node.queue.hold("half", replays, rows)
        known = {partition: Reached(-(-row // 10) * 10) for partition, row in reached.items()}
        assert told(node)[-1] == PositionHeld("worker:0", 1, "half", reached, known)


def told(node: Node) -> list[Any]:
    return list(node.told)


@pytest.mark.parametrize(
    ("epoch", "rows", "why"),
    [
        (1, 5, "epoch must be 0, the number of finished passes, got 1"),
        (0, 31, "rows must be at most the 30 that have come in this pass, got 31"),
    ],
)
def test_a_checkpoint_at_a_position_that_main_has_not_reached_is_refused(
    node: Node, epoch: int, rows: int, why: str
) -> None:
    node.feed(1, 0, 30)
    node.take()
    with pytest.raises(ValueError, match=rf"ctx.checkpoint\(epoch={epoch}, rows={rows}\): {why}"):
        node.queue.hold("half", epoch, rows)


def test_a_checkpoint_by_rows_is_refused_without_a_feed(node: Node) -> None:
    with pytest.raises(ValueError, match="no pass has begun"):
        node.queue.hold("half", 0, 0)


def test_a_resumed_node_names_its_state_and_counts_from_it(node: Node) -> None:
    node.queue.begin_generation()
    node.queue.resume(2, "00000002-0001-000004")
    node.feed(1, 0, 10)
    assert len(node.take()) == 10
    assert told(node)[0] == FeedFrom("worker:0", 2, "00000002-0001-000004")
    node.queue.hold("half", 2, 10)
    assert told(node)[-1] == PositionHeld("worker:0", 1, "half", {0: 10}, {0: Reached(10)})


def test_passes_are_counted_after_the_calls_of_which_no_more_rows_are_wanted(node: Node) -> None:
    node.feed(1, 0, 10, call=1)
    node.take()
    assert node.queue.refused == (0, 0)
    assert node.queue.refused_with_current == (1, 1)
    node.queue.enough_of_pass()
    assert node.queue.refused == node.queue.refused_with_current == (1, 1)


def test_a_resumed_node_says_which_calls_it_has_refused(node: Node) -> None:
    node.queue.begin_generation()
    node.queue.resume(5, "fit-2/00000002-0001-00000040", (2, 3))
    node.queue.ask()
    assert told(node)[0] == FeedFrom("worker:0", 2, "fit-2/00000002-0001-00000040", refused=2)
