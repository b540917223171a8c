"""A state in memory is complete or absent, and outlives the process that wrote it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tfos_nb.runtime.recovery.memory_state import LastState, StateMemory, StateVersion


@pytest.fixture
def memory() -> Iterator[StateMemory]:
    memory = StateMemory()
    yield memory
    memory.close()


def values(last: LastState) -> list[list[float]]:
    state = last.newest()
    assert state is not None
    return [
        np.frombuffer(data, name).reshape(shape).tolist()
        for data, (name, shape) in zip(state.data, state.index, strict=True)
    ]


def test_the_later_of_two_states_is_read(memory: StateMemory) -> None:
    last = LastState(memory.places)
    assert last.newest() is None
    for epoch in (1, 2, 3):
        last.put(
            StateVersion(epoch),
            epoch + 10,
            [np.full((5 - epoch, 2), epoch, "float32"), np.array(7, "int64"), np.zeros((0, 3), bool)],
        )
    assert values(last) == [[[3.0, 3.0], [3.0, 3.0]], 7, []]
    state = last.newest()
    assert state is not None
    assert (state.moment, state.passes) == (StateVersion(3), 13)
    last.clear()
    assert last.newest() is None


def test_a_state_outlives_its_writer(memory: StateMemory) -> None:
    program = (
        "import sys, os, numpy as np; from tfos_nb.runtime.recovery.memory_state import *; "
        "LastState(sys.argv[1:]).put(StateVersion(5), 4, [np.arange(3.0)]); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, *memory.places], check=False)
    assert values(LastState(memory.places)) == [[0.0, 1.0, 2.0]]


class Killed(Exception):
    pass


def test_an_incompletely_written_state_is_ignored(memory: StateMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    last = LastState(memory.places)
    last.put(StateVersion(1), 1, [np.arange(3.0)])
    last.put(StateVersion(2), 2, [np.arange(4.0)])

    def torn(file: object, data: memoryview) -> None:
        os.write(file.fileno(), data[: len(data) // 2])  # type: ignore[attr-defined]
        raise Killed

    monkeypatch.setattr("tfos_nb.runtime.recovery.memory_state._write", torn)
    with pytest.raises(Killed):
        last.put(StateVersion(3), 3, [np.arange(5.0)])
    assert values(last) == [[0.0, 1.0, 2.0, 3.0]]


def test_bfloat16_arrays_are_kept(memory: StateMemory) -> None:
    import tensorflow as tf

    last = LastState(memory.places)
    last.put(StateVersion(1), 1, [tf.constant([1.5, -2.0], tf.bfloat16).numpy()])
    assert values(last) == [[1.5, -2.0]]


def test_the_memory_is_removed_when_its_owner_closes_it(memory: StateMemory) -> None:
    places = memory.places
    memory.close()
    assert not any(os.path.exists(place) for place in places)


def test_a_state_that_the_memory_cannot_hold_is_written_to_the_disk(
    memory: StateMemory, caplog: pytest.LogCaptureFixture
) -> None:
    free = [1 << 30]
    last = LastState(memory.places, lambda: free[0])
    last.put(StateVersion(1), 1, [np.zeros(1000)])
    assert sizes(memory) == [True, False, False, False]
    free[0] = 4000
    last.put(StateVersion(2), 2, [np.ones(1000)])
    before = last.newest(lambda moment: moment < StateVersion(2))
    assert before is not None, "the driver may not know yet which rows the newest one includes"
    last.put(StateVersion(3), 3, [np.full(1000, 3.0)])
    assert sizes(memory) == [False, False, True, True], "two copies on the disk, and the memory is free"
    assert values(last) == [[3.0] * 1000]
    last.drop_after(StateVersion(2))
    assert values(last) == [[1.0] * 1000]
    assert [one.message for one in caplog.records].count(caplog.records[0].message) == 1
    assert "does not fit into the free memory" in caplog.records[0].message
    LastState(memory.places, lambda: free[0]).put(StateVersion(4), 4, [np.ones(1000)])
    assert len(caplog.records) == 1, "the process of the next generation does not say it again"
    free[0] = 1 << 30
    last.put(StateVersion(5), 5, [np.full(1000, 4.0)])
    assert values(LastState(memory.places)) == [[4.0] * 1000], "the memory is used again when there is enough"


def sizes(memory: StateMemory) -> list[bool]:
    """Return which of the places have something in them."""
    return [os.stat(place).st_size > 0 for place in memory.places[:4]]
