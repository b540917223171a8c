"""Hand a launch over to a new process through its standard input, and read its one answer. Kernels and tasks do so."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
from typing import Any

from tfos_nb.runtime.control.processes import read_frame

__all__ = ["answer_of", "hand_over", "last_lines"]

_STARTED_WITHIN = 300.0  # seconds for Spark to start an application: on YARN and Kubernetes it may wait for its place
_LINES_SHOWN = 20


def hand_over(process: subprocess.Popen[bytes], launch: bytes) -> None:
    """Write a pickled launch. If the process has ended, its output says why."""
    assert process.stdin is not None, "it is a pipe"
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(launch)


def answer_of(answers: Any) -> Any:
    """Return the process's message; None if it has ended without one, or needs too long."""
    with selectors.DefaultSelector() as selector:
        selector.register(answers, selectors.EVENT_READ)
        return read_frame(answers) if selector.select(_STARTED_WITHIN) else None


def last_lines(log: str | os.PathLike[str]) -> str:
    """Return the end of the process's output."""
    try:
        with open(log, encoding="utf-8", errors="replace") as output:
            return "\n".join(output.read().splitlines()[-_LINES_SHOWN:])
    except OSError as error:
        return f"{log} cannot be read: {error}"
