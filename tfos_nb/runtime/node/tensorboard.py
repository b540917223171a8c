"""TensorBoard process: on the chief's executor while a cluster runs, on the kernel's host after its end.

TensorBoard has no authentication, so it does not listen on a port. It listens on a unix socket in a directory that only
this user can enter. Its fast loader, a separate server that listens on a port, is disabled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tfos_nb.errors import TfosError
from tfos_nb.runtime.control.processes import kill_group, private_directory, remove_directory, start_module
from tfos_nb.runtime.storage.remote import file_system, tensorflow_opens

__all__ = ["TensorBoard", "make_log_dir"]

_LISTENS = b"tfos_nb: TensorBoard listens"
_LOG_DIR = "TFOS_NB_LOG_DIR"


def make_log_dir(log_dir: str) -> None:
    """Make a log directory, so that TensorBoard and the program find it. Do nothing if it is a URL.

    Raises
    ------
    TfosError
        If the directory cannot be made. The message gives the host and the reason.
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
    """A TensorBoard over a log directory, on a unix socket of its own.

    Parameters
    ----------
    log_dir : str
        A path, or a URL that TensorBoard can read.

    Attributes
    ----------
    socket : str or None
        Path of its unix socket; None before it listens and after it has ended.
    """

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir
        self._changed = threading.Condition()
        self._directory = private_directory("board")
        self._listens = False
        self._over = False
        self._said: deque[str] = deque(maxlen=20)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. It listens some seconds later."""
        self._process = start_module(
            "tfos_nb.runtime.node.tensorboard",
            # Every user of the machine can see its arguments, and a URL may contain a password.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", _LOG_DIR: self._log_dir},
            arguments=(self._path, "--reload_interval", "5", "--load_fast", "false"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        threading.Thread(target=self._listen, args=(self._process,), name="tfos_nb tensorboard", daemon=True).start()

    @property
    def _path(self) -> str:
        return os.path.join(self._directory, "socket")

    @property
    def socket(self) -> str | None:  # noqa: D102 - documented with the class
        with self._changed:
            return self._path if self._listens and not self._over else None

    @property
    def over(self) -> bool:
        """Whether the process has ended, by itself or by :meth:`stop`."""
        with self._changed:
            return self._over

    @property
    def said(self) -> str:
        """The last lines of its output. They give the reason if it ended by itself."""
        with self._changed:
            return "\n".join(self._said)

    def wait(self, timeout: float) -> str | None:
        """Wait up to ``timeout`` seconds until it listens or has ended; return the socket's path or None."""
        with self._changed:
            self._changed.wait_for(lambda: self._listens or self._over, timeout)
        return self.socket

    def stop(self) -> None:
        """Kill the process and remove its directory. Idempotent."""
        if self._process is not None:
            kill_group(self._process)
            self._process.wait()
        remove_directory(self._directory)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None, "stdout was set to a pipe"
        for line in process.stdout:
            with self._changed:
                if line.startswith(_LISTENS):
                    self._listens = True
                else:
                    self._said.append(line.decode(errors="replace").rstrip())
                self._changed.notify_all()
        process.wait()
        process.stdout.close()
        with self._changed:
            self._over = True
            self._changed.notify_all()


@dataclass(frozen=True)
class _ServerAt:
    """Make TensorBoard's server on a unix socket."""

    path: str

    def __call__(self, app: Any, flags: Any) -> Any:
        """Return the server, with the interface of a ``TensorBoardServer``."""
        from werkzeug.serving import make_server

        server: Any = make_server(f"unix://{self.path}", 0, app, threaded=True)
        server.get_url = lambda: f"unix://{self.path}"
        return server


def main(arguments: list[str]) -> None:
    """Run TensorBoard in this process, which ends with its parent process."""
    from tensorboard import default, main_lib, program

    from tfos_nb.runtime.control.processes import die_with_parent

    die_with_parent()
    path, *options = arguments
    log_dir = os.environ.pop(_LOG_DIR)
    if not tensorflow_opens(log_dir):
        # If a module of this name exists, TensorBoard does not import TensorFlow and reads through fsspec.
        sys.modules["tensorboard.compat.notf"] = ModuleType("tensorboard.compat.notf")
        file_system(log_dir)
    main_lib.global_init()
    board = program.TensorBoard(default.get_plugins(), server_class=_ServerAt(path))
    board.configure(["tensorboard", "--logdir", log_dir, *options])
    board.launch()
    print(_LISTENS.decode(), flush=True)  # noqa: T201 - to the process that started it
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
