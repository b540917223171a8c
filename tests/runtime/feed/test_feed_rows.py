"""A node's share of a feed: bounded in memory, kept on disk for later passes, and senders never block forever."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.waiting import until
from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control.reports import FeedStatus
from tfos_nb.runtime.feed.feed_rows import Superseded
from tfos_nb.runtime.feed.messages import FeedBegins, FeedEnds, FeedSchema, MakeRoom, PassDone, Reached
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.feed.spill import Spill

SECONDS = 20.0


def batch_of(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": pa.array(range(start, start + count), pa.int64())})


def ids_of(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.column("id").to_pylist()]


class Box:
    """A row queue with its announcements; threads started through it are cleaned up."""

    def __init__(self, directory: Path, buffer_bytes: int = 1 << 20, spill_bytes: int = 1 << 20) -> None:
        self.told: list[PassDone] = []
        self.passes = RowQueue("worker:0", str(directory), buffer_bytes, spill_bytes, self.told.append)
        self.threads: list[threading.Thread] = []

    def begin(self, feed: int = 1, passes: int = 1) -> None:
        self.passes.begin(FeedBegins(feed, passes, passes > 1))

    def accept(self, partition: int, start: int, count: int, feed: int = 1) -> None:
        self.passes.feed_rows(feed).accept(partition, ((start, start + count),), batch_of(start, count))

    def start(self, work: Callable[..., object], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        self.threads.append(thread)
        return thread

    def end(self, rows: int, replays: int = 0, feed: int = 1) -> None:
        self.passes.end(FeedEnds(feed, rows, replays))

    def next_ids(self) -> list[int] | None:
        blocks = self.passes.next_pass()
        return None if blocks is None else ids_of(blocks)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Box]]:
    boxes: list[Box] = []

    def build(**limits: int) -> Box:
        boxes.append(Box(tmp_path, **limits))
        return boxes[-1]

    yield build
    for box in boxes:
        box.passes.stop()
        for thread in box.threads:
            thread.join(SECONDS)
            assert not thread.is_alive()


def ended(thread: threading.Thread) -> bool:
    thread.join(SECONDS)
    return not thread.is_alive()


def test_the_passes_come_in_order_and_are_reported_when_done(make: Callable[..., Box]) -> None:
    box = make()
    box.begin(passes=3)
    box.accept(0, 0, 5)
    box.accept(1, 0, 3)
    box.end(8, replays=2)
    box.passes.close()
    assert [box.next_ids() for _ in range(4)] == [[0, 1, 2, 3, 4, 0, 1, 2]] * 3 + [None]
    assert box.told == [PassDone("worker:0", 1, number, 8) for number in (1, 2, 3)]
    assert box.passes.rows_out == 24


def test_a_second_feed_follows_the_first(make: Callable[..., Box]) -> None:
    box = make()
    for feed in (1, 2):
        box.begin(feed, passes=2)
        box.accept(0, 10 * feed, 2, feed)
        box.end(2, 1, feed)
    box.passes.close()
    assert [box.next_ids() for _ in range(5)] == [[10, 11], [10, 11], [20, 21], [20, 21], None]


def test_repeated_rows_and_rows_of_an_earlier_attempt_are_refused(make: Callable[..., Box]) -> None:
    """A sender skips rows that the node already has; an attempt that Spark cancelled may still send."""
    box = make()
    box.begin()
    feed = box.passes.feed_rows(1)
    box.accept(0, 0, 5)
    box.accept(0, 64, 2)  # a later piece: the rows between belong to another node
    with pytest.raises(FeedFailed, match=r"rows \(\(3, 8\),\) of partition 0 came again: those before 66 are here"):
        box.accept(0, 3, 5)
    assert feed.open(0, 7).reached.row == 66
    for attempt in (0, 6):
        with pytest.raises(Superseded, match=f"attempt 7 sends the rows of partition 0; attempt {attempt} must"):
            feed.accept(0, ((70, 72),), batch_of(70, 2), attempt=attempt)
    with pytest.raises(Superseded, match="attempt 6 must wait"):
        feed.open(0, 6)
    feed.leave(0, 6)
    with pytest.raises(Superseded):
        feed.open(0, 6)
    feed.leave(0, 7)
    assert feed.open(0, 6).attempt == 6, "the later one's stream has ended"
    assert feed.open(0, 7).attempt == 7
    feed.accept(0, ((70, 72),), batch_of(70, 2), attempt=7)
    box.end(9)
    assert box.next_ids() == [0, 1, 2, 3, 4, 64, 65, 70, 71]


def test_every_batch_must_continue_the_fingerprint_of_the_rows_before_it(make: Callable[..., Box]) -> None:
    box = make()
    box.begin()
    feed = box.passes.feed_rows(1)
    feed.open(0, 1)
    feed.accept(0, ((0, 4),), batch_of(0, 4), attempt=1, follows=(0, 0), known=(4, 7))
    for follows in ((4, 8), (3, 7), (0, 0)):
        with pytest.raises(FeedFailed, match="of partition 0 do not follow the 4 rows that are here"):
            feed.accept(0, ((4, 6),), batch_of(4, 2), attempt=1, follows=follows, known=(6, 9))
    feed.accept(0, ((4, 6),), batch_of(4, 2), attempt=1, follows=(4, 7), known=(6, 9))
    feed.open(0, 2)
    with pytest.raises(FeedFailed, match="do not follow the 6 rows"):
        feed.accept(0, ((6, 8),), batch_of(6, 2), attempt=2, follows=(6, 8), known=(8, 1))
    feed.accept(0, ((6, 8),), batch_of(6, 2), attempt=2, follows=(0, 0), known=(2, 3))  # it did not read the first 6
    with pytest.raises(FeedFailed, match="do not follow the 2 rows"):
        feed.accept(0, ((8, 9),), batch_of(8, 1), attempt=2, follows=(0, 0), known=(1, 4))
    feed.accept(0, ((8, 9),), batch_of(8, 1), attempt=2, follows=(2, 3), known=(3, 4))
    box.end(9)
    assert box.next_ids() == list(range(9))


def test_make_room_raises_the_buffer_limit(make: Callable[..., Box]) -> None:
    """The rows of another node, which this one waits for, come after them."""
    box = make(buffer_bytes=100)
    box.begin()
    sender = box.start(lambda: [box.accept(0, start, 10) for start in range(0, 100, 10)])
    assert until(lambda: box.passes.status().rows_in == 10)
    box.passes.make_room(MakeRoom(7))  # this node replaced another one and was never told of feed 7
    box.passes.make_room(MakeRoom(1))
    assert ended(sender)
    assert box.passes.status().queued_bytes == 800


def test_a_batch_may_contain_several_pieces(make: Callable[..., Box]) -> None:
    box = make()
    box.begin()
    feed = box.passes.feed_rows(1)
    feed.accept(0, ((0, 2), (64, 67)), batch_of(0, 5), known=(5, 7))
    assert feed.lane(0).reached == Reached(67, 5, 7)
    feed.accept(0, ((67, 70), (128, 130)), batch_of(5, 5), known=(10, 8))
    assert [feed.reached(count)[0] for count in (1, 2, 4, 6, 9)] == [{0: 1}, {0: 2}, {0: 66}, {0: 68}, {0: 129}]
    box.end(10)
    assert box.next_ids() == list(range(10))


@pytest.mark.parametrize("spans", [(), ((0, 4),), ((0, 3), (3, 5)), ((3, 5), (0, 3)), ((0, 2), (4, 8))])
def test_rows_that_do_not_match_their_announced_spans_are_refused(
    make: Callable[..., Box], spans: tuple[tuple[int, int], ...]
) -> None:
    box = make()
    box.begin()
    with pytest.raises(FeedFailed, match="must be 0 or more and ascend|were announced, and 5 came"):
        box.passes.feed_rows(1).accept(0, spans, batch_of(0, 5))
    assert box.passes.feed_rows(1).rows_in == 0


@pytest.mark.parametrize(("partition", "start"), [(0, -1), (0, -5), (-1, 0)])
def test_a_row_number_that_no_partition_has_is_refused(make: Callable[..., Box], partition: int, start: int) -> None:
    """Such a row used to be mistaken for a repeated one, and the rows after it for others."""
    box = make()
    box.begin()
    with pytest.raises(FeedFailed, match=rf"of partition {partition} must .* got \(\({start}, {start + 5}\),\)"):
        box.accept(partition, start, 5)
    box.accept(0, 0, 2)
    box.end(2)
    assert box.next_ids() == [0, 1]


def test_an_empty_share_is_an_empty_pass(make: Callable[..., Box]) -> None:
    box = make()
    box.begin(passes=2)
    box.end(0, replays=1)
    assert [box.next_ids(), box.next_ids()] == [[], []]
    assert box.told == [PassDone("worker:0", 1, 1, 0), PassDone("worker:0", 1, 2, 0)]


def test_a_full_buffer_blocks_the_sender_until_rows_are_taken(make: Callable[..., Box]) -> None:
    box = make(buffer_bytes=100)
    box.begin()
    box.accept(0, 0, 10)  # 80 bytes
    blocked = box.start(box.accept, 0, 10, 10)
    feed = box.passes.feed_rows(1)
    assert until(lambda: feed.lane(0).lock.locked())
    blocked.join(0.2)
    assert blocked.is_alive()
    assert (feed.rows_in, feed.queued_bytes) == (10, 80)
    assert box.passes.status() == FeedStatus(10, 0, 80, waits_for_rows=False)
    blocks = box.passes.next_pass()
    assert blocks is not None
    assert ids_of([next(blocks)]) == list(range(10))
    assert ended(blocked)
    assert ids_of([next(blocks)]) == list(range(10, 20))
    assert box.passes.status() == FeedStatus(20, 20, 0, waits_for_rows=True)


def test_a_batch_bigger_than_the_buffer_is_accepted(make: Callable[..., Box]) -> None:
    box = make(buffer_bytes=1)
    box.begin()
    sender = box.start(lambda: [box.accept(0, start, 10) for start in range(0, 100, 10)])
    blocks = box.passes.next_pass()
    assert blocks is not None
    taken = ids_of(next(blocks) for _ in range(10))
    assert taken == list(range(100))
    assert ended(sender)


def test_a_pass_abandoned_halfway_unblocks_its_senders_and_is_kept_whole(make: Callable[..., Box]) -> None:
    box = make(buffer_bytes=1)
    box.begin(passes=2)
    sender = box.start(lambda: [box.accept(0, start, 10) for start in range(0, 100, 10)])
    blocks = box.passes.next_pass()
    assert blocks is not None
    next(blocks)
    blocks.close()  # as when a TensorFlow iterator is deleted
    assert ended(sender)
    box.end(100, replays=1)
    assert box.told == [PassDone("worker:0", 1, 1, 10)]
    assert box.next_ids() == list(range(100))
    assert box.told[1:] == [PassDone("worker:0", 1, 2, 100)]


@pytest.mark.parametrize("waiting", ["schema", "next_pass", "first_pass"])
def test_stop_wakes_all_waiting_threads(make: Callable[..., Box], waiting: str) -> None:
    box = make()
    if waiting == "first_pass":
        box.begin()
        waiter = box.start(box.next_ids)
    else:
        waiter = box.start(getattr(box.passes, waiting))
    never = threading.Event()
    never.wait(0.05)
    box.passes.stop()
    assert ended(waiter)


def test_stop_unblocks_a_blocked_sender(make: Callable[..., Box]) -> None:
    box = make(buffer_bytes=1)
    box.begin()
    box.accept(0, 0, 1)
    blocked = box.start(box.accept, 0, 1, 1)
    box.passes.stop()
    assert ended(blocked)
    assert box.passes.next_pass() is None


def test_close_returns_the_waiting_rows_and_then_nothing(make: Callable[..., Box]) -> None:
    box = make()
    box.begin()
    box.accept(0, 0, 2)
    box.end(2)
    box.passes.close()
    assert box.next_ids() == [0, 1]
    assert box.next_ids() is None
    assert box.passes.schema() is None


def test_the_schema_is_known_before_the_first_row(make: Callable[..., Box]) -> None:
    box = make()
    found: list[FeedSchema | None] = []
    waiter = box.start(lambda: found.append(box.passes.schema()))
    box.passes.describe(FeedSchema(1, b"s", {}))
    assert ended(waiter)
    assert found == [FeedSchema(1, b"s", {})]


def test_a_sender_waits_for_the_announcement_of_its_feed(make: Callable[..., Box]) -> None:
    box = make()
    sender = box.start(box.accept, 0, 0, 3)
    box.begin()
    assert ended(sender)
    box.end(3)
    assert box.next_ids() == [0, 1, 2]


def test_a_share_of_a_different_size_than_announced_is_an_error(make: Callable[..., Box]) -> None:
    box = make()
    box.begin()
    box.accept(0, 0, 3)
    box.end(4)
    with pytest.raises(FeedFailed, match="3 rows came in feed 1, but 4 were sent"):
        box.next_ids()


def test_a_feed_that_is_never_announced_is_an_error(make: Callable[..., Box], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfos_nb.runtime.feed.row_queue.ANNOUNCED_WITHIN", 0.05)
    with pytest.raises(FeedFailed, match="did not announce feed 7 to worker:0"):
        make().passes.feed_rows(7)


def test_the_spill_has_no_name_while_it_is_used(make: Callable[..., Box], tmp_path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("without /proc the file keeps its name until it is closed")
    box = make()
    box.begin(passes=2)
    box.accept(0, 0, 100)
    assert list(tmp_path.iterdir()) == []
    assert len(spills_open(tmp_path)) == 1
    box.end(100, replays=1)
    assert [len(box.next_ids() or ()), len(box.next_ids() or ())] == [100, 100]
    gc.collect()
    assert spills_open(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def spills_open(directory: Path) -> list[str]:
    """Return the spill files that this process has open or mapped."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:  # of the listing itself
            continue
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [name for name in {*links, *mapped} if name.startswith(f"{directory}/tfos_nb-spill-")]


def test_a_spill_without_replays_is_freed_at_once(make: Callable[..., Box], tmp_path: Path) -> None:
    box = make()
    box.begin(passes=2)
    box.accept(0, 0, 100)
    box.end(100, replays=0)  # another node could not keep its rows
    assert spills_open(tmp_path) == []
    assert box.next_ids() == list(range(100))


@pytest.mark.parametrize("made", [0, 1, 2])
def test_passes_that_have_not_begun_can_be_cancelled(make: Callable[..., Box], tmp_path: Path, made: int) -> None:
    box = make()
    box.begin(passes=4)
    box.accept(0, 0, 100)
    box.end(100, replays=3)
    for _ in range(made):
        assert box.next_ids() == list(range(100))
    left = max(0, made - 1)
    box.end(100, replays=left)
    box.begin(feed=2)
    box.accept(0, 0, 10, feed=2)
    box.end(10, feed=2)
    assert (spills_open(tmp_path) == []) is (made > 0), "nobody reads them again"
    if made == 0:
        assert box.next_ids() == list(range(100))
    assert box.next_ids() == list(range(10))
    assert spills_open(tmp_path) == []


def test_rows_of_a_replay_stay_readable_after_the_spill_is_closed(make: Callable[..., Box], tmp_path: Path) -> None:
    box = make()
    box.begin(passes=2)
    for start in range(0, 1000, 100):
        box.accept(0, start, 100)
    box.end(1000, replays=1)
    box.passes.next_pass()
    blocks = box.passes.next_pass()
    assert blocks is not None
    kept = list(blocks)
    assert ids_of(kept) == list(range(1000))
    kept.clear()
    gc.collect()
    assert spills_open(tmp_path) == []


def test_a_spill_over_its_limit_stops_but_the_pass_continues(make: Callable[..., Box], tmp_path: Path) -> None:
    box = make(spill_bytes=100)
    box.begin(passes=2)
    box.accept(0, 0, 10)
    spill = box.passes.feed_rows(1).spill
    assert spill is not None
    assert spill.whole
    box.accept(0, 10, 10)
    assert not spill.whole
    box.accept(0, 20, 10)
    box.end(30, replays=0)
    assert box.next_ids() == list(range(30))
    assert spills_open(tmp_path) == []


def test_a_replay_of_rows_that_were_not_kept_is_an_error(make: Callable[..., Box]) -> None:
    box = make(spill_bytes=1)
    box.begin(passes=2)
    box.accept(0, 0, 10)
    box.end(10, replays=1)
    box.next_ids()
    with pytest.raises(FeedFailed, match="rows of feed 1 were not kept"):
        box.next_ids()


def test_writing_after_the_seal_does_not_change_the_rows_that_are_read(tmp_path: Path) -> None:
    spill = Spill(str(tmp_path), 1 << 20)
    spill.write(batch_of(0, 10))
    spill.seal()
    reading = spill.batches()
    first = next(reading)
    spill.write(batch_of(10, 10))
    assert ids_of([first, *reading]) == list(range(10))
    spill.close()
    spill.close()


def test_a_full_disk_ends_the_spill_but_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    monkeypatch.setattr(Spill, "_create", lambda spill: setattr(spill, "_path", "/dev/full"))
    spill = Spill(str(tmp_path), 1 << 20)
    spill.write(batch_of(0, 1_000_000))
    assert not spill.whole
    spill.write(batch_of(0, 1))
    spill.close()


def test_a_spill_that_cannot_create_its_file_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spill = Spill(str(tmp_path / "gone"), 1 << 20)
    spill.write(batch_of(0, 10))
    assert not spill.whole
    assert "No such file or directory" in caplog.text
    assert "Spark will read them again" in caplog.text
    spill.close()


def test_a_spill_may_be_closed_while_it_is_read_and_is_empty_afterwards(tmp_path: Path) -> None:
    spill = Spill(str(tmp_path), 1 << 20)
    spill.write(batch_of(0, 10))
    spill.seal()
    before, number = spill.batches(), spill._fd
    spill.close()
    with open(__file__, "rb") as other:
        assert other.fileno() == number, "another file has the number now"
        assert ids_of(list(before)) == list(range(10))
        assert list(spill.batches()) == []
        spill.close()
        assert other.read(1), "and is not closed with it"


def test_writing_into_a_replays_memory_does_not_change_the_file(tmp_path: Path) -> None:
    spill = Spill(str(tmp_path), 1 << 20)
    spill.write(pa.RecordBatch.from_pydict({"x": pa.array([1.0, 2.0])}))
    spill.seal()
    for _ in range(2):
        (batch,) = spill.batches()
        assert batch.column(0).to_pylist() == [1.0, 2.0]
        ctypes.memset(batch.column(0).buffers()[1].address, 0, 16)
        assert batch.column(0).to_pylist() == [0.0, 0.0]
    spill.close()
