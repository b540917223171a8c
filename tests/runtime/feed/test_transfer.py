"""No row is repeated or lost: real senders, a real door and real Flight servers, while attempts die.

The nodes run in this process (a dataset would read their passes). So do the tasks, except for the one that is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.conftest import ENVIRONMENT
from tfos_nb.driver.feed_controller import Feed, FeedController
from tfos_nb.driver.membership.machine import Membership
from tfos_nb.driver.membership.members import Member
from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import Door, DoorAddress, DoorClient, Link
from tfos_nb.runtime.control.identity import SERVER_NAME
from tfos_nb.runtime.control.lifecycle import FeedPlace, Reservation
from tfos_nb.runtime.control.plan import ClusterPlan, Node
from tfos_nb.runtime.feed import feed_task, messages
from tfos_nb.runtime.feed.feed_task import FeedTask, _send_partition
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.feed.transfer import FeedServer, FeedTicket, FewerRows, NodeHungUp, NodeStream
from tfos_nb.runtime.rows.fingerprint import Fingerprint
from tfos_nb.runtime.rows.spans import Spans

SECONDS = 60.0
attempt_numbers = itertools.count(1)  # as Spark counts them
PARTITION_STEP = 100_000  # ids of partition p begin at p * PARTITION_STEP


# --- a driver, nodes and tasks --------------------------------------------------------------------


class NodeInside:
    """One node: its passes, its server, and a reader that goes through every pass as a dataset would."""

    def __init__(
        self, name: str, root: Path, token: str, limits: dict[str, int], tell: Callable[[Any], object]
    ) -> None:
        directory = root / name.replace(":", "-")
        directory.mkdir()
        self.passes = RowQueue(
            name, str(directory), limits.get("buffer_bytes", 1 << 20), limits.get("spill_bytes", 1 << 30), tell
        )
        self.server = FeedServer(self.passes, directory=str(directory), host="127.0.0.1", token=token)
        self.seen: list[list[int]] = []
        self.error: Exception | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)

    def read(self) -> None:
        self._reader.start()

    def _read(self) -> None:
        try:
            while (blocks := self.passes.next_pass()) is not None:
                self.seen.append([number for block in blocks for number in block.column("id").to_pylist()])
        except FeedFailed as error:
            self.error = error

    def await_reader(self) -> None:
        self._reader.join(SECONDS)
        assert not self._reader.is_alive(), "the reader waits for ever"

    def hear(self, message: Any) -> None:
        heard = {
            messages.FeedBegins: self.passes.begin,
            messages.FeedSchema: self.passes.describe,
            messages.FeedEnds: self.passes.end,
            messages.NoMoreFeeds: lambda _: self.passes.close(),
        }
        heard[type(message)](wire.decode(wire.encode(message)))


class Driver:
    """The door with the real FeedController, and the nodes that connect to it."""

    def __init__(self, root: Path, nodes: int, **limits: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        membership = self.membership = Membership(ClusterPlan(nodes))
        self.controller = FeedController(self.changed, membership, self.send)
        self.door = Door(self, host="127.0.0.1", bind="127.0.0.1")
        self.address = self.door.open()
        self.nodes = {
            name: NodeInside(name, root, self.address.token, limits, self.controller.pass_done)
            for name in membership.present.fed_names
        }
        self.places = membership.feed_places
        self.places.update((name, node.server.place) for name, node in self.nodes.items())

    def arrived(self, link: Link, message: Any) -> None: ...

    def received(self, link: Link, message: Any) -> None: ...

    def left(self, link: Link) -> None: ...

    def ticked(self, late: float) -> None: ...

    def asked(self, message: Any) -> Any:
        return self.controller.asked(message)

    def send(self, message: Any, nodes: Iterable[str]) -> None:
        for name in nodes:
            self.nodes[name].hear(message)

    def begin(self, epochs: int = 1) -> Feed:
        return self.controller.begin(epochs, epochs > 1, 1, epochs)

    def finish(self, feed: Feed) -> int:
        """End the feed as the driver does; return the number of replays."""
        replays = feed.passes - 1 if feed.spill and feed.ledger.spilled else 0
        self.controller.end(feed, replays)
        self.controller.close("done")
        return replays

    def read(self) -> None:
        for node in self.nodes.values():
            node.read()

    def await_readers(self) -> None:
        for node in self.nodes.values():
            node.await_reader()

    def close(self) -> None:
        for node in self.nodes.values():
            node.passes.stop()
            node.server.close()
        self.door.close()


@contextmanager
def driver_of(nodes: int, **limits: int) -> Iterator[Driver]:
    with tempfile.TemporaryDirectory(prefix="feed-") as root:
        driver = Driver(Path(root), nodes, **limits)
        try:
            yield driver
        finally:
            driver.close()


def ids_of_partition(partition: int, rows: int) -> list[int]:
    return list(range(partition * PARTITION_STEP, partition * PARTITION_STEP + rows))


def batch_of(ids: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array(ids, pa.int64()),
            "x": pa.array([[float(number), 0.5] for number in ids], pa.list_(pa.float32())),
            "name": pa.array([f"row {number}" for number in ids]),
        }
    )


def cut(ids: list[int], sizes: Iterable[int]) -> Iterator[pa.RecordBatch]:
    """Cut rows into batches of these sizes in turn (0 is allowed), and the rest into one batch."""
    start = 0
    for size in sizes:
        if start >= len(ids):
            return
        yield batch_of(ids[start : start + size])
        start += size
    if start < len(ids):
        yield batch_of(ids[start:])


class Died(Exception):
    """The error that ends an attempt in these tests."""


@dataclass(frozen=True)
class Attempt:
    """How one attempt reads its partition, and whether it dies before a batch, before its report, or never."""

    sizes: tuple[int, ...] = ()
    dies_before_batch: int | None = None
    dies_before_done: bool = False

    def batches(self, ids: list[int]) -> Iterator[pa.RecordBatch]:
        number = -1
        for number, batch in enumerate(cut(ids, self.sizes)):
            if number == self.dies_before_batch:
                raise Died
            yield batch
        if self.dies_before_batch is not None and self.dies_before_batch > number:
            raise Died  # everything was sent, nothing acknowledged


class DyingClient(DoorClient):
    """The door's client of a task that dies after the nodes acknowledged all rows but before the driver knows."""

    def ask(self, question: Any, timeout: float = 30.0) -> Any:
        if isinstance(question, messages.PartitionDone):
            raise Died
        return super().ask(question, timeout)


@dataclass
class Partition:
    """A partition of the DataFrame and the attempts that Spark makes for it."""

    rows: int
    attempts: list[Attempt] = field(default_factory=list)
    at_once: bool = False  # speculative attempts instead of consecutive ones

    def run(self, number: int, task: FeedTask) -> None:
        if self.at_once and self.attempts:
            with ThreadPoolExecutor(len(self.attempts)) as pool:
                alive = list(pool.map(lambda attempt: self._try(attempt, number, task), self.attempts))
        else:
            alive = [self._try(attempt, number, task) for attempt in self.attempts]
        if not any(alive):
            assert self._try(Attempt(), number, task)

    def _try(self, attempt: Attempt, number: int, task: FeedTask) -> bool:
        client = DyingClient if attempt.dies_before_done else DoorClient
        batches = attempt.batches(ids_of_partition(number, self.rows))
        with client(task.door) as door:
            try:
                _send_partition(task, number, next(attempt_numbers), batches, door)
            except Died:
                return False
            except NodeHungUp as error:
                assert "when a newer attempt of Spark's took over" in str(error)  # noqa: PT017 - Spark runs it again
                return False
        return True


attempts = st.builds(
    Attempt,
    sizes=st.lists(st.integers(0, 150), max_size=6).map(tuple),
    dies_before_batch=st.none() | st.integers(0, 7),
    dies_before_done=st.booleans(),
)
partitions = st.builds(
    Partition, rows=st.integers(0, 500), attempts=st.lists(attempts, max_size=3), at_once=st.booleans()
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=st.lists(partitions, max_size=4),
    nodes=st.integers(1, 3),
    epochs=st.integers(1, 3),
    buffer_bytes=st.sampled_from([1, 3000, 1 << 20]),
    slots=st.integers(1, 3),
)
def test_every_row_arrives_once_in_every_pass_despite_failed_attempts(
    plan: list[Partition], nodes: int, epochs: int, buffer_bytes: int, slots: int
) -> None:
    with driver_of(nodes, buffer_bytes=buffer_bytes) as driver:
        feed = driver.begin(epochs)
        driver.read()
        task = FeedTask(feed.number, driver.address)
        with ThreadPoolExecutor(slots) as pool:
            for done in [pool.submit(partition.run, number, task) for number, partition in enumerate(plan)]:
                done.result(SECONDS)
        assert driver.finish(feed) == epochs - 1
        driver.await_readers()

        assert [node.error for node in driver.nodes.values()] == [None] * nodes
        assert feed.error is None
        assert feed.ledger.rows == sum(partition.rows for partition in plan)
        assert feed.ledger.partitions_done == sum(partition.rows > 0 for partition in plan)
        expected = [
            number for index, partition in enumerate(plan) for number in ids_of_partition(index, partition.rows)
        ]
        for number in range(epochs):
            assert sorted(row for node in driver.nodes.values() for row in node.seen[number]) == expected
        for name, node in driver.nodes.items():
            assert len(node.seen) == epochs
            assert node.seen[1:] == node.seen[:1] * (epochs - 1)
            assert len(node.seen[0]) == feed.ledger.shares()[name] == node.passes.feed_rows(feed.number).rows_in
            assert feed.passes_done[name] == epochs


# --- errors in retried partitions -----------------------------------------------------------------


def send(driver: Driver, feed: Feed, batches: Iterable[pa.RecordBatch], partition: int = 0) -> int:
    with DoorClient(driver.address) as door:
        return _send_partition(FeedTask(feed.number, driver.address), partition, next(attempt_numbers), batches, door)


def dying_after(ids: list[int], *sizes: int) -> Iterator[pa.RecordBatch]:
    yield from cut(ids, sizes)
    raise Died


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_retry_with_different_rows_is_refused(nodes: int) -> None:
    ids = ids_of_partition(0, 200)
    with driver_of(nodes) as driver:
        feed = driver.begin()
        with pytest.raises(Died):
            send(driver, feed, dying_after(ids[:150]))
        with pytest.raises(
            FeedFailed, match=r"partition 0 gave other rows when Spark ran it again: the first \d+.*[Cc]ache"
        ):
            send(driver, feed, cut(ids[::-1], (70, 70)))
        assert feed.ledger.partitions_done == 0
        assert send(driver, feed, cut(ids, (1, 2, 3))) == 200  # the same rows are still accepted
        driver.read()
        driver.finish(feed)
        driver.await_readers()
        assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == ids


def test_a_retry_with_fewer_rows_is_refused() -> None:
    ids = ids_of_partition(0, 100)
    with driver_of(1) as driver:
        feed = driver.begin()
        with pytest.raises(Died):
            send(driver, feed, dying_after(ids))
        with pytest.raises(
            FeedFailed, match="partition 0 gave fewer rows when Spark ran it again: worker:0 has row 100"
        ):
            send(driver, feed, cut(ids[:60], (20,)))
        assert feed.ledger.partitions_done == 0


def test_an_attempt_with_truncated_input_leaves_the_partition_to_the_next_attempt() -> None:
    ids = ids_of_partition(0, 500)
    with driver_of(2) as driver:
        feed = driver.begin()
        for end in (200, 90):  # PySpark ends the input of a cancelled task as if it were complete
            with contextlib.suppress(FewerRows):
                list(FeedTask(feed.number, driver.address)(cut(ids[:end], (70,))))
        assert feed.error is None
        assert feed.ledger.rows == 200
        assert send(driver, feed, cut(ids, (30, 100))) == 500
        assert feed.ledger.rows == 500
        driver.read()
        driver.finish(feed)
        driver.await_readers()
        assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == ids


def test_a_task_fails_if_a_node_has_fewer_rows_than_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with driver_of(1) as driver:
        feed = driver.begin()
        intake = driver.nodes["worker:0"].passes.feed_rows(feed.number)
        monkeypatch.setattr(intake, "accept", lambda *chunk, **known: None)  # no real node does this: it loses the rows
        with pytest.raises(FeedFailed, match="worker:0 has 0 rows of partition 0, but 10 were sent"):
            send(driver, feed, cut(ids_of_partition(0, 10), ()))
        assert feed.ledger.partitions_done == 0


def test_a_speculative_task_for_a_finished_partition_sends_nothing() -> None:
    ids = ids_of_partition(0, 300)
    with driver_of(2) as driver:
        feed = driver.begin()
        assert send(driver, feed, cut(ids, (100,))) == 300
        shares = feed.ledger.shares()
        taken: list[int] = []
        send(driver, feed, (taken.append(batch.num_rows) or batch for batch in cut(ids, (7, 100))))
        assert sum(taken) == 300  # Spark's task still reads all its input
        assert feed.ledger.shares() == shares
        assert (feed.ledger.rows, feed.ledger.partitions_done) == (300, 1)
        assert sum(node.passes.feed_rows(feed.number).rows_in for node in driver.nodes.values()) == 300


def test_an_overtaken_speculative_task_ends_without_an_error() -> None:
    ids = ids_of_partition(0, 300)
    with driver_of(2) as driver:
        feed = driver.begin()
        driver.read()
        begun, overtaken = threading.Event(), threading.Event()

        def slowly() -> Iterator[pa.RecordBatch]:
            yield batch_of(ids[:50])
            begun.set()
            assert overtaken.wait(SECONDS)
            yield batch_of(ids[50:])

        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(lambda: list(FeedTask(feed.number, driver.address)(slowly())))
            assert begun.wait(SECONDS)
            assert send(driver, feed, cut(ids, ())) == 300
            overtaken.set()
            rows = pa.Table.from_batches(slow.result(SECONDS))
            assert rows.to_pylist() == [{"partition": 0, "rows": 300}]
        driver.finish(feed)
        driver.await_readers()
        assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == ids


def test_a_task_killed_halfway_leaves_no_missing_and_no_repeated_rows() -> None:
    ids = ids_of_partition(0, 400)
    script = """
        import sys, threading
        from tests.runtime.feed.test_transfer import FeedTask, DoorClient, _send_partition, batch_of, ids_of_partition
        from tfos_nb.runtime.control.door import DoorAddress
        address = DoorAddress("127.0.0.1", int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3])
        def batches():
            for start in range(0, 200, 40):
                yield batch_of(ids_of_partition(0, 400)[start:start + 40])
            print("sent", flush=True)
            threading.Event().wait()
        with DoorClient(address) as door:
            _send_partition(FeedTask(1, address), 0, 0, batches(), door)
    """
    with driver_of(2) as driver:
        feed = driver.begin(2)
        driver.read()
        address = driver.address
        task = subprocess.Popen(
            [
                sys.executable,
                "-c",
                textwrap.dedent(script),
                str(address.port),
                address.certificate.decode(),
                address.token,
            ],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
        )
        assert task.stdout is not None
        with task.stdout:
            assert task.stdout.readline() == b"sent\n"
            os.kill(task.pid, signal.SIGKILL)
            assert task.wait() == -signal.SIGKILL
        assert send(driver, feed, cut(ids, (33, 33, 33, 200))) == 400
        driver.finish(feed)
        driver.await_readers()
        for number in range(2):
            assert sorted(row for node in driver.nodes.values() for row in node.seen[number]) == ids


def test_a_task_that_sends_rows_does_not_import_pandas(tmp_path: Path) -> None:
    """It would take half a second of each new worker of Spark's, and Spark's collector 20 ms of each task."""
    rows = tmp_path / "rows"
    with pa.OSFile(str(rows), "wb") as file, pa.ipc.new_stream(file, batch_of([1]).schema) as stream:
        for batch in cut(ids_of_partition(0, 400), (100, 100)):
            stream.write_batch(batch)
    script = """
        import sys
        import pyarrow as pa
        from tfos_nb.runtime.control.door import DoorAddress
        from tfos_nb.runtime.feed.feed_task import FeedTask
        address = DoorAddress("127.0.0.1", int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3])
        (told,) = FeedTask(1, address)(pa.ipc.open_stream(sys.argv[4]))
        print(told.to_pydict(), "pandas" in sys.modules)
    """
    with driver_of(2) as driver:
        feed = driver.begin(2)
        driver.read()
        address = driver.address
        arguments = str(address.port), address.certificate.decode(), address.token, str(rows)
        command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
        ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS)
        assert ended.stdout == "{'partition': [0], 'rows': [400]} False\n", ended.stderr
        driver.finish(feed)
        driver.await_readers()


# --- memory, disk, and nodes that need no more rows -----------------------------------------------


def test_a_full_node_makes_the_task_wait_until_rows_are_read() -> None:
    ids = ids_of_partition(0, 20_000)
    with driver_of(1, buffer_bytes=1000) as driver:
        feed = driver.begin()
        node = driver.nodes["worker:0"]
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send, driver, feed, cut(ids, [200] * 100))
            blocked = threading.Event()
            while not node.passes.status().queued_bytes:
                blocked.wait(0.01)
            blocked.wait(0.3)
            assert not sent.done()
            assert node.passes.status().rows_in <= 400  # one batch waits in the queue, one with its sender
            driver.read()
            assert sent.result(SECONDS) == 20_000
        driver.finish(feed)
        driver.await_readers()
        assert node.seen == [ids]


def test_nothing_is_replayed_if_a_node_exceeds_its_spill_limit() -> None:
    ids = ids_of_partition(0, 500)
    with driver_of(2, spill_bytes=2000) as driver:
        feed = driver.begin(3)
        driver.read()
        send(driver, feed, cut(ids, (100, 100)))
        assert not feed.ledger.spilled
        assert driver.finish(feed) == 0
        driver.await_readers()
        assert all(len(node.seen) == 1 and node.error is None for node in driver.nodes.values())
        assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == ids


def test_a_node_that_needs_no_more_rows_lets_the_task_finish() -> None:
    ids = ids_of_partition(0, 5000)
    with driver_of(1, buffer_bytes=1) as driver:
        feed = driver.begin(2)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send, driver, feed, cut(ids, [100] * 50))
            blocks = driver.nodes["worker:0"].passes.next_pass()
            assert blocks is not None
            next(blocks)
            blocks.close()  # model.stop_training, take(1): the iterator is deleted
            assert sent.result(SECONDS) == 5000
        driver.read()
        driver.finish(feed)
        driver.await_readers()
        assert driver.nodes["worker:0"].seen == [ids]  # the second pass is complete


def test_a_batch_bigger_than_a_message_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_task, "PIECE_BYTES", 1000)
    ids = ids_of_partition(0, 3000)
    with driver_of(1) as driver:
        feed = driver.begin()
        send(driver, feed, [batch_of(ids)])
        blocks = driver.nodes["worker:0"].passes.next_pass()
        driver.finish(feed)
        assert blocks is not None
        sizes = [block.num_rows for block in blocks]
        assert sum(sizes) == 3000
        assert max(sizes) * batch_of(ids).nbytes / 3000 <= 1000


def sent_pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Spans]]:
    """Record every piece that a task sends: the node, and the rows of the partition in it."""
    pieces: list[tuple[str, Spans]] = []
    write = NodeStream.write

    def noted(stream: NodeStream, spans: Spans, rows: pa.RecordBatch) -> None:
        pieces.append((stream.node, spans))
        write(stream, spans, rows)

    monkeypatch.setattr(NodeStream, "write", noted)
    return pieces


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_pieces_for_one_node_are_sent_together(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    monkeypatch.setattr(feed_task, "_WAIT", 60.0)
    pieces = sent_pieces(monkeypatch)
    ids = ids_of_partition(0, 5000)
    with driver_of(nodes, buffer_bytes=1 << 30) as driver:
        feed = driver.begin()
        assert send(driver, feed, cut(ids, [7] * 1000)) == 5000
        driver.read()
        driver.finish(feed)
        driver.await_readers()
        assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == ids
    assert sum(end - start for _, spans in pieces[:nodes] for start, end in spans) == 7  # the first batch, sent at once
    assert sorted(node for node, _ in pieces[nodes:]) == sorted(driver.nodes)


def test_the_bytes_that_wait_to_be_sent_are_limited_over_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_task, "_WAIT", 60.0)
    monkeypatch.setattr(feed_task, "_MOST_BYTES", 1000 * batch_of([0]).nbytes)
    pieces = sent_pieces(monkeypatch)
    with driver_of(3, buffer_bytes=1 << 30) as driver:
        assert send(driver, driver.begin(), cut(ids_of_partition(0, 5000), [100] * 49)) == 5000
    waited = [sum(end - start for _, spans in pieces[i : i + 3] for start, end in spans) for i in range(len(pieces))]
    assert max(waited) < 1300
    assert len(pieces) < 25


def test_the_size_of_a_send_follows_the_bytes_of_the_newest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pictures are empty: judging by the first batch, a million rows could wait."""
    monkeypatch.setattr(feed_task, "_WAIT", 60.0)
    monkeypatch.setattr(feed_task, "_ENOUGH_BYTES", 100_000)
    pieces = sent_pieces(monkeypatch)
    empty = pa.RecordBatch.from_pydict({"id": range(100), "picture": [b""] * 100})
    large = [
        pa.RecordBatch.from_pydict({"id": range(start, start + 10), "picture": [bytes(10_000)] * 10})
        for start in range(100, 600, 10)
    ]
    with driver_of(2, buffer_bytes=1 << 30) as driver:
        feed = driver.begin()
        assert send(driver, feed, [empty, *large]) == 600
        driver.read()
        driver.finish(feed)
        driver.await_readers()
        assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == list(range(600))
    assert max(sum(end - start for start, end in spans) for _, spans in pieces[2:]) < 20


def in_step(driver: Driver, rows: int) -> list[int]:
    """Read one row from each node in turn, as nodes that train in step do; return the rows."""
    blocks = {name: node.passes.next_pass() for name, node in driver.nodes.items()}
    left: dict[str, list[int]] = {name: [] for name in blocks}
    seen: list[int] = []
    while len(seen) < rows:
        for name, coming in blocks.items():
            if not left[name] and coming is not None:
                left[name] = next((block.column("id").to_pylist() for block in coming), [])
            seen += left[name][:1]
            del left[name][:1]
    return seen


@pytest.mark.parametrize("partitions", [1, 3])
def test_nodes_that_wait_for_each_other_are_fed_with_small_buffers(
    monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """A full node must not stop a task from sending rows to the node that it waits for."""
    monkeypatch.setattr(feed_task, "PIECE_BYTES", 1000)
    ids = [ids_of_partition(partition, 9000) for partition in range(partitions)]
    with driver_of(2, buffer_bytes=2000 * partitions) as driver, ThreadPoolExecutor(partitions + 1) as threads:
        feed = driver.begin()
        sent = [threads.submit(send, driver, feed, cut(ids[one], [100] * 90), one) for one in range(partitions)]
        came = threads.submit(in_step, driver, sum(map(len, ids)) - 1000)
        try:
            assert sorted(came.result(SECONDS)) == sorted({*came.result(SECONDS)})
        finally:
            for node in driver.nodes.values():
                node.passes.stop()  # releases everything that waits
        assert [one.result(SECONDS) for one in sent] == [9000] * partitions


def test_rows_that_arrive_slowly_are_sent_as_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that waits for rows must not also wait for the rest of a segment."""
    monkeypatch.setattr(feed_task, "_WAIT", 0.0)
    pieces = sent_pieces(monkeypatch)
    with driver_of(1) as driver:
        feed = driver.begin()
        assert send(driver, feed, cut(ids_of_partition(0, 30), [10, 10, 10])) == 30
    assert [spans for _, spans in pieces] == [((0, 10),), ((10, 20),), ((20, 30),)]


def move_away(driver: Driver, *nodes: str) -> None:
    """Make nodes appear to be on another host: their sockets do not exist here."""
    for name in nodes:
        place = driver.places[name]
        driver.places[name] = FeedPlace("/nowhere", place.host, place.port, place.certificate)


def test_a_node_on_the_same_host_is_preferred_but_all_get_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are held back for the node on the other host; meanwhile the near node is ahead."""
    monkeypatch.setattr(feed_task, "_WAIT", 0.0)
    ids = ids_of_partition(0, 1001)
    with driver_of(2, buffer_bytes=1 << 30) as driver:
        move_away(driver, "worker:1")
        feed = driver.begin()
        counts: list[tuple[int, int]] = []

        def noted() -> Iterator[pa.RecordBatch]:
            for batch in cut(ids, [100] * 10):
                counts.append((feed.ledger.claimed["worker:0"], feed.ledger.claimed["worker:1"]))
                yield batch

        assert send(driver, feed, noted()) == 1001
        assert all(sum(both) == number * 80 for number, both in enumerate(counts))
        assert all(0 <= near - far <= number * 20 + 1 for number, (near, far) in enumerate(counts))
        assert counts[5] == (250, 150)
        driver.read()
        driver.finish(feed)
        driver.await_readers()
        seen = [node.seen[0] for node in driver.nodes.values()]
    assert sorted(row for one in seen for row in one) == ids
    assert {len(one) for one in seen} == {500, 501}


def test_the_rows_held_back_are_limited_to_what_a_node_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_task, "_WAIT", 0.0)
    monkeypatch.setattr(feed_task, "_HELD_BYTES", 50 * batch_of([0]).nbytes)
    asked: list[messages.ClaimRows] = []
    with driver_of(3, buffer_bytes=1 << 30) as driver:
        move_away(driver, "worker:0", "worker:2")
        feed = driver.begin()
        claim = feed.ledger.claim
        monkeypatch.setattr(feed.ledger, "claim", lambda question: asked.append(question) or claim(question))
        assert send(driver, feed, cut(ids_of_partition(0, 2000), [100] * 20)) == 2000
        shares = feed.ledger.shares()
    assert asked[0].held == 20
    assert 0 < max(question.held for question in asked) <= 50
    assert asked[-1].held == 0
    assert max(shares.values()) - min(shares.values()) <= 1


@pytest.mark.parametrize(
    "sizes", [[64], [37], [1, 1, 1], [90, 6], [64, 64], [2] * 30], ids=lambda sizes: " ".join(map(str, sizes))[:9]
)
@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("far", [False, True], ids=["one host", "two hosts"])
def test_the_shares_of_nodes_differ_by_at_most_one_row(sizes: list[int], nodes: int, far: bool) -> None:
    with driver_of(nodes) as driver, ThreadPoolExecutor(3) as slots:
        if far:
            move_away(driver, "worker:0")
        feed = driver.begin()
        tasks = [
            slots.submit(send, driver, feed, cut(ids_of_partition(number, rows), [5] * 9), number)
            for number, rows in enumerate(sizes)
        ]
        assert [task.result(SECONDS) for task in tasks] == sizes
        driver.read()
        driver.finish(feed)
        driver.await_readers()
        seen = [len(node.seen[0]) for node in driver.nodes.values()]
        ends = [node.passes.feed_rows(1).ended for node in driver.nodes.values()]
    assert sum(seen) == sum(sizes)
    assert max(seen) - min(seen) <= 1
    assert ends == [messages.FeedEnds(1, rows, 0, sum(seen), min(seen), max(seen)) for rows in seen]


# --- the task as Spark calls it -------------------------------------------------------------------


def test_a_feed_task_yields_the_number_of_rows_it_sent() -> None:
    with driver_of(2) as driver:
        feed = driver.begin()
        [summary] = FeedTask(feed.number, driver.address)(cut(ids_of_partition(0, 99), (0, 50, 0)))
        assert summary.to_pylist() == [{"partition": 0, "rows": 99}]
        again = driver.controller.begin(1, False, 2, 2)
        assert list(FeedTask(again.number, driver.address, rows=True)(iter([(1, 2.0), (3, 4.0)]))) == [(0, 2)]


def test_a_task_on_a_host_that_does_not_reach_all_nodes_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_task, "_SLOT_KEPT", 0.1)
    with driver_of(2) as driver:
        feed = driver.begin()
        send(driver, feed, cut(ids_of_partition(1, 7), ()), partition=1)
        here = Reservation("worker:0", "127.0.0.1", 1, "0", 0, 1)
        members = {name: Member(Node.parse(name), reservation=here) for name in driver.nodes}
        driver.membership.cut_links.cut([("worker:0", "worker:1")], members)
        with DoorClient(driver.address) as door:
            task = FeedTask(feed.number, driver.address)
            with pytest.raises(feed_task._SentElsewhere) as left:
                _send_partition(task, 0, next(attempt_numbers), cut(ids_of_partition(0, 9), ()), door)
            assert left.value.rows is None
            with pytest.raises(feed_task._SentElsewhere) as sent:
                _send_partition(task, 1, next(attempt_numbers), cut(ids_of_partition(1, 7), ()), door)
            assert sent.value.rows == 7, "another host has sent it"
        [summary] = FeedTask(feed.number, driver.address)(cut(ids_of_partition(0, 9), ()))
        assert summary.to_pylist() == [{"partition": 0, "rows": feed_task.ELSEWHERE}]
        assert feed.ledger.rows == 7


def test_a_task_that_sends_nothing_keeps_its_slot_while_others_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_task, "_SLOT_KEPT", 0.5)
    with driver_of(1) as driver, DoorClient(driver.address) as door:
        feed = driver.begin()
        since = time.monotonic()
        mover = threading.Timer(0.4, lambda: setattr(feed, "moved", feed.moved + 1))
        mover.start()
        feed_task._keep_slot(feed.number, door)
        assert 0.8 < time.monotonic() - since < SECONDS
        driver.controller.close_ledgers([feed])
        monkeypatch.setattr(feed_task, "_SLOT_KEPT", 1000.0)
        feed_task._keep_slot(feed.number, door)  # returns at once: the feed is over


def test_an_empty_partition_opens_no_stream() -> None:
    with driver_of(2) as driver:
        feed = driver.begin()
        [summary] = FeedTask(feed.number, driver.address)(iter([batch_of([])]))
        assert summary.to_pylist() == [{"partition": 0, "rows": 0}]
        assert not feed.schema
        assert feed.ledger.partitions_done == 0


def test_a_row_that_cannot_be_fed_is_reported_with_its_partition() -> None:
    with driver_of(1) as driver:
        feed = driver.begin()
        with pytest.raises(FeedFailed, match="row 1: 'four'"):
            list(FeedTask(feed.number, driver.address, rows=True)(iter([(1, 2), (3, "four")])))
        assert str(feed.error) == "partition 0: column '_2', row 1: 'four' is a str, not int64"


def test_a_node_that_accepts_no_rows_is_named_before_any_is_sent() -> None:
    with driver_of(2) as driver:
        feed = driver.begin()
        del driver.places["worker:1"]
        with pytest.raises(FeedFailed, match="no rows are taken by worker:1"):
            send(driver, feed, [batch_of([1])])


def test_rows_are_sent_over_tls_to_a_node_on_another_host() -> None:
    ids = ids_of_partition(0, 300)
    with driver_of(2) as driver:
        move_away(driver, *driver.nodes)
        feed = driver.begin()
        driver.read()
        assert send(driver, feed, cut(ids, (100,))) == 300
        driver.finish(feed)
        driver.await_readers()
        assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == ids


def stream_to(place: FeedPlace, *, near: bool, headers: list[tuple[bytes, bytes]], roots: bytes | None = None) -> None:
    if near:
        client = flight.FlightClient(f"grpc+unix://{place.socket}")
    else:
        roots = roots or place.certificate
        client = flight.FlightClient(
            f"grpc+tls://{place.host}:{place.port}", tls_root_certs=roots, override_hostname=SERVER_NAME
        )
    descriptor = flight.FlightDescriptor.for_command(wire.encode(FeedTicket(1, 0)))
    options = flight.FlightCallOptions(headers=headers, timeout=5.0)
    with client:
        writer, answers = client.do_put(descriptor, batch_of([]).schema, options)
        assert answers.read() is None
        writer.close()


@pytest.mark.parametrize("near", [True, False], ids=["unix socket", "TLS"])
@pytest.mark.parametrize(
    "headers", [[], [(b"tfos-token", b"")], [(b"tfos-token", b"0" * 64)]], ids=["no", "empty", "wrong"]
)
def test_a_node_accepts_no_rows_without_the_token(near: bool, headers: list[tuple[bytes, bytes]]) -> None:
    with driver_of(1) as driver:
        driver.begin()
        with pytest.raises(flight.FlightUnauthenticatedError, match="no valid token"):
            stream_to(driver.places["worker:0"], near=near, headers=headers)
        assert driver.nodes["worker:0"].passes.status().rows_in == 0


def test_a_task_sends_no_row_to_a_node_with_another_key() -> None:
    with driver_of(1) as driver:
        token = [(b"tfos-token", driver.address.token.encode())]
        other = driver.address.certificate
        with pytest.raises(flight.FlightUnavailableError):
            stream_to(driver.places["worker:0"], near=False, headers=token, roots=other)


def test_a_nodes_error_reaches_the_task() -> None:
    with driver_of(1) as driver:
        token = [(b"tfos-token", driver.address.token.encode())]
        node = driver.nodes["worker:0"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tfos_nb.runtime.feed.row_queue.ANNOUNCED_WITHIN", 0.05)
            with pytest.raises(pa.ArrowException, match="did not announce feed 1"):
                stream_to(node.server.place, near=True, headers=token)


maps = st.dictionaries(st.text(max_size=2), st.integers(0, 9), max_size=2)
structs = st.fixed_dictionaries({"a": st.integers(0, 9), "b": st.none() | st.text(max_size=2)})
cells = st.one_of(
    st.tuples(st.just(pa.int32()), st.integers(0, 9)),
    st.tuples(st.just(pa.timestamp("us")), st.integers(0, 9)),
    st.tuples(st.just(pa.decimal128(6, 2)), st.decimals(0, 9, places=2)),
    st.tuples(st.just(pa.binary()), st.binary(max_size=3)),
    st.tuples(st.just(pa.map_(pa.string(), pa.int32())), maps.map(dict.items).map(list)),
    st.tuples(st.just(pa.struct([("a", pa.int8()), ("b", pa.string())])), structs),
    st.tuples(st.just(pa.bool_()), st.booleans()),
    st.tuples(st.just(pa.string()), st.text(max_size=3)),
    st.tuples(st.just(pa.list_(pa.float32())), st.lists(st.integers(0, 9), max_size=3)),
    st.tuples(st.just(pa.list_(pa.bool_(), 2)), st.lists(st.booleans(), min_size=2, max_size=2)),
    st.tuples(
        st.just(pa.list_(pa.list_(pa.string()))), st.lists(st.lists(st.text(max_size=2), max_size=2), max_size=2)
    ),
)


@st.composite
def rows_of_any_type(draw: st.DrawFn) -> pa.RecordBatch:
    """Rows of several columns with some nulls, at different offsets in their buffers."""
    count = draw(st.integers(1, 10))
    columns = []
    for kind, value in draw(st.lists(cells, min_size=1, max_size=3)):
        values = draw(st.lists(st.sampled_from([value, value, None]), min_size=count, max_size=count))
        columns.append(pa.array([None, *values, value], kind).slice(1, count))
    return pa.RecordBatch.from_arrays(columns, [f"c{index}" for index in range(len(columns))])


def fingerprint_of(*batches: pa.RecordBatch) -> int:
    fingerprint = Fingerprint()
    for batch in batches:
        fingerprint.add(batch)
    return fingerprint.value


@settings(deadline=None, max_examples=100)
@given(rows_of_any_type(), st.data())
def test_a_fingerprint_depends_on_the_rows_and_their_order_not_on_the_batches(
    rows: pa.RecordBatch, data: st.DataObject
) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, rows.num_rows), max_size=3), label="cut"))
    parts = [rows.slice(start, end - start) for start, end in itertools.pairwise([0, *ends, rows.num_rows])]
    assert fingerprint_of(*parts) == fingerprint_of(rows)
    order = data.draw(st.permutations(range(rows.num_rows)), label="order")
    other = pa.Table.from_batches([rows]).take(order).combine_chunks()
    same = other.to_pylist() == rows.to_pylist()
    assert (fingerprint_of(*other.to_batches()) == fingerprint_of(rows)) == same


UNLIKE = (list(range(8)), [7, 6, 5, 4, 3, 2, 1, 0], False)


class Turns:
    """Makes attempts read their next batches in a given order, unless they wait for each other."""

    def __init__(self, order: list[int], patience: float) -> None:
        self._left, self._changed, self._patience = list(order), threading.Condition(), patience

    def batches(self, who: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with self._changed:
                self._changed.wait_for(lambda: not self._left or self._left[0] == who, self._patience)
                if self._left and self._left[0] == who:
                    self._left.pop(0)
                self._changed.notify_all()
            yield batch


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    orders=st.tuples(st.permutations(range(8)), st.permutations(range(8)), st.booleans()),
    sizes=st.tuples(st.lists(st.integers(1, 4), max_size=5), st.lists(st.integers(1, 4), max_size=5)),
    turns=st.lists(st.sampled_from([0, 1]), max_size=12),
    nodes=st.integers(1, 2),
    patience=st.just(0.03),
)
# The second attempt begins after the first has sent four or six rows, and ends first. Its rows differ or are equal.
@example(UNLIKE, ([4], [4]), [0, *[1] * 12], 1, 1.0)
@example(UNLIKE, ([3, 3], [2, 2, 2]), [0, 0, *[1] * 12], 2, 1.0)
@example((*UNLIKE[:2], True), ([4], [3, 3]), [0, *[1] * 12], 1, 1.0)
def test_two_attempts_at_once_deliver_each_row_once_or_are_refused(
    orders: tuple[list[int], list[int], bool],
    sizes: tuple[list[int], list[int]],
    turns: list[int],
    nodes: int,
    patience: float,
) -> None:
    """Their rows come in any order, as when Spark speculates on unordered input."""
    first, second, alike = orders
    with driver_of(nodes) as driver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_task, "_WAIT", 0.0)  # each batch is sent as it comes
        patch.setattr(feed_task, "_TURN_EVERY", 0.02)
        feed, order = driver.begin(), Turns(turns, patience)
        numbers = [next(attempt_numbers) for _ in range(2)]

        def attempt(who: int) -> Any:
            rows = cut((first, first if alike else second)[who], sizes[who])
            with DoorClient(driver.address) as door:
                task = FeedTask(feed.number, driver.address)
                try:
                    return _send_partition(task, 0, numbers[who], order.batches(who, rows), door)
                except (FeedFailed, pa.ArrowException) as error:
                    return error

        with ThreadPoolExecutor(2) as pool:
            done = list(pool.map(attempt, range(2), timeout=SECONDS))
        if alike:
            assert 8 in done, done
        if 8 in done:
            driver.read()
            driver.finish(feed)
            driver.await_readers()
            assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == list(range(8))
            assert [node.error for node in driver.nodes.values()] == [None] * nodes


@pytest.mark.parametrize("later", ["breaks off", "is silent", "is through"])
def test_an_overtaken_attempt_continues_when_the_later_one_stops_sending(
    later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark counts this as no failure: the same attempt may be overtaken any number of times."""
    monkeypatch.setattr("tfos_nb.runtime.feed.feed_rows._SILENT", 0.5)
    monkeypatch.setattr(feed_task, "_WAIT", 0.0)
    ids = ids_of_partition(0, 300)
    with driver_of(2) as driver, ThreadPoolExecutor(2) as pool:
        feed = driver.begin()
        driver.read()
        begun, overtaken, over = threading.Event(), threading.Event(), threading.Event()

        def earlier() -> Iterator[pa.RecordBatch]:
            yield batch_of(ids[:50])
            begun.set()
            assert overtaken.wait(SECONDS)
            yield batch_of(ids[50:170])
            yield batch_of(ids[170:])

        def sent_later() -> Iterator[pa.RecordBatch]:
            yield batch_of(ids[:60])
            yield batch_of(ids[60:100])
            overtaken.set()
            if later != "breaks off":
                over.wait(0.1 if later == "is through" else SECONDS)
                yield batch_of(ids[100:])

        slow = pool.submit(send, driver, feed, earlier())
        assert begun.wait(SECONDS)
        fast = pool.submit(send, driver, feed, sent_later())
        try:
            assert slow.result(SECONDS) == 300
        except NodeHungUp:  # its rows were in transit when the later attempt began: Spark runs it again
            assert later != "is through"
            assert send(driver, feed, cut(ids, ())) == 300
        over.set()
        assert fast.result(SECONDS) == (100 if later == "breaks off" else 300)
        assert feed.ledger.rows == 300
        driver.finish(feed)
        driver.await_readers()
        assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == ids


def test_a_feed_task_can_be_pickled_and_its_repr_hides_its_token() -> None:
    from pyspark import cloudpickle

    task = FeedTask(1, DoorAddress("h", 1, b"c", "secret"))
    assert cloudpickle.loads(cloudpickle.dumps(task)) == task
    assert "secret" not in repr(task)
