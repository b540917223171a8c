"""No process outlives the one that started it, and messages between them end cleanly."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ENVIRONMENT
from tfos_nb.runtime.control.lifecycle import EndNode, MainStarted, Start
from tfos_nb.runtime.control.processes import (
    PARENT_VARIABLE,
    Channel,
    boot,
    die_with_parent,
    is_here,
    kill_group,
    left_behind,
    machine,
    owner,
    private_directory,
    read_frame,
    remove_directory,
    signal_name,
    start_module,
    write_frame,
)

SECONDS = 20.0

# A process that starts another as a supervisor starts its node, prints both process ids, and waits.
PARENT = """
import os, subprocess, sys, threading
child = "import os, threading; from tfos_nb.runtime.control.processes import die_with_parent; die_with_parent(); "
child += "print(os.getpid(), flush=True); threading.Event().wait()"
environment = {**os.environ, "TFOS_NB_PARENT": str(os.getpid())}
started = subprocess.Popen([sys.executable, "-c", child], env=environment, start_new_session=True)
threading.Event().wait()
"""


def start_python(script: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], env=ENVIRONMENT, stdout=subprocess.PIPE, **options)


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def is_gone(process: psutil.Process) -> bool:
    _, alive = psutil.wait_procs([process], SECONDS)
    return not alive or alive[0].status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_grandchild_dies_when_its_parent_is_killed() -> None:
    parent = start_python(PARENT)
    try:
        grandchild = psutil.Process(int(first_line(parent)))
        assert grandchild.ppid() == parent.pid
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(SECONDS)
        assert is_gone(grandchild)
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


def test_a_child_whose_parent_died_early_ends_itself() -> None:
    script = "from tfos_nb.runtime.control.processes import die_with_parent; die_with_parent(); print('still here')"
    environment = {**ENVIRONMENT, PARENT_VARIABLE: "1"}  # not the process that started it
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_a_process_not_started_by_us_ignores_die_with_parent() -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != PARENT_VARIABLE}
    script = "from tfos_nb.runtime.control.processes import die_with_parent; die_with_parent(); print('still here')"
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert ended.stdout == b"still here\n"


GROUP = """
import subprocess, sys, threading, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
print(child.pid, flush=True)
threading.Event().wait()
"""


def test_kill_group_ends_only_a_process_and_its_children() -> None:
    process = start_python(GROUP, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        child = psutil.Process(int(first_line(process)))
        kill_group(process)
        assert process.wait(SECONDS) == -signal.SIGKILL
    assert is_gone(child)
    kill_group(process)  # it has already ended: nothing happens


def test_a_module_is_started_in_its_own_process_group_with_its_arguments() -> None:
    with start_module("platform", env=ENVIRONMENT, arguments=("--terse",), stdout=subprocess.PIPE) as process:
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert out.strip()


@pytest.mark.parametrize(
    ("code", "name"), [(0, None), (3, None), (-9, "SIGKILL"), (-11, "SIGSEGV"), (-15, "SIGTERM"), (-63, "signal 63")]
)
def test_a_signal_is_shown_by_its_name(code: int, name: str | None) -> None:
    assert signal_name(code) == name


def test_frames_are_read_in_order_and_the_end_is_none() -> None:
    stream = io.BytesIO()
    for message in (EndNode(), {"a": 1}, b"x" * 100_000):
        write_frame(stream, message)
    stream.seek(0)
    assert [read_frame(stream) for _ in range(4)] == [EndNode(), {"a": 1}, b"x" * 100_000, None]


@pytest.mark.parametrize("kept", [1, 7, 8, 9])
def test_a_truncated_frame_reads_as_none(kept: int) -> None:
    stream = io.BytesIO()
    write_frame(stream, {"a": 1})
    assert read_frame(io.BytesIO(stream.getvalue()[:kept])) is None


@pytest.fixture
def ends() -> Any:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


def test_a_channel_carries_messages_in_both_directions(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    assert ours.send(Start({"worker": ["a:1"]}))
    assert theirs.send(MainStarted("worker:0"))
    assert next(iter(theirs)) == Start({"worker": ["a:1"]})
    assert next(iter(ours)) == MainStarted("worker:0")


def test_a_channel_ends_when_the_other_side_closes(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.send(1)
    theirs.close()
    assert list(ours) == [1]
    assert not ours.send("too late") or not ours.send("too late")


def test_closing_a_channel_ends_its_own_reader(ends: tuple[Channel, Channel]) -> None:
    ours, _ = ends
    heard: list[Any] = []
    reader = threading.Thread(target=lambda: heard.extend(ours), daemon=True)
    reader.start()
    ours.close()
    reader.join(SECONDS)
    assert not reader.is_alive()
    assert heard == []


def test_messages_of_many_threads_are_not_mixed_up(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    threads = [
        threading.Thread(target=lambda mark=mark: [ours.send(mark * 5000) for _ in range(50)]) for mark in "abcd"
    ]
    for thread in threads:
        thread.start()
    messages = iter(theirs)
    came = [next(messages) for _ in range(200)]
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(came) == [mark * 5000 for mark in "abcd" for _ in range(50)]


def test_a_channel_of_a_killed_process_ends() -> None:
    ours, theirs = Channel.pair()
    script = """if True:
        import sys, threading
        from tfos_nb.runtime.control.processes import Channel
        Channel.of_fd(int(sys.argv[1])).send("up")
        threading.Event().wait()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(theirs.fileno())], env=ENVIRONMENT, pass_fds=(theirs.fileno(),)
    )
    theirs.close()
    assert next(iter(ours)) == "up"
    process.kill()
    assert list(ours) == []
    process.wait(SECONDS)
    ours.close()


def test_die_with_parent_does_nothing_to_a_process_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getppid()))
    monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no such call here")))
    die_with_parent()  # returns also where the system has no such signal


def test_a_socket_given_to_a_channel_is_closed_with_it() -> None:
    one, two = socket.socketpair()
    channel = Channel(one)
    channel.close()
    assert two.recv(1) == b""
    two.close()


def test_files_left_by_a_killed_process_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    space, _, booted = machine().partition("-")
    theirs = f"kind-{gone.pid}-{machine()}-a"
    of_a_container = f"kind-{gone.pid}-{int(space) + 1}-{booted}-b"
    of_another_host = f"kind-{gone.pid}-{space}-{'0' * len(booted)}-e"
    other_names = f"kind-{owner()}-c", f"other-{gone.pid}-{machine()}-d", "kind-and-more"
    for name in (theirs, of_a_container, of_another_host, *other_names):
        (tmp_path / name).touch()
    assert left_behind("kind-") == [str(tmp_path / theirs)]


def test_a_directory_counts_as_in_use_until_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    # As on a copy of a running machine: the same boot id, but no process has that number here.
    monkeypatch.setattr("tfos_nb.runtime.control.processes.owner", lambda: f"{gone.pid}-{machine()}")
    files = len(os.listdir("/proc/self/fd"))
    held = private_directory("kind", sockets=False)
    assert left_behind("tfos_nb-kind-") == []
    remove_directory(held)
    assert not os.path.exists(held)
    assert len(os.listdir("/proc/self/fd")) == files
    os.mkdir(held)
    assert left_behind("tfos_nb-kind-") == [held]


def test_socket_directories_have_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("a-name-that-some-scheduler-gives-" * 3)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    place, other = private_directory("kind"), private_directory("kind", sockets=False)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{place}/tensorboard")
        assert os.stat(place).st_mode & 0o777 == 0o700
        assert Path(other).parent == long
    finally:
        remove_directory(place)


def test_entries_of_another_machine_in_a_shared_directory_are_ignored(tmp_path: Path) -> None:
    socket_file = tmp_path / "feed.sock"
    socket_file.touch()
    assert is_here(boot(), str(socket_file))
    assert not is_here("0" * len(boot()), str(socket_file))
    assert not is_here("", str(socket_file))
    assert not is_here(boot(), str(tmp_path / "gone"))
