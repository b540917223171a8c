"""Read the stacks of a process from outside, whatever its threads do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ENVIRONMENT
from tests.waiting import until
from tfos_nb.runtime.node.stacks import frames_of_main, frames_of_others, take_stacks

BEGIN = """
import ctypes, sys, threading
from tfos_nb.runtime.node.stacks import write_stacks_when_asked

def wait_for_ever():
    print("ready", flush=True)
    threading.Event().wait()

def busy(depth=0):
    while True:
        if depth < 30:
            [busy_a_little(n) for n in range(depth)]
        eval(compile("(lambda: [n * n for n in range(50)])()", "made anew", "eval"))

def busy_a_little(depth):
    return busy_a_little(depth - 1) + 1 if depth else 0

def hold_the_lock():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(60)

write_stacks_when_asked(sys.argv[1])
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Start a program whose stacks may be read, and return its process id."""
    started = []

    def run(script: str) -> int:
        command = [sys.executable, "-c", BEGIN + script, str(tmp_path)]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_the_main_thread_comes_first_and_the_writing_thread_is_left_out(
    start: Callable[[str], int], tmp_path: Path
) -> None:
    pid = start("threading.Thread(target=busy, daemon=True).start(); wait_for_ever()")
    taken = take_stacks("worker:1", 7, pid, str(tmp_path))
    assert (taken.node, taken.number) == ("worker:1", 7)
    assert taken.text.startswith("Thread (main) 0x")
    assert "wait_for_ever" in [frame.function for frame in frames_of_main(taken.text)]
    assert taken.text.count("hread ") == 2
    assert "_write_when_asked" not in taken.text


def test_reading_stacks_does_not_harm_a_process_with_running_threads(
    start: Callable[[str], int], tmp_path: Path
) -> None:
    """faulthandler's signal handler reads frames that running threads change, which used to crash the process."""
    pid = start("[threading.Thread(target=busy, daemon=True).start() for n in range(4)]; wait_for_ever()")
    for number in range(40):
        assert "wait_for_ever" in take_stacks("worker:1", number, pid, str(tmp_path)).text


def test_no_stacks_are_returned_while_native_code_holds_the_gil(
    start: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = start("hold_the_lock()")
    monkeypatch.setenv("PATH", "")  # without py-spy
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert until(lambda: take_stacks("worker:1", 1, pid, str(tmp_path)).text == "")


BY_PY_SPY = """\
Process 24500: /usr/bin/python3 train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 24550 (active): "a worker"
    outer (/home/me/train.py:3)
    Thread.run (/opt/lib/threading.py:982)
    Thread._bootstrap_inner (/opt/lib/threading.py:1045)
    Thread._bootstrap (/opt/lib/threading.py:1002)
Thread 24500 (active+gil): "MainThread"
    augment (/home/me/train.py:2)
    <module> (/home/me/train.py:9)
"""
"""What py-spy 0.4.3 writes."""


def test_py_spy_beside_the_executors_python_is_used(
    start: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{BY_PY_SPY}END\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tool.with_name("python")))
    monkeypatch.setenv("PATH", "/nothing")
    taken = take_stacks("worker:1", 1, psutil.Process().pid, str(tmp_path / "no answer"))
    assert list(map(str, frames_of_main(taken.text))) == [
        "/home/me/train.py:2 in augment",
        "/home/me/train.py:9 in <module>",
    ]
    assert [str(frames[-1]) for frames in frames_of_others(taken.text)] == ["/opt/lib/threading.py:1002 in _bootstrap"]


def test_py_spy_that_may_not_read_a_process_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    taken = take_stacks("worker:1", 1, psutil.Process().pid, str(tmp_path / "no answer"))
    assert taken.text.startswith("py-spy could not read the stacks: Permission Denied")
    assert frames_of_main(taken.text) == []


def test_no_stacks_are_returned_for_an_ended_or_foreign_process(start: Callable[[str], int], tmp_path: Path) -> None:
    assert take_stacks("worker:1", 1, 1, str(tmp_path)).text == ""
    pid = start("print('ready', flush=True)")
    assert until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert take_stacks("worker:1", 1, pid, str(tmp_path)).text == ""


WAKES = "print('ready', flush=True)\nwhile True: threading.Event().wait(0.001)"


@pytest.mark.parametrize(("script", "least", "most"), [("wait_for_ever()", 0, 5), (WAKES, 30, 5000)])
def test_a_main_thread_that_wakes_again_and_again_has_waited_more_often(
    start: Callable[[str], int], tmp_path: Path, script: str, least: int, most: int
) -> None:
    pid = start(script)
    assert until(lambda: psutil.Process(pid).status() == psutil.STATUS_SLEEPING)
    first, second = (take_stacks("worker:1", 1, pid, str(tmp_path)).waits for _ in range(2))
    assert least <= second - first <= most
