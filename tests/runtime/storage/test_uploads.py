"""Uploads during the training, and stores that do not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tfos_nb.errors import TfosError
from tfos_nb.runtime.storage import remote, uploads
from tfos_nb.runtime.storage.remote import Draft, Unreachable, answered_within, check_places
from tfos_nb.runtime.storage.uploads import SavingFlag, Uploads

SECONDS = 20.0


class Flag(SavingFlag):
    """Records the values that it is given."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        super().__init__(self.told.append)


class SilentFileSystem(MemoryFileSystem):
    """A store that accepts requests but never answers a write."""

    protocol = "silent"
    answers = threading.Event()

    def pipe_file(self, *args: Any, **kwargs: Any) -> None:
        assert self.answers.wait(SECONDS)

    def put_file(self, *args: Any, **kwargs: Any) -> None:
        assert self.answers.wait(SECONDS)


@pytest.fixture
def silent() -> Iterator[str]:
    fsspec.register_implementation("silent", SilentFileSystem, clobber=True)
    SilentFileSystem.answers.clear()
    yield "silent://bucket/models"
    SilentFileSystem.answers.set()


def test_an_upload_to_a_store_that_accepts_nothing_times_out(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_SILENT", 0.3)
    flag = Flag()
    saving = Uploads(flag)

    def upload() -> None:
        with Draft(silent) as draft, open(draft.path, "w") as file:
            file.write("a state")

    saving.begin(upload, silent)
    with pytest.raises(TfosError, match=r"not at silent://bucket/models: the store has accepted nothing for 0.3 s"):
        saving.finish()
    assert flag.told == [True, False], "who is asked to stop waits for it no longer"
    SilentFileSystem.answers.set()
    saving.finish()
    assert flag.told == [True, False]


def test_a_slow_upload_continues_while_it_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_SILENT", 0.5)
    written: list[str] = []

    def slow() -> None:
        for _ in range(12):
            time.sleep(0.1)
            remote._note_sign()
        written.append("all")

    saving = Uploads(Flag())
    saving.begin(slow)
    saving.finish()
    assert written == ["all"]


def test_each_uploaded_part_counts_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    signs: list[bool] = []
    monkeypatch.setattr(remote, "_note_sign", lambda: signs.append(True))
    with Draft("memory://bucket/state") as draft, open(draft.path, "wb") as file:
        file.write(bytes(4 * MemoryFileSystem.blocksize))
    assert len(signs) >= 4


def test_the_error_of_an_upload_is_raised_when_the_next_one_begins() -> None:
    def fails() -> None:
        raise OSError("the disk is full")

    saving = Uploads(Flag())
    saving.begin(fails)
    with pytest.raises(OSError, match="the disk is full"):
        saving.begin(print)


def test_an_unresponsive_location_is_reported_before_main_runs(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LOOK_SECONDS", 0.3)
    with pytest.raises(Unreachable, match=r"silent://bucket/models has not answered on .* for 0.3 s"):
        check_places(silent, "", writes=True)


def test_the_error_or_the_result_of_a_call_is_passed_on() -> None:
    assert answered_within(SECONDS, "memory://a", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        answered_within(SECONDS, "memory://a", lambda: 1 // 0)
