"""Run programs of the tests in processes that are forked from one that has imported TensorFlow and Keras.

A test file often starts four of them. Each would otherwise import TensorFlow, which takes 4 to 14 s of a core.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["DEADLINE", "Program", "reserved_ports", "run_workers", "start"]

CHECKOUT = Path(__file__).parents[1]
DEADLINE = 180.0
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(["tensorflow", "keras", "tests.programs"])


class Program:
    """A running program, with the part of ``subprocess.Popen`` that the tests use.

    Parameters
    ----------
    program : str
        Path of a file, or name of a module.
    arguments : sequence of str
        Its arguments in ``sys.argv``.
    environment : mapping of str to str
        Its environment variables.
    """

    def __init__(self, program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        with tempfile.NamedTemporaryFile(prefix="tfos_nb-program-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
        given = (program, [program, *arguments], dict(environment), str(self._log))
        self._process = _forkserver.Process(target=_run, args=given)
        self._process.start()
        self.said = ""

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the program."""
        self._process.kill()
        self._process.join()
        self._log.unlink(missing_ok=True)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait until it has ended; return its output."""
        self._process.join(timeout)
        if self._log.exists():
            self.said = self._log.read_text(errors="replace")
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"not through after {timeout:g} s: {self.said[-6000:]}")
        self._log.unlink(missing_ok=True)
        return self.said, None


def _run(program: str, argv: list[str], environment: dict[str, str], log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [entry for entry in environment["PYTHONPATH"].split(os.pathsep) if entry]
    sys.argv[:] = argv
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def start(program: str | Path, *arguments: str, **environment: str) -> Program:
    """Start a program, a file or a module, with these variables added to the tests' environment."""
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    given = {"PYTHONPATH": path, "TF_GRPC_REUSE_PORT": "1", "CUDA_VISIBLE_DEVICES": "-1", **environment}
    return Program(str(program), arguments, {**os.environ, **given})


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[str]]:
    """Yield addresses whose ports are reserved: only processes that share ports, as TensorFlow here, can bind them."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def run_workers(count: int, program: str | Path, *arguments: str, deadline: float = DEADLINE) -> list[Program]:
    """Run a program as all workers of a cluster until all have ended; return them with their output."""
    with reserved_ports(count) as addresses, contextlib.ExitStack() as stack:
        workers = []
        for index in range(count):
            config: dict[str, Any] = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            workers.append(start(program, *arguments, TF_CONFIG=json.dumps(config)))
            stack.callback(workers[-1].kill)
        for worker in workers:
            worker.communicate(deadline)
    return workers
