"""Which rows the first batches of a pass contain, for any blocks, shuffling and batch sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfos_nb.runtime.datasets.dataset import Blocks, CutBlocks
from tfos_nb.runtime.feed.messages import PassPosition
from tfos_nb.runtime.feed.pass_record import PassRecord
from tfos_nb.runtime.feed.passes import Cut, Division, Pass, Readers, Shares
from tfos_nb.runtime.rows.columns import columns_of

COLUMNS = tuple(columns_of(pa.schema([("id", pa.int64())]), {}).values())


class OnePass:
    """The rows 0, 1, 2 … in blocks."""

    def __init__(self, blocks: list[int], known: bool, position: PassPosition | None = None) -> None:
        self.record = PassRecord(position.batches if position is not None else 0)
        ends = np.cumsum([0, *blocks])
        parts = [pa.record_batch({"id": np.arange(*pair)}) for pair in itertools.pairwise(ends)]
        rows, ended = int(ends[-1]), iter([known, True])
        shares = lambda: Shares(rows, 2 * rows, rows) if position is not None or next(ended) else None
        self.rows = Pass(iter(parts), shares, self.record, number=1, position=position)

    def next_pass(self, readers: Readers | None = None) -> Pass:
        return self.rows


@settings(deadline=None)
@given(
    blocks=st.lists(st.integers(1, 20), max_size=8),
    shuffle=st.integers(0, 25),
    batch=st.integers(1, 12),
    known=st.booleans(),
    together=st.booleans(),
    stops=st.lists(st.integers(0, 100), max_size=4),
)
def test_a_state_contains_exactly_the_rows_of_the_first_batches(
    blocks: list[int], shuffle: int, batch: int, known: bool, together: bool, stops: list[int]
) -> None:
    source = OnePass(blocks, known)
    cut = Cut(batch, division=Division(batch, 0, 2) if together else None)
    given_out: list[list[int]] = []
    generator = iter(CutBlocks(Blocks(source, COLUMNS, {}, lambda error: None), cut, shuffle, 1)())
    for stop in sorted(stops):
        while len(given_out) < stop and (element := next(generator, None)) is not None:
            ends = np.cumsum(element["tfos_nb sizes"])[:-1]
            given_out += [part.tolist() for part in np.split(element["id"], ends)]
        trained = [one for part in given_out[:stop] for one in part]
        rows = source.record.rows_after(stop)
        assert rows == len(trained)
        end, others = source.record.first(rows)
        assert sorted(set(range(end)) - set(others.tolist())) == sorted(trained)
        assert others.tolist() == sorted(others.tolist())
    for _ in generator:
        pass
    if together or blocks:
        assert source.record.steps is not None


@settings(deadline=None)
@given(
    blocks=st.lists(st.integers(1, 20), max_size=8),
    shuffle=st.integers(0, 25),
    cut=st.builds(
        Cut,
        st.integers(1, 12),
        st.booleans(),
        st.none() | st.builds(Division, st.integers(2, 12), st.integers(0, 1), st.just(2)),
    ),
    known=st.booleans(),
    stops=st.lists(st.integers(1, 12), max_size=3),
)
def test_a_pass_goes_on_behind_a_state_with_the_same_batches(
    blocks: list[int], shuffle: int, cut: Cut, known: bool, stops: list[int]
) -> None:
    np.random.seed(1)
    whole = list(batches_of(OnePass(blocks, known), cut, shuffle))
    position, done = None, 0
    for stop in stops:
        source = OnePass(blocks, known, position)
        np.random.seed(1 if position is None else 2)
        taken = [*itertools.islice(batches_of(source, cut, shuffle), stop)]
        assert taken == whole[done : done + stop]
        before = source.record.rows_after(stop)
        assert before == sum(map(len, taken))
        end, others = source.record.first(before)
        done += len(taken)
        trained = {row for batch in whole[:done] for row in batch}
        assert set(range(end)) - set(others.tolist()) == trained, "with those of the state before"
        if len(taken) < stop:
            break
        position = source.record.position(before)
        assert position is not None
        assert position.batches == done
    if position is not None:
        source = OnePass(blocks, known, position)
        assert list(batches_of(source, cut, shuffle)) == whole[position.batches :]
        assert source.record.steps == len(whole) - position.batches or cut.division is not None


def batches_of(source: OnePass, cut: Cut, shuffle: int) -> Iterator[list[int]]:
    """Yield the batches one by one; the order is by the generator of NumPy, from which the seed of a pass is drawn."""
    for element in CutBlocks(Blocks(source, COLUMNS, {}, lambda error: None), cut, shuffle)():
        ends = np.cumsum(element["tfos_nb sizes"])[:-1]
        yield from (part.tolist() for part in np.split(element["id"], ends))


def test_a_state_cannot_contain_rows_that_were_not_given_out() -> None:
    record = PassRecord()
    record.shuffle()
    record.came(4)
    record.given_out(np.array([3, 2, 1, 0]), 3)
    with pytest.raises(ValueError, match=r"rows must be between 0 \(.*\) and 3 \(.*\), got 4"):
        record.first(4)
    assert _plain(record.first(2)) == (4, [0, 1])
    with pytest.raises(ValueError, match=r"rows must be between 2 \(.*\), got 1"):
        record.first(1)


def _plain(found: tuple[int, Any]) -> tuple[int, list[int]]:
    return found[0], found[1].tolist()
