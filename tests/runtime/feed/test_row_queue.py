"""Validation rows, micro-batches, and a node's message that it needs no more rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed.messages import FeedBegins, FeedEnds, FeedSchema, PassDone
from tfos_nb.runtime.feed.row_queue import RowQueue, ValidationRows

SECONDS = 20.0


def block_of(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": pa.array(range(start, start + count), pa.int64())})


class Node:
    """A node's queue, filled as the driver and the tasks fill it."""

    def __init__(self, directory: Path) -> None:
        self.told: list[PassDone] = []
        self.queue = RowQueue("worker:0", str(directory), 1 << 20, 1 << 20, self.told.append)

    def begin(self, feed: int, passes: int = 1, spill: bool = False, **place: Any) -> None:
        self.queue.begin(FeedBegins(feed, passes, spill, **place))

    def rows(self, feed: int, start: int, count: int) -> None:
        block = block_of(start, count)
        self.queue.describe(FeedSchema(feed, block.schema.serialize().to_pybytes(), {}))
        rows = self.queue.feed_rows(feed)
        rows.accept(0, ((rows.rows_in, rows.rows_in + count),), block)

    def feed(self, feed: int, start: int, count: int, replays: int = 0, **place: Any) -> None:
        self.begin(feed, 1 + replays, bool(replays) or place.get("validates", False), **place)
        if count:
            self.rows(feed, start, count)
        self.queue.end(FeedEnds(feed, count, replays))

    def take(self, source: Any = None) -> list[int]:
        blocks = (source or self.queue).next_pass()
        return [number for block in blocks or () for number in block.column(0).to_pylist()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.queue.stop()


def test_validation_rows_are_not_a_pass_and_can_be_read_repeatedly(node: Node) -> None:
    node.feed(1, 100, 5, validates=True, call=1)
    node.feed(2, 0, 3, validation=1, call=1)
    validation = ValidationRows(node.queue)
    assert validation.schema() is not None
    assert [node.take(validation), node.take(), node.take(validation)] == [
        list(range(100, 105)),
        [0, 1, 2],
        list(range(100, 105)),
    ]
    assert [done.feed for done in node.told] == [2]


def test_validation_rows_belong_to_the_call_in_training(node: Node) -> None:
    validation = ValidationRows(node.queue)
    node.feed(1, 100, 2, validates=True, call=1)
    node.feed(2, 0, 1, validation=1, call=1)
    node.feed(3, 200, 2, validates=True, call=2)
    node.feed(4, 1, 1, validation=3, call=2)
    seen = []
    for _ in range(2):
        node.take()
        seen.append(node.take(validation))
    assert seen == [[100, 101], [200, 201]]


def test_without_validation_rows_the_error_says_how_to_provide_them(node: Node) -> None:
    node.feed(1, 0, 1, call=1)
    with pytest.raises(FeedFailed, match=r"cluster\.train\(df, validation=df2\)"):
        ValidationRows(node.queue).schema()


def test_a_validating_node_waits_for_no_rows_and_counts_those_it_validates(node: Node) -> None:
    node.feed(1, 100, 5, validates=True, call=1)
    node.feed(2, 0, 3, validation=1, call=1)
    before = node.queue.status()
    rows = ValidationRows(node.queue).next_pass()
    assert rows is not None
    next(rows)
    while_validating = node.queue.status()
    assert [(one.waits_for_rows, one.validated) for one in (before, while_validating)] == [(False, 0), (False, 5)]
    list(rows)
    list(ValidationRows(node.queue).next_pass() or ())
    assert (node.queue.status().validated, node.queue.status().rows_out) == (10, 0)


def test_enough_drops_the_waiting_and_coming_rows_of_the_call(node: Node) -> None:
    node.feed(1, 0, 4, replays=2, call=1)
    assert node.take() == [0, 1, 2, 3]
    node.queue.enough()
    node.begin(2, call=1)
    assert [(done.feed, done.enough) for done in node.told] == [(1, False), (1, True), (2, True)]
    node.rows(2, 0, 9)
    node.queue.end(FeedEnds(2, 9, 0))
    node.feed(3, 7, 2, call=2)
    assert node.take() == [7, 8]


def test_enough_of_a_pass_keeps_the_rows_of_the_next_call(node: Node) -> None:
    node.feed(1, 0, 4, call=1)
    node.take()
    node.feed(2, 7, 2, replays=1, call=2)
    node.queue.enough_of_pass()
    assert [(done.feed, done.enough) for done in node.told] == [(1, False), (1, True)]
    assert [node.take(), node.take()] == [[7, 8], [7, 8]]


def test_enough_ends_a_dataset_that_waits_for_rows(node: Node) -> None:
    node.begin(1, call=1)
    node.rows(1, 0, 3)
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.extend(node.take()))
    thread.start()
    with node.queue._changed:
        assert node.queue._changed.wait_for(lambda: node.queue.begun and not node.queue._rows[1]._queue, SECONDS)
    node.queue.enough()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert taken == [0, 1, 2]


def test_enough_without_a_feed_has_no_effect(node: Node) -> None:
    node.queue.enough()
    node.feed(1, 0, 2, call=1)
    assert node.take() == [0, 1]
    node.queue.enough()
    node.queue.enough()
    assert [done.enough for done in node.told] == [False, True]


def test_a_batch_is_done_when_the_next_one_is_requested(node: Node) -> None:
    node.feed(1, 0, 2, call=1, batch=7)
    node.feed(2, 2, 2, call=1, batch=8)
    assert node.queue.next_batch(-1) == 7
    assert (node.take(), node.queue.batch, node.told) == ([0, 1], 7, [])
    assert node.queue.next_batch(-1) == 8
    assert [done.feed for done in node.told] == [1]
    assert node.take() == [2, 3]
    node.queue.enough()
    assert [(done.feed, done.enough) for done in node.told] == [(1, False), (2, False), (2, True)]


def test_an_interrupted_batch_is_not_done(node: Node) -> None:
    node.begin(1, call=1, batch=0)
    node.rows(1, 0, 2)
    assert node.queue.next_batch(-1) == 0
    rows = node.queue.next_pass()
    assert rows is not None
    next(rows)
    node.queue.enough()
    assert list(rows) == []
    assert node.queue.next_batch(-1) is None
    assert [done.enough for done in node.told] == [True]


def test_batches_in_the_state_are_skipped(node: Node) -> None:
    for batch in range(3):
        node.feed(batch + 1, 10 * batch, 2, call=1, batch=batch, consecutive=True)
    assert node.queue.next_batch(1) == 2
    assert [done.feed for done in node.told] == [1, 2]
    assert node.take() == [20, 21]


@pytest.mark.parametrize(("after", "consecutive", "refused"), [(3, True, True), (4, True, False), (3, False, False)])
def test_a_gap_between_the_state_and_the_stream_is_refused(
    node: Node, after: int, consecutive: bool, refused: bool
) -> None:
    node.feed(1, 0, 2, call=1, batch=5, consecutive=consecutive)
    if refused:
        with pytest.raises(FeedFailed, match="batches up to 3, but the stream's checkpoint continues with 5"):
            node.queue.next_batch(after)
    else:
        assert node.queue.next_batch(after) == 5


def test_an_empty_batch_is_given_out_once_the_schema_is_known(node: Node) -> None:
    node.feed(1, 0, 0, call=1, batch=0)
    assert [done.feed for done in node.told] == [1]  # no dataset could be made of it yet
    node.feed(2, 5, 1, call=1, batch=1)
    node.feed(3, 0, 0, call=1, batch=2)
    assert node.queue.next_batch(-1) == 1
    assert node.take() == [5]
    assert node.queue.next_batch(-1) == 2
    assert node.take() == []


def test_rows_that_are_not_from_a_stream_have_no_batches(node: Node) -> None:
    node.feed(1, 0, 2, call=1)
    with pytest.raises(FeedFailed, match="these rows do not come from a stream"):
        node.queue.next_batch(-1)
    assert node.queue.batch is None


def test_an_endless_stream_does_not_accumulate_feeds(node: Node) -> None:
    for batch in range(60):
        node.feed(batch + 1, batch, 2, call=1, batch=batch, consecutive=True)
        assert node.queue.next_batch(-1) == batch
        assert node.take() == [batch, batch + 1]
    assert len(node.queue._rows) < 20
    assert node.queue.status().rows_in == node.queue.status().rows_out == 120


def test_collecting_a_pass_while_the_driver_is_notified_does_not_deadlock(tmp_path: Path) -> None:
    told: list[Any] = []

    def tell(message: Any) -> None:
        told.append(message)
        kept.clear()  # drops the last reference to a half-read pass

    queue = RowQueue("worker:0", str(tmp_path), 1 << 20, 1 << 20, tell)
    queue.begin(FeedBegins(1, 1, False, call=1))
    queue.feed_rows(1).accept(0, ((0, 5),), block_of(0, 5))
    rows = queue.next_pass()
    assert rows is not None
    next(rows)
    kept = [rows]
    del rows
    over = threading.Event()
    threading.Thread(target=lambda: (queue.enough(), over.set()), daemon=True).start()
    assert over.wait(SECONDS)
    assert [(done.number, done.enough) for done in told] == [(0, True), (1, False)]
    queue.stop()


def test_other_feeds_continue_while_the_driver_is_notified(tmp_path: Path) -> None:
    telling, go_on = threading.Event(), threading.Event()

    def tell(message: Any) -> None:
        telling.set()
        go_on.wait(SECONDS)

    queue = RowQueue("worker:0", str(tmp_path), 1 << 20, 1 << 20, tell)
    queue.begin(FeedBegins(1, 1, False, call=1))
    threading.Thread(target=queue.enough, daemon=True).start()
    assert telling.wait(SECONDS)
    queue.begin(FeedBegins(2, 1, False, call=2))
    queue.feed_rows(2).accept(0, ((0, 5),), block_of(0, 5))
    queue.end(FeedEnds(2, 5, 0))
    assert queue.status().rows_in == 5
    rows = queue.next_pass()
    assert rows is not None
    assert next(rows).num_rows == 5
    go_on.set()
    queue.stop()


def test_a_repeated_pass_is_done_as_soon_as_its_rows_have_arrived(node: Node) -> None:
    """The worker ahead waits for more rows and the one behind for a step; neither may block the driver."""
    node.feed(1, 0, 10, validates=True)
    node.feed(2, 0, 5, replays=1)
    node.queue.repeat()
    node.feed(3, 5, 7)
    node.queue.repeat()
    assert node.told == [PassDone("worker:0", 2, 2, 5), PassDone("worker:0", 3, 1, 7)]
