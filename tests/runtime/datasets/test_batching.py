"""Workers cut their rows into batches: all do the same number of steps, and no row is left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfos_nb.runtime.datasets.batching import Batches, Cutter, parts_of, steps_of_pass
from tfos_nb.runtime.feed.passes import Division, Shares


def cut(division: Division, shares: Shares, *, streamed: bool, pieces: list[int], whole: bool = False) -> list[int]:
    """Return the batch sizes of one worker whose rows arrive in these pieces and then the rest."""
    cutter = Cutter(division, None if streamed else shares, whole)
    sizes, left = [], shares.own
    for piece in pieces:
        piece = min(piece, left)
        sizes += cutter.more(piece)
        left -= piece
    sizes += cutter.more(left)
    return [*sizes, *cutter.end(shares)]


def cut_by_all(rows: int, batch: int, workers: int, *, streamed: bool, pieces: list[int]) -> list[list[int]]:
    """Return the batch sizes of all workers; their shares differ by at most one row."""
    own = [rows * (worker + 1) // workers - rows * worker // workers for worker in range(workers)]
    return [
        cut(
            Division(batch, worker, workers),
            Shares(own[worker], rows, max(own)),
            streamed=streamed,
            pieces=pieces,
        )
        for worker in range(workers)
    ]


any_rows = st.integers(1, 3000)
any_batch = st.integers(1, 200)
any_workers = st.integers(1, 9)
any_pieces = st.lists(st.integers(1, 300), max_size=20)


@given(any_rows, any_batch, any_workers, st.booleans(), any_pieces)
def test_all_workers_do_the_same_number_of_steps_and_use_every_row(
    rows: int, batch: int, workers: int, streamed: bool, pieces: list[int]
) -> None:
    sizes = cut_by_all(rows, batch, workers, streamed=streamed, pieces=pieces)
    assert sum(map(sum, sizes)) == rows
    assert all(size >= 1 for of_worker in sizes for size in of_worker)
    steps = max(map(len, sizes))
    last = rows % batch or batch  # rows in the last step of a single process
    if rows >= workers * steps and (last >= workers or not streamed):  # no step needs a placeholder row
        assert {len(of_worker) for of_worker in sizes} == {steps}


@given(any_rows, any_batch, any_workers, any_pieces)
def test_a_streamed_pass_has_at_most_one_step_more_than_a_single_process(
    rows: int, batch: int, workers: int, pieces: list[int]
) -> None:
    sizes = cut_by_all(rows, batch, workers, streamed=True, pieces=pieces)
    assert max(map(len, sizes)) <= -(-rows // max(batch, workers)) + 1


@given(any_rows, any_batch, any_workers, any_pieces)
def test_the_batches_of_a_counted_pass_differ_by_at_most_one_row(
    rows: int, batch: int, workers: int, pieces: list[int]
) -> None:
    sizes = cut_by_all(rows, batch, workers, streamed=False, pieces=pieces)
    assert max(map(len, sizes)) == min(-(-rows // batch), -(-rows // workers))
    everything = [size for of_worker in sizes for size in of_worker]
    assert max(everything) - min(everything) <= 1


@given(any_rows, any_batch, any_workers, any_pieces)
def test_no_batch_of_a_streamed_pass_is_much_larger_than_requested(
    rows: int, batch: int, workers: int, pieces: list[int]
) -> None:
    largest = max(1, -(-batch // workers))
    sizes = cut_by_all(rows, batch, workers, streamed=True, pieces=pieces)
    assert all(size <= 2 * largest for of_worker in sizes for size in of_worker)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=6), any_batch, st.booleans(), any_pieces)
def test_workers_with_very_different_shares_lose_no_row(
    own: list[int], batch: int, streamed: bool, pieces: list[int]
) -> None:
    steps = set()
    for worker, rows in enumerate(own):
        division, shares = Division(batch, worker, len(own)), Shares(rows, sum(own), max(own))
        sizes = cut(division, shares, streamed=streamed, pieces=pieces)
        assert sum(sizes) == rows
        steps.add(steps_of_pass(shares, division, streamed=streamed))
        assert len(sizes) <= steps_of_pass(shares, division, streamed=streamed)
    assert len(steps) == 1


@given(any_rows, any_batch, st.integers(1, 4), st.booleans(), any_pieces)
def test_the_replicas_of_a_worker_share_its_rows_in_each_step(
    rows: int, batch: int, replicas: int, streamed: bool, pieces: list[int]
) -> None:
    sizes = cut(Division(batch, replicas=replicas), Shares(rows, rows, rows), streamed=streamed, pieces=pieces)
    assert sum(sizes) == rows
    assert all(size >= 1 for size in sizes)


@given(any_rows, any_batch, any_workers, st.booleans(), any_pieces)
def test_a_pass_of_whole_steps_has_the_same_batches_on_every_worker(
    rows: int, batch: int, workers: int, streamed: bool, pieces: list[int]
) -> None:
    batch *= workers
    for worker in range(workers):
        own = rows * (worker + 1) // workers - rows * worker // workers
        sizes = cut(
            Division(batch, worker, workers),
            Shares(own, rows, -(-rows // workers)),
            streamed=streamed,
            pieces=pieces,
            whole=True,
        )
        assert sizes == [batch // workers] * (rows // batch)


@pytest.mark.parametrize(
    ("rows", "batch", "sizes"),
    [
        (64, 64, [[32], [32]]),
        (37, 37, [[18], [19]]),
        (3, 3, [[1], [2]]),
        (1, 8, [[], [1]]),
        (100, 32, [[12, 13, 12, 13], [12, 13, 12, 13]]),
    ],
    ids=str,
)
def test_a_partial_batch_is_one_step(rows: int, batch: int, sizes: list[list[int]]) -> None:
    for streamed in (True, False):
        cut_sizes = cut_by_all(rows, batch, 2, streamed=streamed, pieces=[])
        assert [sorted(one) for one in cut_sizes] == [sorted(one) for one in sizes] or streamed
        assert [len(one) for one in cut_sizes] == [len(one) for one in sizes]


@given(any_rows, any_batch, any_pieces)
def test_without_a_strategy_batches_have_the_requested_size(rows: int, batch: int, pieces: list[int]) -> None:
    cutter, left, sizes = Batches(batch), rows, []
    for piece in pieces:
        piece = min(piece, left)
        sizes += cutter.more(piece)
        left -= piece
    sizes += [*cutter.more(left), *cutter.end(None)]
    assert sizes == [batch] * (rows // batch) + ([rows % batch] if rows % batch else [])


def test_parts_without_rows_are_left_out() -> None:
    assert parts_of(2, 5) == [1, 1]
    assert parts_of(0, 3) == []
