"""A node's rows on disk outlive its process, and no others stay there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tfos_nb.runtime.feed.kept_rows import KeptFiles, KeptRows
from tfos_nb.runtime.feed.spill import Spill


@pytest.fixture
def files(tmp_path: Path) -> Iterator[KeptFiles]:
    files = KeptFiles(str(tmp_path))
    yield files
    files.close()


def written(rows: KeptRows, feed: int, ids: list[int], limit: int = 1 << 20) -> Spill:
    spill = rows.new(feed, limit)
    assert spill is not None
    spill.write(pa.record_batch({"id": ids}), b"note %d" % feed)
    return spill


def ids_in(spill: Spill) -> list[int]:
    return [number for batch in spill.batches() for number in batch.column(0).to_pylist()]


def sizes(files: KeptFiles) -> list[bool]:
    return [os.stat(place).st_size > 0 for place in files.places[:2]]


def test_the_files_have_no_names(files: KeptFiles, tmp_path: Path) -> None:
    written(KeptRows(files.places), 1, [1]).seal()
    assert os.listdir(tmp_path) == []


def test_only_a_feed_of_which_all_rows_have_come_is_there_later(files: KeptFiles) -> None:
    rows = KeptRows(files.places)
    first = written(rows, 1, [1, 2])
    assert rows.feed == 0, "more rows may come"
    first.seal()
    rows.sealed(1)
    written(rows, 2, [3])  # the process ends before the others have come
    later = KeptRows(files.places)
    again = later.again(later.feed)
    assert (later.feed, ids_in(again), list(again.notes())) == (1, [1, 2], [b"note 1"])


def test_what_no_pass_reads_is_freed_except_the_newest_rows(files: KeptFiles) -> None:
    rows = KeptRows(files.places)
    first = written(rows, 1, [1, 2])
    first.seal()
    rows.sealed(1)
    first.close()
    rows.freed(1)
    assert sizes(files) == [True, False], "a state within its last pass may still be gone on from"
    second = written(rows, 2, [3, 4])
    assert sum(sizes(files)) == 1, "no more disk than for one feed"
    assert rows.feed == 0
    second.seal()
    rows.sealed(2)
    assert sum(sizes(files)) == 1
    later = KeptRows(files.places)
    assert (later.feed, ids_in(later.again(2))) == (2, [3, 4])


def test_a_directory_that_does_not_exist_keeps_nothing(tmp_path: Path) -> None:
    assert KeptFiles(str(tmp_path / "not there")).places == []


def test_rows_that_are_still_read_stay_until_then(files: KeptFiles) -> None:
    rows = KeptRows(files.places)
    first, second = written(rows, 1, [1, 2]), None
    first.seal()
    rows.sealed(1)
    second = written(rows, 2, [3])
    second.seal()
    rows.sealed(2)
    assert rows.new(3, 1 << 20) is None, "both files are in use"
    assert ids_in(first) == [1, 2]
    rows.freed(1)
    assert sizes(files) == [False, True]
    assert rows.new(3, 1 << 20) is not None


def test_rows_beyond_the_limit_are_not_kept(files: KeptFiles) -> None:
    rows = KeptRows(files.places)
    spill = written(rows, 1, list(range(100)), limit=100)
    assert not spill.whole
    rows.freed(1)
    assert (sizes(files), KeptRows(files.places).feed) == ([False, False], 0)


def test_a_file_whose_rows_are_still_in_use_is_not_written_again(files: KeptFiles) -> None:
    rows = KeptRows(files.places)
    first = written(rows, 1, [1, 2, 3])
    first.seal()
    rows.sealed(1)
    (held,) = first.batches()
    first.close()
    rows.freed(1)
    second = written(rows, 2, [4, 5, 6])
    assert held.column(0).to_pylist() == [1, 2, 3]
    second.seal()
    rows.sealed(2)
    assert rows.new(3, 1 << 20) is None, "one file has rows in use, the other is to be read"
    assert held.column(0).to_pylist() == [1, 2, 3]
    del held
    assert rows.new(3, 1 << 20) is not None
    assert ids_in(second) == [4, 5, 6]


def test_what_an_earlier_process_has_written_in_part_is_freed(files: KeptFiles) -> None:
    written(KeptRows(files.places), 1, [1, 2, 3])
    assert sizes(files) == [True, False]
    KeptRows(files.places)
    assert sizes(files) == [False, False]
