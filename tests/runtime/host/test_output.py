"""The output of a process: whole lines, without delay, in bounded memory, and the process is never blocked.

The writers are real processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tfos_nb.runtime.host.output import Output, without_chatter

SECONDS = 60.0


class Written:
    """The output of a Python script, and how often its arrival was announced."""

    def __init__(self, script: str) -> None:
        command = [sys.executable, "-c", script]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.told = threading.Semaphore(0)
        self.output = Output(self.process.stdout, self.told.release, gpu=False)

    def lines(self) -> list[str]:
        """Wait for the end of the process, then take all lines."""
        self.output.thread.join(SECONDS)
        assert not self.output.thread.is_alive()
        lines: list[str] = []
        while taken := self.output.take():
            lines += taken
        return lines

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def run() -> Iterator[Callable[[str], Written]]:
    started: list[Written] = []

    def start(script: str) -> Written:
        started.append(Written(script))
        return started[-1]

    yield start
    for one in started:
        one.close()


def writing(data: bytes) -> str:
    return f"import sys; sys.stdout.buffer.write({data!r})"


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\n\nno end", ["one", "", "no end"]),
        (b"windows\r\nlines\r\n", ["windows", "lines"]),
        ("läßt größer 🎉\n".encode(), ["läßt größer 🎉"]),
        (b"\xff\xfe\n", ["\ufffd\ufffd"]),
        (b"\x1b[1m5/16\x1b[0m \x1b[38;5;2mdone\x1b[K\n", ["5/16 done"]),
        (b"\r 10%|#  |\r 50%|## |\r100%|###|\nnext\n", ["100%|###|", "next"]),
        (b"10%\r50%\r100%\r", ["100%"]),
        (b"", []),
        (b"x" * 5000 + b"\nnext\n", ["x" * 4000 + "…", "next"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_lines_are_shown_as_a_terminal_would_show_them(
    run: Callable[[str], Written], data: bytes, lines: list[str]
) -> None:
    assert run(writing(data)).lines() == lines


def test_tensorflows_startup_messages_are_left_out(run: Callable[[str], Written]) -> None:
    start = "import os; os.dup2(1, 2); os.environ['CUDA_VISIBLE_DEVICES'] = '-1'"  # as in a node without a GPU
    script = f"{start}; import tensorflow; tensorflow.constant(1); print('the user', flush=True)"
    assert run(script).lines() == ["the user"]


def test_startup_messages_are_left_out_of_output_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "written"
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"}  # as in the processes of nodes
    with file.open("wb") as out:
        subprocess.run([sys.executable, "-c", "import tensorflow"], stderr=out, env=quiet, check=True)
    assert without_chatter(f"{file.read_text()}the user\n") == "the user"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_are_whole_wherever_the_pipe_splits_them(run: Callable[[str], Written], end: bytes) -> None:
    script = f"""
import os
data = b"".join(b"%d " % line + b"x" * (line % 61) + {end!r} for line in range(3000))
for at in range(0, len(data), 67):
    os.write(1, data[at : at + 67])
"""
    assert run(script).lines() == [f"{line} " + "x" * (line % 61) for line in range(3000)]


def test_a_line_is_announced_as_soon_as_it_is_written(run: Callable[[str], Written]) -> None:
    written = run("print('one', flush=True); input(); print('two', flush=True); input()")
    for line in ("one", "two"):
        assert written.told.acquire(timeout=SECONDS)
        assert written.output.waiting
        assert written.output.take() == (line,)
        assert not written.output.waiting
        written.go_on()


def test_an_unfinished_line_that_is_overwritten_is_shown_from_time_to_time(run: Callable[[str], Written]) -> None:
    script = "import sys\nfor i in range(5000): sys.stderr.write(f'\\r{i} of 5000'); sys.stderr.flush()\ninput()"
    written = run("import os; os.dup2(1, 2)\n" + script)
    assert written.told.acquire(timeout=SECONDS)
    [line] = written.output.take()
    assert line.endswith(" of 5000")
    written.go_on()
    later = written.lines()  # several, if the 5,000 have taken long
    assert later[-1] == "4999 of 5000"
    assert len(later) < 100


@pytest.mark.slow
def test_a_hundred_megabytes_take_bounded_memory_and_omitted_lines_are_counted(
    run: Callable[[str], Written],
) -> None:
    script = """
line = "x" * 99
for number in range(10):
    print("\\n".join(f"{number * 100_000 + i:8d} {line[9:]}" for i in range(100_000)))
"""
    tracemalloc.start()
    try:
        written = run(script)
        lines: list[str] = []
        biggest = 0
        while not (taken := written.output.take()) or len(lines) < 50_000:  # a reader that is far too slow
            lines += taken
            biggest = max(biggest, sum(map(len, taken)))
            if not written.output.thread.is_alive() and not taken:
                break
            written.told.acquire(timeout=0.05)
        lines += [*taken, *written.lines()]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written.process.wait(SECONDS) == 0
    assert peak < 64 << 20
    assert biggest <= (1 << 17) + 4001
    left_out = [int(line.split()[1].replace(",", "")) for line in lines if line.startswith("…")]
    kept = [int(line.split()[0]) for line in lines if not line.startswith("…")]
    assert left_out
    assert sum(left_out) + len(kept) == 1_000_000
    assert kept == sorted(kept)
    assert kept[-1] == 999_999
    assert all(line.endswith(" left out") for line in lines if line.startswith("…"))
    assert written.output.tail.splitlines()[-1].split()[0] == "999999"


def test_an_endless_line_takes_bounded_memory(run: Callable[[str], Written]) -> None:
    tracemalloc.start()
    try:
        written = run("import os\nfor _ in range(1600): os.write(1, b'x' * 65536)\nprint('\\nafter')")
        lines = written.lines()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines == ["x" * 4000 + "…", "after"]
    assert peak < 4 << 20


def test_an_unfinished_line_is_shown_after_a_while_and_later_once_as_a_whole(run: Callable[[str], Written]) -> None:
    script = (
        "print('half', end='', flush=True); input(); print(' a line'); print('asked: ', end='', flush=True); input()"
    )
    written = run(script)
    shown: list[str] = []
    for line in ("half", "asked: "):
        while line not in shown:
            assert written.told.acquire(timeout=SECONDS)
            shown += written.output.take()
        written.go_on()
    assert shown + written.lines() == ["half", "half a line", "asked: "]


def test_a_slowly_growing_line_is_not_announced_for_every_character(run: Callable[[str], Written]) -> None:
    script = """
import sys, time
for _ in range(30):
    print(".", end="", flush=True)
    time.sleep(0.1)
print()
"""
    *begun, whole = run(script).lines()
    assert whole == "." * 30
    assert len(begun) <= 2
    assert begun


CRASH = """
import faulthandler, os, signal, sys, threading

def waits():
    threading.Event().wait()

def crashes_here():
    signal.raise_signal(signal.SIGSEGV)

faulthandler.enable(sys.stdout)
for number in range(30):
    threading.Thread(target=waits, daemon=True).start()
print("its last words", flush=True)
threading.Thread(target=crashes_here).start()
threading.Event().wait()
"""


def test_the_tail_of_a_crash_says_where_it_happened(run: Callable[[str], Written]) -> None:
    written = run(CRASH)
    assert written.process.wait(SECONDS) == -signal.SIGSEGV
    written.output.thread.join(SECONDS)
    words, fatal, *stack = written.output.crash.splitlines()
    assert (words, fatal) == ("its last words", "Fatal Python error: Segmentation fault")
    assert stack[0].startswith("Current thread ")
    assert stack[1].endswith("in crashes_here")
    assert "waits" not in "".join(stack)
    assert "waits" in "\n".join(written.lines()), "the log has them all"
