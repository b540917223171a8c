"""States of a fit in the cluster's directory: complete or absent, and read from the newest on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.runtime.recovery.test_checkpointing import Far
from tfos_nb.runtime.recovery.memory_state import StateVersion
from tfos_nb.runtime.recovery.stored_states import StoredStates
from tfos_nb.runtime.storage.uploads import SavingFlag


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A directory on the disk, and one in a remote store."""
    Far.store.clear()
    Far.let_go.set()
    Far.error = None
    fsspec.register_implementation("far", Far, clobber=True)
    yield str(tmp_path / "checkpoints") if request.param == "disk" else "far://bucket/checkpoints"
    Far.error = None


def states_in(place: str, every: float = 0.0) -> StoredStates:
    return StoredStates(place, every, SavingFlag(lambda going_on: None))


def write(states: StoredStates, moment: StateVersion, value: float = 0.0) -> bool:
    states.begin(moment, moment.epoch, [np.full(3, value), np.array(7)], b"the rest")
    return states.finish()


def newest(states: StoredStates, **options: Any) -> StateVersion | None:
    found = states.newest(lambda moment: True, **options)
    return found.moment if found is not None else None


def test_the_newest_accepted_state_is_read(place: str) -> None:
    states = states_in(place)
    assert newest(states) is None
    assert write(states, StateVersion(1), 1.0)
    assert write(states, StateVersion(1, 1, 40), 2.0)
    assert newest(states) == StateVersion(1, 1, 40)
    found = states.newest(lambda moment: not moment.step)
    assert found is not None
    assert (found.passes, found.rest) == (1, b"the rest")
    assert np.frombuffer(found.data[0]).tolist() == [1.0] * 3
    assert newest(states, after=StateVersion(1, 1, 39)) == StateVersion(1, 1, 40)
    assert newest(states, after=StateVersion(1, 1, 40)) is None, "that of the memory is as late"


def test_old_states_go_but_for_the_last_whole_epoch_and_the_one_in_use(place: str) -> None:
    states = states_in(place)
    for moment in (StateVersion(1), StateVersion(2), StateVersion(2, 1, 10)):
        write(states, moment)
    later = states_in(place)
    assert newest(later) == StateVersion(2, 1, 10)
    for step in (11, 12, 13):
        write(later, StateVersion(2, 2, step))
    left = [state.moment for step in range(20) if (state := later.newest(lambda one, step=step: one.step == step))]
    assert left == [StateVersion(2), StateVersion(2, 1, 10), StateVersion(2, 2, 12), StateVersion(2, 2, 13)]
    later.drop_after(StateVersion(2, 1, 10))
    assert newest(later) == StateVersion(2, 1, 10)
    later.clear()
    assert newest(later) is None


def test_a_state_is_due_after_its_interval_and_not_while_one_is_written(place: str) -> None:
    assert not states_in(place, every=3600.0).is_due
    states = states_in(place)
    assert states.is_due
    if place.startswith("far"):
        Far.let_go.clear()
        states.begin(StateVersion(1), 1, [np.zeros(3)], b"")
        assert not states.is_due
        assert newest(states) is None
        Far.let_go.set()
        assert states.finish()
        assert states.is_due


def test_the_interval_is_counted_over_generations(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(states_in(place), StateVersion(1))
    later = states_in(place, every=60.0)
    assert newest(later) == StateVersion(1)
    assert not later.is_due, "one was written just now"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert newest(later) == StateVersion(1)
    assert later.is_due, "it was written by the generation before, longer ago than that"


@pytest.mark.parametrize("place", ["store"], indirect=True)
def test_a_failed_write_is_logged_and_leaves_the_state_before(place: str, caplog: pytest.LogCaptureFixture) -> None:
    states = states_in(place, every=30.0)
    assert write(states, StateVersion(1))
    Far.error = OSError("the bucket is full")
    for _ in range(3):
        assert not write(states, StateVersion(2))
    told = "could not be written to far://bucket/checkpoints/fit: the bucket is full. It is tried again every 30 s"
    assert caplog.text.count(told) == 1
    assert newest(states) == StateVersion(1)


def test_a_state_that_was_cut_off_is_not_read(tmp_path: Path) -> None:
    states = states_in(str(tmp_path))
    write(states, StateVersion(1), 1.0)
    write(states, StateVersion(2), 2.0)
    file = tmp_path / "fit" / "00000002" / "state"
    file.write_bytes(file.read_bytes()[:-9])
    assert newest(states) == StateVersion(1)
