"""A process that has imported TensorFlow and does nothing but fork: the next process of a node starts in milliseconds.

::

    supervisor ──socket: Fork, with the descriptors of the new process──▶ warm process ──fork──▶ TF process
    supervisor ◀──socket: Forked(pid), Ended(returncode)───────────────── warm process

Only where the nodes may be gathered anew: it costs a process more, most of whose memory the forks share. A process that
was forked after TensorFlow was imported works; one that was forked after TensorFlow has run an operation hangs for
ever, so none is ever run here, and there is one thread alone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import IO

from tfos_nb.runtime import wire
from tfos_nb.runtime.on_import import spare_scikit_learn
from tfos_nb.runtime.process import die_with_parent, kill_group, start_module
from tfos_nb.runtime.wire import message

__all__ = ["ForkedProcess", "WarmProcess", "can_fork"]

_MOST = 1 << 16  # bytes of a message: it has two paths in it
_DESCRIPTORS = 3


@message
@dataclass(frozen=True)
class Fork:
    """To the warm process, with the descriptors for messages, reports and output: fork."""

    directory: str
    host: str


@message
@dataclass(frozen=True)
class Forked:
    """From it: the new process."""

    pid: int


@message
@dataclass(frozen=True)
class Ended:
    """From it: a forked process has ended, with a return code as ``Popen`` has it."""

    pid: int
    returncode: int


def can_fork() -> bool:
    """Whether this system can tell of the end of a process that is not one's own child."""
    return hasattr(os, "pidfd_open")


class ForkedProcess:
    """A process that the warm one has forked; as far as it goes, what ``subprocess.Popen`` is of a child."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self._ended = threading.Event()
        self._returncode = 0

    def end(self, returncode: int) -> None:
        """Learn that it has ended."""
        self._returncode = returncode
        self._ended.set()

    def wait(self) -> int:
        """Wait for its end; return its code, or the negative number of the signal that ended it."""
        self._ended.wait()
        return self._returncode


class WarmProcess:
    """The supervisor's end. To be made by a thread that stays: the process ends with it.

    Parameters
    ----------
    env : mapping of str to str
        The environment, of the forked processes too.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = start_module(
            "tfos_nb.runtime.warm",
            env=env,
            fds=(theirs.fileno(),),
            arguments=(str(theirs.fileno()),),
            stderr=None,  # why it could not import TensorFlow is then among its supervisor's last words
        )
        theirs.close()
        self._forked: ForkedProcess | None = None
        self._answers: queue.SimpleQueue[int] = queue.SimpleQueue()  # 0 for none
        self._lock = threading.Lock()
        self._ended: Ended | None = None  # the last one; of process 0: the warm one's own end
        threading.Thread(target=self._listen, name="tfos_nb warm process", daemon=True).start()

    def fork(self, directory: str, host: str, fds: tuple[int, int]) -> ForkedProcess:
        """Have a node's process forked, which gets these two descriptors for its messages and reports.

        Raises
        ------
        OSError
            If the warm process has gone.
        """
        output, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [wire.encode(Fork(directory, host))], [*fds, theirs])
            pid = self._answers.get()  # its end is an answer too
            if not pid:
                raise ConnectionResetError("the warm process has gone")
            return self._watched(pid, os.fdopen(output, "rb", buffering=0))
        except OSError:
            os.close(output)
            raise
        finally:
            os.close(theirs)

    def close(self) -> None:
        """End it, and what it has forked."""
        kill_group(self._process)
        self._socket.close()

    def _watched(self, pid: int, output: IO[bytes]) -> ForkedProcess:
        with self._lock:
            forked = self._forked = ForkedProcess(pid, output)
            if (ended := self._ended) is not None and ended.pid in (0, pid):
                forked.end(ended.returncode)
            return forked

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._socket.recv(_MOST):
                self._take(wire.decode(data))
        self._process.wait()
        self._take(Ended(0, -signal.SIGKILL))  # what it has forked ends with it
        self._answers.put(0)

    def _take(self, news: Forked | Ended) -> None:
        if isinstance(news, Forked):
            self._answers.put(news.pid)
            return
        with self._lock:
            self._ended = news
            if self._forked is not None and news.pid in (0, self._forked.pid):
                self._forked.end(news.returncode)


class _Forker:
    """The warm process itself."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._child: tuple[int, int] | None = None  # its process number, and a descriptor that tells of its end

    def run(self) -> None:
        """Fork whenever that is asked for, until the supervisor has gone."""
        while True:
            control = self._control.fileno()
            ready, _, _ = select.select([control, *([self._child[1]] if self._child else [])], [], [])
            if self._child is not None and self._child[1] in ready:
                self._reap(*self._child)
            if control in ready and not self._obey():
                return

    def _reap(self, pid: int, watch: int) -> None:
        _, status = os.waitpid(pid, 0)
        os.close(watch)
        self._child = None
        self._control.send(wire.encode(Ended(pid, os.waitstatus_to_exitcode(status))))

    def _obey(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, _MOST, _DESCRIPTORS)
        if not data:
            return False
        order = wire.decode(data)
        if self._child is not None:  # it was killed, and its end was not seen yet
            os.killpg(self._child[0], signal.SIGKILL)
            self._reap(*self._child)
        pid = os.fork()
        if pid == 0:
            self._control.close()
            _become_node(order, fds)
        for fd in fds:
            os.close(fd)
        self._child = pid, os.pidfd_open(pid)
        self._control.send(wire.encode(Forked(pid)))
        return True


def _become_node(order: Fork, fds: list[int]) -> None:
    """Go on as a node's process; never returns."""
    from tfos_nb.runtime import tfprocess

    code = 1
    try:
        os.setsid()
        messages, reports, output = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ["TFOS_NB_PARENT"] = str(os.getppid())
        sys.argv = ["tfos_nb", str(messages), str(reports), order.directory, order.host]
        tfprocess.main()
    finally:
        os._exit(code)  # only an error comes here


def main() -> None:
    """Run as the warm process."""
    die_with_parent()
    spare_scikit_learn()
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    from tfos_nb.runtime import tfprocess  # noqa: F401

    _Forker(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
