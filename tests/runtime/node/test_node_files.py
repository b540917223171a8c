"""A node's files outlive its supervisor, and two processes never use them at the same time."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from tfos_nb.runtime.feed.kept_rows import KeptRows
from tfos_nb.runtime.node import node_files
from tfos_nb.runtime.node.node_files import NodeFiles
from tfos_nb.runtime.recovery.memory_state import FinishedFits, LastState, StateVersion

SUPERVISOR = """
import json, sys
from tfos_nb.runtime.node.node_files import NodeFiles
files = NodeFiles(inherited=eval(sys.argv[1]))
print(json.dumps([files.states, files.rows, files.finished_fits]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def files() -> Iterator[NodeFiles]:
    files = NodeFiles()
    yield files
    files.close()


@contextlib.contextmanager
def supervisor(files: NodeFiles) -> Iterator[list[list[str]]]:
    """Start a process that inherits the files; yield where its children find them, and kill it."""
    command = [sys.executable, "-c", SUPERVISOR, repr(files.descriptors)]
    inherited = tuple(itertools.chain(*files.descriptors))
    with subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.kill()


def test_rows_and_states_outlive_the_supervisor_that_inherited_them(files: NodeFiles) -> None:
    with supervisor(files) as (states, rows, finished):
        kept = KeptRows(rows)
        spill = kept.new(7, 1 << 20)
        assert spill is not None
        spill.write(pa.record_batch({"id": [1, 2]}))
        spill.seal()
        kept.sealed(7)
        LastState(states).put(StateVersion(3), 3, [])
        FinishedFits(finished).put(StateVersion(9, fit=1), 9, [])
    with supervisor(files) as (states, rows, finished):
        fit = FinishedFits(finished).of(1)
        assert fit is not None
        assert fit.passes == 9
        later, state = KeptRows(rows), LastState(states).newest()
        assert later.feed == 7
        assert [batch.num_rows for batch in later.again(7).batches()] == [2]
        assert state is not None
        assert state.moment == StateVersion(3)


def test_a_supervisor_keeps_the_files_that_its_task_has_left(files: NodeFiles) -> None:
    with supervisor(files) as (states, _, _):
        LastState(states).put(StateVersion(4), 4, [])
        files.close()
        state = LastState(states).newest()
        assert state is not None
        assert state.moment == StateVersion(4)
    assert not any(Path(place).exists() for place in states)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_process_that_an_ended_supervisor_has_left_is_ended(files: NodeFiles, is_stopped: bool) -> None:
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    if is_stopped:
        psutil.Process(left.pid).suspend()
    files.used_by(left.pid)
    assert files.end_user()
    assert psutil.Process(left.pid).status() == psutil.STATUS_ZOMBIE, "nobody has waited for it yet"
    assert left.wait() == -9
    assert files.end_user(), "it has ended"


def test_another_process_with_its_id_is_left_alone(files: NodeFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with monkeypatch.context() as earlier:
        earlier.setattr(node_files, "ticks_at_start", lambda pid: 1)
        files.used_by(other.pid)
    assert files.end_user()
    assert other.poll() is None
    other.kill()
    other.wait()


def test_nobody_is_ended_before_a_process_has_used_the_files(files: NodeFiles) -> None:
    assert files.end_user()
