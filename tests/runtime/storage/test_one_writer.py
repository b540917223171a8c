"""Which worker writes a file that all workers save, and which ones wait: without TensorFlow."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tfos_nb.runtime.storage import one_writer, save_notices
from tfos_nb.runtime.storage.one_writer import OneWriter
from tfos_nb.runtime.storage.save_notices import BEGUN, FAILED, WRITTEN, Notice, NoticeReader


class Cluster:
    """A chief and another worker that exchange notices within this process."""

    def __init__(self) -> None:
        self.chief, self.other = self.worker(True), self.worker(False)
        self.reader = self.other._reader
        self.reader._thread = threading.Thread()  # no reader thread is needed
        self.chief._writer.tell = self.reader._take  # type: ignore[method-assign]

    def worker(self, chief: bool) -> OneWriter:
        writer = OneWriter()
        extended = SimpleNamespace(_in_multi_worker_mode=lambda: True, should_checkpoint=chief)
        writer.join(SimpleNamespace(extended=extended))
        return writer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name in ("_BEGINS_AFTER_ANOTHER", "_BEGINS_SELDOM"):
        monkeypatch.setattr(save_notices, name, 0.1)
    monkeypatch.setattr(one_writer, "_SHOWS", 0.1)
    return Cluster()


def writing(text: str) -> Any:
    return lambda path: Path(path).write_text(text)


def test_the_other_workers_file_is_discarded(cluster: Cluster, tmp_path: Path) -> None:
    path = f"{tmp_path}/model.keras"
    cluster.chief.save(path, writing("chief"))
    cluster.other.save(path, writing("other"))
    assert [file.name for file in tmp_path.iterdir()] == ["model.keras"]
    assert Path(path).read_text() == "chief"


def test_the_other_worker_waits_for_a_slow_chief(cluster: Cluster, tmp_path: Path) -> None:
    path, began = f"{tmp_path}/model.keras", threading.Event()

    def slowly(part: str) -> None:
        began.set()
        time.sleep(0.5)
        Path(part).write_text("chief")

    thread = threading.Thread(target=cluster.chief.save, args=(path, slowly))
    thread.start()
    began.wait()
    assert not os.path.exists(path)
    cluster.other.save(path, writing("other"))
    assert Path(path).read_text() == "chief"
    thread.join()


def test_the_other_worker_saves_a_file_that_the_chief_does_not(cluster: Cluster, tmp_path: Path) -> None:
    cluster.chief.save(f"{tmp_path}/worker-0.keras", writing("chief"))
    cluster.other.save(f"{tmp_path}/worker-1.keras", writing("other"))
    assert (tmp_path / "worker-1.keras").read_text() == "other"


def test_a_failure_of_the_chief_is_raised_on_all_workers(cluster: Cluster, tmp_path: Path) -> None:
    cluster.reader._take(Notice("model.keras", BEGUN))
    cluster.reader._take(Notice("model.keras", FAILED, why="OSError: full"))
    with pytest.raises(OSError, match="the chief could not save model.keras: OSError: full"):
        cluster.other.save("model.keras", writing("other"))


def test_a_host_that_does_not_share_the_chiefs_directory_gets_the_file(cluster: Cluster, tmp_path: Path) -> None:
    path = f"{tmp_path}/model.keras"
    cluster.reader._take(Notice(path, BEGUN))
    cluster.reader._take(Notice(path, WRITTEN, ["elsewhere", 1, 1], [5, 5]))
    cluster.other.save(path, writing("other"))
    assert Path(path).read_text() == "other"


def test_a_host_that_shares_the_chiefs_directory_keeps_the_chiefs_file(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    path.write_text("chief")
    status = path.stat()
    cluster.reader._take(Notice(str(path), BEGUN))
    cluster.reader._take(Notice(str(path), WRITTEN, ["elsewhere", 1, 1], [status.st_size, status.st_mtime_ns]))
    cluster.other.save(str(path), writing("other"))
    assert path.read_text() == "chief"


def test_the_other_worker_continues_if_the_chief_is_lost() -> None:
    reader = NoticeReader()
    reader._thread = threading.Thread()
    reader._lost = True
    assert reader.wait("model.keras") is None


def test_a_single_process_writes_directly_to_the_path(tmp_path: Path) -> None:
    seen: list[str] = []
    OneWriter().save(f"{tmp_path}/model.keras", seen.append)
    assert seen == [f"{tmp_path}/model.keras"]


def test_a_symbolic_link_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "model.keras").symlink_to(tmp_path / "real")
    cluster.chief.save(f"{tmp_path}/model.keras", writing("chief"))
    assert (tmp_path / "model.keras").is_symlink()
    assert (tmp_path / "real").read_text() == "chief"


def test_the_old_file_is_kept_if_a_writer_fails(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    path.write_text("before")

    def half(part: str) -> None:
        Path(part).write_text("ha")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        cluster.chief.save(str(path), half)
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["model.keras"]


def test_files_left_by_a_killed_writer_are_removed_after_an_hour(cluster: Cluster, tmp_path: Path) -> None:
    for name, age in ((".part-old", 4000), (".part-new", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.keras").touch()
        for path in (tmp_path / name / "model.keras", tmp_path / name):
            os.utime(path, (time.time() - age,) * 2)
    cluster.chief.save(f"{tmp_path}/model.keras", writing("chief"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".part-new", "model.keras"]
