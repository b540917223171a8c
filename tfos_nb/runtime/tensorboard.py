"""A TensorBoard process: on the chief's executor while a cluster runs, beside the kernel when it has ended.

It listens on the loopback of its host only. TensorBoard has no authentication, so whoever has an account on that host
can read what it shows; nobody else can.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections import deque
from typing import Any

from tfos_nb.errors import TfosError
from tfos_nb.runtime.process import kill_group, start_module

__all__ = ["TensorBoard", "make_log_dir"]

_ADDRESS = re.compile(rb"http://[^\s/]+:(\d+)/")


def make_log_dir(log_dir: str) -> None:
    """Make a log directory, so that TensorBoard and the program find it there; a URL is left to its file system.

    Raises
    ------
    TfosError
        If it cannot be made: the message says on which host and why.
    """
    if "://" in log_dir:
        return
    try:
        os.makedirs(log_dir, exist_ok=True)
    except OSError as error:
        raise TfosError(
            f"the log directory {log_dir} cannot be made on {os.uname().nodename}: {error.strerror or error}. "
            "Give a log_dir that the chief's host can write"
        ) from error


class TensorBoard:
    """A TensorBoard over a log directory, on a free port of the loopback.

    Parameters
    ----------
    log_dir : str
        A path, or a URL that TensorBoard can read.

    Attributes
    ----------
    port : int or None
        Where it listens; None until it does, and again when it has ended.
    """

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir
        self._changed = threading.Condition()
        self._port: int | None = None
        self._over = False
        self._said: deque[str] = deque(maxlen=20)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it listens some seconds later."""
        self._process = start_module(
            "tfos_nb.runtime.tensorboard",
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            arguments=("--logdir", self._log_dir, "--host", "127.0.0.1", "--port", "0", "--reload_interval", "5"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        threading.Thread(target=self._listen, args=(self._process,), name="tfos_nb tensorboard", daemon=True).start()

    @property
    def port(self) -> int | None:  # noqa: D102 - documented with the class
        with self._changed:
            return None if self._over else self._port

    @property
    def over(self) -> bool:
        """Whether it has ended, by itself or by :meth:`stop`."""
        with self._changed:
            return self._over

    @property
    def said(self) -> str:
        """What it wrote last: the reason, if it ended by itself."""
        with self._changed:
            return "\n".join(self._said)

    def wait(self, timeout: float) -> int | None:
        """Wait until it listens or has ended; return the port."""
        with self._changed:
            self._changed.wait_for(lambda: self._port is not None or self._over, timeout)
            return None if self._over else self._port

    def stop(self) -> None:
        """End it at once. Idempotent."""
        if self._process is not None:
            kill_group(self._process)
            self._process.wait()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None, "it was asked for"
        for line in process.stdout:
            found = _ADDRESS.search(line)
            with self._changed:
                self._said.append(line.decode(errors="replace").rstrip())
                if found and self._port is None:
                    self._port = int(found[1])
                    self._changed.notify_all()
        process.wait()
        process.stdout.close()
        with self._changed:
            self._over = True
            self._changed.notify_all()


def main(arguments: list[str]) -> Any:
    """Run TensorBoard in this process, which ends with the one that started it."""
    from tensorboard import main as tensorboard

    from tfos_nb.runtime.process import die_with_parent

    die_with_parent()
    sys.argv = ["tensorboard", *arguments]
    with contextlib.suppress(KeyboardInterrupt):
        return tensorboard.run_main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
