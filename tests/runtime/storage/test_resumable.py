"""Which run a launch with ``resume=`` continues."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tfos_nb.runtime.feed.messages import HeldRows
from tfos_nb.runtime.feed.positions import RowsOfState
from tfos_nb.runtime.recovery.stored_rows import StoredRows
from tfos_nb.runtime.storage.checkpoint_directory import CheckpointDirectory
from tfos_nb.runtime.storage.resumable import Resumable, find_resumable

RUN, OTHER = "0123456789ab", "ba9876543210"


def state(folder: Path, written: int, generation: int = 1, rows: bool = False) -> str:
    folder.mkdir(parents=True)
    (folder / "place.json").write_text(json.dumps({"epoch": 1, "generation": generation, "written": written}))
    if rows:
        folder.with_name(f"{folder.name}.rows").write_bytes(b"")
    return str(folder)


def test_the_newest_state_counts_of_which_the_rows_are_known(tmp_path: Path) -> None:
    runs = tmp_path / "checkpoints"
    state(runs / OTHER / "00000007", 90)
    wanted = state(runs / RUN / "fit" / "00000002-0002-00000040", 100, 2, rows=True)
    state(runs / RUN / "fit" / "00000002-0003-00000044", 110, 3)
    (runs / RUN / "fit" / "00000002-0004-00000045.rows").write_bytes(b"")
    (runs / RUN / "fit" / "00000009").mkdir()
    (runs / "not-a-run").mkdir()
    assert find_resumable(str(tmp_path)) == Resumable(RUN, 4, wanted, 100.0)
    assert find_resumable(f"{tmp_path}/", OTHER) == Resumable(OTHER, 1, str(runs / OTHER / "00000007"), 90.0)


@pytest.mark.parametrize("below", ["", "worker-1"])
def test_a_backup_of_keras_counts_by_the_time_of_its_files(tmp_path: Path, below: str) -> None:
    backup = tmp_path / "checkpoints" / RUN / below / "state-3"
    backup.mkdir(parents=True)
    os.utime(backup, (50, 50))
    assert find_resumable(str(tmp_path)) == Resumable(RUN, 1, str(backup), 50.0)


def test_without_a_state_it_says_where_it_looked(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    assert f"no run in {place} on " in find_resumable(str(tmp_path)).refused
    state(place / RUN / "00000001-0001-000003", 5)
    assert f"no run in {place} on " in find_resumable(str(tmp_path)).refused
    assert f"run {RUN} in {place} on " in find_resumable(str(tmp_path), RUN).refused
    assert find_resumable(str(tmp_path), OTHER).refused.endswith(f"; there are {RUN}")


def test_rows_are_of_an_earlier_cluster_and_go_with_their_state(tmp_path: Path) -> None:
    rows = StoredRows(str(tmp_path), since=3)
    held = HeldRows({0: ((0, 40), (60, 70))}, {})
    for name in ("fit/00000002-0002-00000040", "00000002-0003-000001", "00000001-0001-000001"):
        rows.keep(RowsOfState(name, held))
    assert rows.of("fit/00000002-0002-00000040") == held
    assert rows.of("00000002-0003-000001") is None, "its driver says that"
    assert rows.of("00000001-0001-000002") is None
    directory = CheckpointDirectory.at(str(tmp_path))
    for name in ("00000002-0003-000001", "00000002-0003-000002"):
        part = directory.part()
        Path(part, "place.json").write_text("{}")
        directory.put(part, part, name, "", 1)
    assert directory.names().count("00000002-0003-000002") == 1
    assert [name for name in directory.names() if name.endswith(".rows")] == [], "those of removed states are removed"
