"""Rows in shared memory: one process writes them, another reads them in place, and unused blocks are free."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from tests.conftest import ENVIRONMENT
from tests.runtime.feed.test_transfer import batch_of, cut, driver_of, ids_of_partition, send
from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.feed import feed_task
from tfos_nb.runtime.feed.shared_memory import BLOCK_BYTES, BlockPool, BlockWriter, Written
from tfos_nb.runtime.feed.transfer import FeedTicket, _Chunk


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    pool = BlockPool(2 * BLOCK_BYTES)
    yield pool
    pool.close()


def all_free(pool: BlockPool) -> int:
    blocks = []
    while (block := pool.take()) >= 0:
        blocks.append(block)
    for block in blocks:
        pool.give_back(block)
    return len(blocks)


def test_rows_of_another_process_are_read_in_place(pool: BlockPool) -> None:
    block = pool.take()
    script = f"""
        import numpy as np, pyarrow as pa
        from tfos_nb.runtime.feed.shared_memory import BlockWriter, PoolPlace
        batch = pa.RecordBatch.from_pydict({{"id": np.arange(1000), "name": [f"row {{i}}" for i in range(1000)]}})
        written = BlockWriter({pool.place!r}).write({block}, batch.slice(100, 800))
        print(written.first, written.size)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    batch = pool.lend(block, Written(*map(int, ended.stdout.split())))
    assert batch.to_pydict() == {"id": list(range(100, 900)), "name": [f"row {i}" for i in range(100, 900)]}
    memory = np.frombuffer(pool._memory, np.uint8)
    first = memory.__array_interface__["data"][0] + block * BLOCK_BYTES
    assert all(
        first <= buffer.address < first + BLOCK_BYTES
        for column in batch.columns
        for buffer in column.buffers()
        if buffer is not None
    )


def test_a_block_is_free_when_the_last_view_of_it_is_deleted(pool: BlockPool) -> None:
    count = all_free(pool)
    block = pool.take()
    written = BlockWriter(pool.place).write(block, batch_of([1, 2, 3]))
    assert written is not None
    batch = pool.lend(block, written)
    numbers = batch.column("id").to_numpy()
    del batch
    gc.collect()
    assert all_free(pool) == count - 1
    assert numbers.tolist() == [1, 2, 3]
    del numbers
    gc.collect()
    assert all_free(pool) == count


def test_take_returns_no_block_when_all_are_in_use(pool: BlockPool) -> None:
    taken = [pool.take() for _ in range(all_free(pool))]
    assert len(set(taken)) == len(taken)
    assert pool.take() == -1
    pool.give_back(taken[3])
    assert pool.take() == taken[3]


def test_rows_too_large_for_a_block_do_not_overwrite_the_next_block(pool: BlockPool) -> None:
    writer = BlockWriter(pool.place)
    first, second = sorted((pool.take(), pool.take()))
    written = writer.write(second, batch_of([7]))
    assert written is not None
    assert writer.write(first, pa.RecordBatch.from_pydict({"x": np.zeros(BLOCK_BYTES, np.int8)})) is None
    assert pool.lend(second, written).column("id").to_pylist() == [7]


def test_later_batches_align_the_largest_buffer_so_that_tensorflow_need_not_copy_it(pool: BlockPool) -> None:
    writer = BlockWriter(pool.place)
    for rows in (100, 100, 101, 101):
        x = pa.array([[float(number)] * 30 for number in range(rows)], pa.list_(pa.float32()))
        batch = pa.RecordBatch.from_pydict({"id": range(rows), "x": x, "name": [f"row {n}" for n in range(rows)]})
        block = pool.take()
        written = writer.write(block, batch)
        assert written is not None
        lent = pool.lend(block, written)
        assert lent.equals(batch)
        aligned = lent.column("x").flatten().buffers()[1].address % 64 == 0
    assert aligned


def test_memory_of_an_unintended_process_is_not_opened_for_writing(pool: BlockPool) -> None:
    assert BlockWriter.open(None) is None
    assert BlockWriter.open(replace(pool.place, inode=pool.place.inode + 1)) is None
    assert BlockWriter.open(replace(pool.place, descriptor=9999)) is None
    assert BlockWriter.open(replace(pool.place, pid=2**22 + 1)) is None
    assert BlockWriter.open(pool.place) is not None


def test_on_one_host_every_row_is_sent_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    lent = []
    lend = BlockPool.lend
    monkeypatch.setattr(
        BlockPool,
        "lend",
        lambda self, block, written: (batch := lend(self, block, written), lent.append(batch.num_rows))[0],
    )
    ids = ids_of_partition(0, 5000)
    with driver_of(2, buffer_bytes=1 << 30) as driver:
        feed = driver.begin()
        assert send(driver, feed, cut(ids, (700, 900))) == 5000
        driver.read()
        driver.finish(feed)
        driver.await_readers()
        assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == ids
    assert sum(lent) == 5000


@pytest.mark.parametrize("hidden", [BlockPool, BlockWriter], ids=["no such memory here", "another container"])
def test_without_blocks_every_row_is_sent_over_the_socket(
    monkeypatch: pytest.MonkeyPatch, hidden: type[BlockPool] | type[BlockWriter]
) -> None:
    def refuse(*args: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(hidden, "__init__", refuse)
    monkeypatch.setattr(BlockPool, "lend", refuse)
    ids = ids_of_partition(0, 3000)
    with driver_of(2) as driver:
        feed = driver.begin()
        assert send(driver, feed, cut(ids, (700, 900))) == 3000
        driver.read()
        driver.finish(feed)
        driver.await_readers()
        assert sorted(row for node in driver.nodes.values() for row in node.seen[0]) == ids


def test_rows_that_main_keeps_are_never_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are never returned; when none is left, the rows are sent over the socket."""
    monkeypatch.setattr(feed_task, "PIECE_BYTES", 1000)
    ids = ids_of_partition(0, 4000)
    with driver_of(1) as driver:
        passes = driver.nodes["worker:0"].passes
        feed = driver.begin()
        send(driver, feed, cut(ids, ()))
        driver.finish(feed)
        blocks = passes.next_pass()
        assert blocks is not None
        kept = list(blocks)
        assert len(kept) > 20  # the pool has five blocks for a queue of 1 MiB
        assert [row for batch in kept for row in batch.column("id").to_pylist()] == ids


def test_a_block_that_was_not_granted_is_refused() -> None:
    with driver_of(1) as driver:
        feed = driver.begin()
        place = driver.places["worker:0"]
        client = flight.FlightClient(f"grpc+unix://{place.socket}")
        headers = flight.FlightCallOptions(headers=[(b"tfos-token", driver.address.token.encode())])
        descriptor = flight.FlightDescriptor.for_command(wire.encode(FeedTicket(feed.number, 0)))
        schema = batch_of([1]).schema
        writer, _ = client.do_put(descriptor, schema, headers)
        nothing = pa.RecordBatch.from_pylist([], schema=schema)
        with pytest.raises(pa.ArrowException, match="bytes 0 to 100 of block 4 were not granted"):
            chunk = _Chunk(((0, 1),), (0, 0), (0, 0), block=4, size=100, spent=True)
            writer.write_with_metadata(nothing, wire.encode(chunk))
            writer.done_writing()
            writer.close()
        client.close()
        assert os.path.exists(place.socket)
        assert send(driver, feed, cut(ids_of_partition(1, 10), ()), partition=1) == 10


def test_a_block_without_rows_is_an_error_and_is_freed(pool: BlockPool) -> None:
    """The end of a block's data is not the end of the sender's stream."""
    writer = BlockWriter(pool.place)
    block = pool.take()
    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), pa.schema([("id", pa.int64())])):
        pass
    empty = sink.getvalue().to_pybytes()
    writer._memory[block * BLOCK_BYTES : block * BLOCK_BYTES + len(empty)] = empty
    with pytest.raises(FeedFailed, match=f"block {block} of shared memory without rows"):
        pool.lend(block, Written(0, len(empty)))
    gc.collect()
    assert pool.take() == block
