"""Process that has imported TensorFlow and only forks, so that a node's next process starts in milliseconds.

::

    supervisor ──socket: Environment, then Fork with descriptors──▶ forker ──fork──▶ TF process
    supervisor ◀──socket: Forked(pid), Ended(returncode)─────────── forker
                                                                       ▲ fork, for each supervisor that connects
                                                       warm server ────┘ has imported TensorFlow

A Spark application has one warm server a host (:class:`WarmServer`), which the first supervisor starts and which
outlives it: the nodes of the next cluster are forked from it too. It is reached by a socket in a directory of this
user's alone, by a name that follows from the application's token; who connects has to be this user, and to send the
token. A node with GPUs is never forked from it: a supervisor whose node may be started again has a forker of its own
there, and others start a fresh interpreter.

A process that was forked after TensorFlow was imported works; one that was forked after TensorFlow has run an operation
hangs for ever, so none is ever run here, and there is one thread alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import glob
import hashlib
import hmac
import importlib
import importlib.util
import json
import os
import queue
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from tfos_nb.runtime.code.on_import import spare_scikit_learn
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.processes import (
    die_with_parent,
    kill_group,
    machine,
    name_this_process,
    read_frame,
    short_temporary_directory,
    start_module,
    write_frame,
)
from tfos_nb.runtime.control.wire import message

__all__ = [
    "DAEMON_CONF",
    "PROGRAMS",
    "PYTHON_DAEMON",
    "Fork",
    "ForkedProcess",
    "ServerTerms",
    "WarmProcess",
    "can_fork",
    "import_all",
    "state_on_this_host",
]

DAEMON_CONF = "spark.python.daemon.module"
PYTHON_DAEMON = "tfos_nb.runtime.node.python_daemon"
PROGRAMS = ("tfos_nb.runtime.node.tensorflow_process", "tfos_nb.runtime.node.single_program", PYTHON_DAEMON)
"""What is forked: a node's process, a program of :mod:`tfos_nb.parallel`, and the daemon of Spark's Python workers."""

_MOST = 1 << 16  # bytes of a message
_ENVIRONMENT = 1 << 20  # of the one with a whole environment in it
_DESCRIPTORS = 3
_TOKEN_WITHIN = 5.0  # seconds for a process that has connected to say who it is
_LOCKED_WITHIN = 30.0  # seconds for another process that looks for the server, or starts it
_FORKS_WITHIN = 60.0  # seconds, in which it may yet have to import TensorFlow; without it a node imports that itself
_WARM_FORKS_WITHIN = 20.0  # the same, where it has imported all: one that does not answer then was stopped
_LEADS_WITHIN = 5.0  # seconds for a process that was forked to lead a group
_CODE_WITHIN = 5.0  # seconds after a process has ended for its forker to say how, which may have been stopped
_LOOK_EVERY = 5.0  # seconds between two looks at the machine's memory
_LEAST_MEMORY = 0.05  # of the machine's; with less, a server whose nodes have ended gives its own back
_MOST_SERVERS = 3  # of an application, each for other variables that an import depends on
_PREFIX = "tfos_nb-warm-"
_READY = "ready"  # a file of this name says that all is imported: from which files, and when they were changed
_ANCHOR = "anchor-"  # what comes before an executor's number and start in the name of a file
_DIGITS = 8  # of a digest in a directory's name: a socket's path has to be short
_CREDENTIALS = struct.Struct("3i")  # process, user, group: SO_PEERCRED, unix(7)

# What Python, TensorFlow, Keras and the libraries below them read of the environment while they are imported, or when
# the interpreter starts. A server has one set of values of these; all others are set after the fork. h5py sets
# HDF5_PLUGIN_PATH when it is imported: a worker of Spark's that has applied a model has it, and others do not.
_IMPORT_READS = re.compile(
    r"PYTHON(?!PATH$|_WORKER_FACTORY)|TF_(?!CONFIG$)|TENSORFLOW|KERAS|XLA_|CUDA_|NVIDIA_|NCCL_|OMP_|KMP_|MKL_|OPENBLAS"
    r"|BLIS_|GOTO_|GFORTRAN_|NUMEXPR|NPY_|NUMPY|SCIPY_|PANDAS_|HDF5_(?!PLUGIN_PATH$)|GRPC_|ABSL_|PROTOCOL_BUFFERS"
    r"|WRAPT_|MSGPACK_|PILLOW_|OPENSSL_|SSLKEYLOGFILE$|ARROW_|JE_ARROW_|MALLOC_|GLIBC_|LD_|LANG$"
    r"|LANGUAGE$|LC_|HOME$"
)
_IMPORTED = ("tensorflow", "keras", "tf_keras", "numpy", "pyarrow", "tfos_nb")


@message
@dataclass(frozen=True)
class Environment:
    """To a forker, first: who asks, and what the processes that it forks are to find.

    ``path`` is what comes before the interpreter's own places in ``sys.path``.
    """

    token: str = field(repr=False)
    variables: dict[str, str] = field(repr=False)
    directory: str
    path: tuple[str, ...]
    umask: int
    supervisor: int


@message
@dataclass(frozen=True)
class Fork:
    """To a forker, with descriptors for the program, and one for its output, which comes last: fork.

    ``program`` is one of the runtime's modules with a ``main``, which finds the numbers of its descriptors, and then
    these ``arguments``, in ``sys.argv``.
    """

    program: str
    arguments: tuple[str, ...] = ()


@message
@dataclass(frozen=True)
class Forked:
    """From it: the new process, and its own number."""

    pid: int
    forker: int


@message
@dataclass(frozen=True)
class Ended:
    """From it: a forked process has ended, with a return code as ``Popen`` has it."""

    pid: int
    returncode: int


@message
@dataclass(frozen=True)
class ServerTerms:
    """For how long, and for whom, an application's warm server is there. Comes by a pipe from who starts it.

    Parameters
    ----------
    token : str
        The application's.
    anchor : int
        The JVM of the executor that asks. The server ends with the last of the executors that have asked.
    idle : float
        Seconds after the end of its last node for which it waits for another.
    """

    token: str = field(repr=False)
    anchor: int
    idle: float


def state_on_this_host(env: Mapping[str, str], token: str) -> str:
    """Say how far the application's warm server for these variables is: ``cold``, ``importing`` or ``warm``."""
    directory = Path(_directory(env, token))
    if not _is_served(directory):
        return "cold"
    return "warm" if (directory / _READY).exists() else "importing"


def can_fork() -> bool:
    """Whether this system can tell of the end of a process that is not one's own child."""
    return hasattr(os, "pidfd_open")


class ForkedProcess:
    """A process that a forker has forked; as far as it goes, what ``subprocess.Popen`` is of a child."""

    def __init__(self, pid: int, stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self._ended = threading.Event()
        self._returncode = -signal.SIGKILL
        try:
            self._watch = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and its code is on its way
            self._watch = -1

    def __del__(self) -> None:
        if self._watch >= 0:  # not after a wait: several threads may wait
            os.close(self._watch)

    def end(self, returncode: int) -> None:
        """Learn that it has ended."""
        self._returncode = returncode
        self._ended.set()

    def wait(self) -> int:
        """Wait for its end; return its code, or the negative number of the signal that ended it."""
        if self._watch >= 0:
            select.select([self._watch], [], [])
        self._ended.wait(_CODE_WITHIN)
        return self._returncode


class WarmProcess:
    """A supervisor's end of its forker.

    Parameters
    ----------
    control : socket.socket
        The connection to the forker, which ends when this is closed.
    process : subprocess.Popen, optional
        The forker, if it is a child of this process.

    Raises
    ------
    OSError
        From :meth:`of_the_application`, if there is no server and none can be started.
    """

    def __init__(
        self,
        control: socket.socket,
        process: subprocess.Popen[bytes] | None = None,
        forks_within: float = _FORKS_WITHIN,
    ) -> None:
        self._socket = control
        self._forks_within = forks_within
        self._process = process
        self._forked: ForkedProcess | None = None
        self._forker = 0
        self._answers: queue.SimpleQueue[int] = queue.SimpleQueue()  # 0 for none
        self._lock = threading.Lock()
        self._ended: Ended | None = None  # the last one; of process 0: the forker's own end
        threading.Thread(target=self._listen, name="tfos_nb warm process", daemon=True).start()

    @classmethod
    def of_ones_own(cls, env: Mapping[str, str]) -> WarmProcess:
        """Start a process that imports TensorFlow and forks for this supervisor alone.

        To be called by a thread that stays: the process ends with it.
        """
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = start_module(
            "tfos_nb.runtime.node.warm_process",
            env=env,
            fds=(theirs.fileno(),),
            arguments=("fork", str(theirs.fileno())),
            stderr=None,  # why it could not import TensorFlow is then among its supervisor's last words
        )
        theirs.close()
        return cls(control, process)

    @classmethod
    def of_the_application(
        cls, env: Mapping[str, str], terms: ServerTerms, variables: Mapping[str, str] | None = None
    ) -> WarmProcess:
        """Have the application's warm server on this host make a forker; start that server if there is none.

        ``env`` is the environment for the imports, and that of the forked processes if ``variables`` is not given.
        """
        directory = _directory(env, terms.token)
        control = _connect(directory, env, terms)
        entries = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
        umask = os.umask(0o077)
        os.umask(umask)
        given = Environment(terms.token, dict(variables or env), os.getcwd(), tuple(entries), umask, os.getpid())
        try:
            control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ENVIRONMENT)
            control.send(wire.encode(given))
        except OSError:
            control.close()
            raise
        is_warm = os.path.exists(os.path.join(directory, _READY))
        return cls(control, forks_within=_WARM_FORKS_WITHIN if is_warm else _FORKS_WITHIN)

    def fork(self, order: Fork, fds: tuple[int, ...], output: int | None = None) -> ForkedProcess:
        """Have a process forked, which gets these descriptors.

        Parameters
        ----------
        order : Fork
            What it is to be.
        fds : tuple of int
            Its descriptors.
        output : int, optional
            Where it writes. Default: to a pipe, which is its ``stdout`` here.

        Raises
        ------
        OSError
            If the forker has gone, or does not answer.
        """
        if output is not None:
            return self._watched(self._ask(order, (*fds, output)), None)
        ours, theirs = os.pipe()
        try:
            return self._watched(self._ask(order, (*fds, theirs)), os.fdopen(ours, "rb", buffering=0))
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)

    def _ask(self, order: Fork, fds: tuple[int, ...]) -> int:
        """Send the order, and return the number of the process that was forked."""
        socket.send_fds(self._socket, [wire.encode(order)], list(fds))
        try:
            pid = self._answers.get(timeout=self._forks_within)  # its end is an answer too
        except queue.Empty:
            raise TimeoutError(f"the warm process has not forked within {self._forks_within:g} s") from None
        if not pid:
            raise ConnectionResetError("the warm process has gone")
        return pid

    def close(self) -> None:
        """End it, and what it has forked."""
        if self._process is not None:
            kill_group(self._process)
        elif self._forker and not self._is_gone:  # closing the socket does not end a forker that was stopped
            with contextlib.suppress(OSError):
                os.kill(self._forker, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def _is_gone(self) -> bool:
        return self._ended is not None and self._ended.pid == 0

    def _watched(self, pid: int, output: IO[bytes] | None) -> ForkedProcess:
        with self._lock:
            forked = self._forked = ForkedProcess(pid, output)
            if (ended := self._ended) is not None and ended.pid in (0, pid):
                forked.end(ended.returncode)
            return forked

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._socket.recv(_MOST):
                self._take(wire.decode(data))
        if self._process is not None:
            self._process.wait()
        self._take(Ended(0, -signal.SIGKILL))  # what it has forked ends with it
        self._answers.put(0)

    def _take(self, news: Forked | Ended) -> None:
        if isinstance(news, Forked):
            self._forker = news.forker
            self._answers.put(news.pid)
            return
        with self._lock:
            self._ended = news
            if self._forked is not None and news.pid in (0, self._forked.pid):
                self._forked.end(news.returncode)


# --- finding the application's server, or starting it ---


def _connect(directory: str, env: Mapping[str, str], terms: ServerTerms) -> socket.socket:
    """Connect to the application's server for these variables. If there is none, bind its socket and start it."""
    _make_private(directory)
    with _locked(os.path.join(directory, "lock")):
        path = os.path.join(directory, "socket")
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(_LOCKED_WITHIN)  # of a server that was stopped, with many waiting
        _end_if_stale(Path(directory))
        _note_anchor(directory, terms.anchor)
        try:
            control.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            _clear(directory)
            _start_server(directory, path, env, terms)
            control.connect(path)
        control.settimeout(None)
        os.utime(directory)
    return control


def _directory(env: Mapping[str, str], token: str) -> str:
    """Return where the application's server for these variables has its socket, on this host and in this container."""
    application = hashlib.sha256(f"{token}\n{_container()}".encode()).hexdigest()[:_DIGITS]
    return f"{_family()}{application}-{_fingerprint(env)}"


def _start_server(directory: str, path: str, env: Mapping[str, str], terms: ServerTerms) -> None:
    for left in (path, os.path.join(directory, _READY)):  # by one that was killed
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
        # Held for as long as the server lives: by this, others see that the directory is in use.
        alive = os.open(os.path.join(directory, "alive"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(alive, 0)  # the number in it is that of one that was killed
            starting = start_module(
                "tfos_nb.runtime.node.warm_process",
                env={**env, "TMPDIR": tempfile.gettempdir()},
                fds=(listener.fileno(), alive),
                arguments=("serve", str(listener.fileno()), str(alive), directory),
                stdin=subprocess.PIPE,
            )
        finally:
            os.close(alive)
    assert starting.stdin is not None, "stdin was set to a pipe"
    with starting.stdin, contextlib.suppress(BrokenPipeError):  # it is dead, and its socket will say so
        write_frame(starting.stdin, terms)
    try:
        starting.wait(_LOCKED_WITHIN)
    except subprocess.TimeoutExpired:
        kill_group(starting)
        raise TimeoutError(f"the warm process did not start within {_LOCKED_WITHIN:g} s") from None


def _clear(own: str) -> None:
    """Remove what servers that are gone have left, and end the application's oldest ones where there are too many.

    ``own`` is the directory that the caller is about to use.
    """
    for found in map(Path, glob.glob(f"{glob.escape(_family())}*")):
        with contextlib.suppress(OSError):
            gone = str(found) != own and not _is_served(found)
            if gone and time.time() - found.stat().st_mtime > _LOOK_EVERY:  # not one that is being made
                shutil.rmtree(found, ignore_errors=True)
    others = [found for found in _served_directories(own) if str(found) != own]
    for old in others[: max(0, len(others) + 1 - _MOST_SERVERS)]:
        _end_server(old)


def _served_directories(own: str) -> list[Path]:
    """Return the directories of the application's servers, the one that was asked for longest ago first."""
    name, kept = own.rpartition("-")[0], []
    for found in map(Path, glob.glob(f"{glob.escape(name)}-*")):
        with contextlib.suppress(OSError):
            if _is_served(found):
                kept.append((found.stat().st_mtime, found))
    return [found for _, found in sorted(kept)]


def _end_server(directory: Path) -> None:
    """End a server; the processes that it has forked live on."""
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((directory / "alive").read_text()), signal.SIGTERM)


def _end_if_stale(directory: Path) -> None:
    """End the server that has imported files which were changed since: nodes would not see the new ones."""
    try:
        imported: dict[str, int] = json.loads((directory / _READY).read_text())
    except (OSError, ValueError):  # it imports them yet, or the disk is full
        return
    if all(_changed_at(file) == when for file, when in imported.items()):
        return
    _end_server(directory)
    deadline, nothing = time.monotonic() + _LEADS_WITHIN, threading.Event()
    while _is_served(directory) and time.monotonic() < deadline:
        nothing.wait(0.02)


def _tell_ready(directory: Path) -> None:
    """Write down what was imported; on a disk that is full, only that it was."""
    ready, part = directory / _READY, directory / f"{_READY}.part"
    try:
        part.write_text(json.dumps(_imported_files()))
        part.rename(ready)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
            ready.touch()


def _imported_files() -> dict[str, int]:
    """Return the files of all modules that this process has imported, and when each was changed last."""
    files = {str(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    return {file: when for file in sorted(files) if (when := _changed_at(file)) is not None}


def _changed_at(file: str) -> int | None:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:  # it is in an archive, or gone
        return None


def _note_anchor(directory: str, anchor: int) -> None:
    """Write down an executor that asks, since the server may outlive the one that has started it."""
    with contextlib.suppress(OSError):  # of a disk that is full: the server ends earlier then
        Path(directory, f"{_ANCHOR}{anchor}-{_started_at(anchor)}").touch()


def _noted_anchor(directory: str) -> int | None:
    """Return a descriptor of an executor that was written down and is still there; None if all have ended."""
    for note in Path(directory).glob(f"{_ANCHOR}*"):
        with contextlib.suppress(OSError, ValueError):
            pid, started = map(int, note.name.removeprefix(_ANCHOR).split("-"))
            if (watch := _watch_of(pid, started)) is not None:
                return watch
            note.unlink()
    return None


def _watch_of(pid: int, started: int) -> int | None:
    """Return a descriptor of a process; None if it has ended, whoever has its number now."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with contextlib.suppress(OSError):
        if _started_at(pid) == started and not _has_ended(watch):
            return watch
    os.close(watch)
    return None


def _started_at(pid: int) -> int:
    """Return when a process was started, in ticks since the boot (proc_pid_stat(5)); its number may be used again."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _is_served(directory: Path) -> bool:
    try:
        with (directory / "alive").open("rb") as alive:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _make_private(directory: str) -> None:
    """Make a directory that only this user can enter; refuse one that another user has put in its place."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    there = os.lstat(directory)
    if there.st_uid != os.getuid() or there.st_mode & 0o777 != 0o700 or os.path.islink(directory):
        raise PermissionError(f"{directory} is not a directory that only this user can enter")


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    deadline, nothing = time.monotonic() + _LOCKED_WITHIN, threading.Event()
    with open(path, "ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:  # it was stopped
                    raise TimeoutError(f"another process has held {path} for {_LOCKED_WITHIN:g} s") from None
            nothing.wait(0.02)  # the system has no timed wait for a lock, so poll
        yield


def _family() -> str:
    """Return how the names of this user's servers on this machine begin; other hosts may share the directory."""
    here = hashlib.sha256(machine().encode()).hexdigest()[:6]
    return os.path.join(short_temporary_directory(), f"{_PREFIX}{os.getuid()}-{here}-")


def _container() -> str:
    """Return the namespaces and the cgroup of this process. A server forks only for supervisors that share its own."""
    with contextlib.suppress(OSError):
        spaces = sorted(os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns"))
        return "\n".join([*spaces, Path("/proc/self/cgroup").read_text()])
    return ""


def _fingerprint(env: Mapping[str, str]) -> str:
    """Return a digest of all that an import depends on: interpreter, packages, environment variables, Keras' file."""
    parts = [sys.executable, *(f"{name}={env[name]}" for name in sorted(env) if _IMPORT_READS.match(name))]
    for name in _IMPORTED:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            parts.append(f"{spec.origin} {os.stat(spec.origin).st_mtime_ns}")
    with contextlib.suppress(OSError, RuntimeError):  # no such file, or no home
        parts.append((Path(env.get("KERAS_HOME") or Path.home() / ".keras") / "keras.json").read_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_DIGITS]


# --- the processes that fork ---


class WarmServer:
    """An application's warm process on a host: makes a forker for each supervisor that connects.

    It ends with the last executor that has asked, after ``terms.idle`` seconds without a node, when the machine's
    memory is nearly used up, or by a signal. Its forkers, and the nodes that they have forked, continue until their
    supervisors end them.

    Parameters
    ----------
    listener : socket.socket
        Where supervisors connect.
    alive : int
        The descriptor that is locked for as long as it lives.
    directory : str
        Where its socket is.
    terms : ServerTerms
        See there.
    imported : mapping of str to str
        The environment variables that what was imported has set.
    """

    def __init__(
        self, listener: socket.socket, alive: int, directory: str, terms: ServerTerms, imported: Mapping[str, str]
    ) -> None:
        self._listener = listener
        self._alive = alive
        self._directory = directory
        self._terms = terms
        self._imported = imported
        self._anchor: int | None = os.pidfd_open(terms.anchor)  # of the executor that is watched
        self._forkers: dict[int, int] = {}  # a descriptor that tells of its end -> its process number
        self._idle_since = time.monotonic()
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(self._anchor, select.POLLIN)

    def run(self) -> None:
        """Serve until it is not wanted any more."""
        while not (self._forkers == {} and self._is_over() and self._withdraw()):
            for descriptor, _ in self._poll.poll(_LOOK_EVERY * 1000):
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor == self._anchor:
                    self._let_anchor_go()
                else:
                    self._reap(descriptor)

    def _is_over(self) -> bool:
        waited = time.monotonic() - self._idle_since
        is_unwanted = waited >= self._terms.idle or not self._is_anchored()
        return is_unwanted or _memory_left() < _LEAST_MEMORY or self._is_one_too_many(waited)

    def _is_anchored(self) -> bool:
        """Return whether an executor of the application is there, and watch one."""
        if self._anchor is None:
            self._anchor = _noted_anchor(self._directory)
            if self._anchor is not None:
                self._poll.register(self._anchor, select.POLLIN)
        return self._anchor is not None

    def _let_anchor_go(self) -> None:
        if self._anchor is not None:
            self._poll.unregister(self._anchor)
            os.close(self._anchor)
        self._anchor = None

    def _is_one_too_many(self, waited: float) -> bool:
        """Return whether several were started at once, so that none of them saw the others, and this is an old one."""
        if waited < _LOOK_EVERY:
            return False
        served = _served_directories(self._directory)
        return Path(self._directory) in served[: max(0, len(served) - _MOST_SERVERS)]

    def _withdraw(self) -> bool:
        """Remove the socket, so that no process connects any more; return whether none has just connected."""
        with contextlib.suppress(TimeoutError), _locked(os.path.join(self._directory, "lock")):
            if not select.select([self._listener], [], [], 0)[0]:
                if self._has_directory():
                    shutil.rmtree(self._directory, ignore_errors=True)
                return True
        return False

    def _has_directory(self) -> bool:
        """Return whether the directory is still this server's. If it was removed, another server may have made it."""
        try:
            return os.stat(os.path.join(self._directory, "alive")).st_ino == os.fstat(self._alive).st_ino
        except OSError:
            return False

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            self._become_forker(connection)
        connection.close()
        watch = os.pidfd_open(pid)
        self._forkers[watch] = pid
        self._poll.register(watch, select.POLLIN)

    def _reap(self, watch: int) -> None:
        self._poll.unregister(watch)
        os.waitpid(self._forkers.pop(watch), 0)
        os.close(watch)
        self._idle_since = time.monotonic()

    def _become_forker(self, connection: socket.socket) -> None:
        """Go on as the forker of one supervisor; never returns."""
        try:
            os.setsid()
            self._listener.close()
            for descriptor in filter(None, (self._alive, self._anchor, *self._forkers)):
                os.close(descriptor)
            connection.settimeout(_TOKEN_WITHIN)
            given = wire.decode(connection.recv(_ENVIRONMENT))
            if isinstance(given, Environment) and hmac.compare_digest(given.token, self._terms.token):
                connection.settimeout(None)
                _enter(replace(given, variables={**given.variables, **self._imported}))
                _Forker(connection).run()
        finally:
            os._exit(0)


def _has_ended(watch: int) -> bool:
    return bool(select.select([watch], [], [], 0)[0])


def _memory_left() -> float:
    """Return the part of the memory that is free: the machine's, or what its container may have."""
    import psutil

    memory = psutil.virtual_memory()
    left: float = memory.available / memory.total
    with contextlib.suppress(OSError, ValueError):  # no version 2 of cgroups, or no limit ("max")
        own = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().split("0::/", 1)[-1].split("\n")[0]
        most, used = (int((own / name).read_text()) for name in ("memory.max", "memory.current"))
        counted = dict(line.split() for line in (own / "memory.stat").read_text().splitlines())
        used -= int(counted.get("inactive_file", 0))  # read from disk, and given back when it is wanted
        left = min(left, 1 - used / most)
    return left


def _enter(given: Environment) -> None:
    """Take a supervisor's environment in the place of the one in which this process was started."""
    before = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    own = [entry for entry in sys.path[1:] if entry not in before]
    os.environ.clear()
    os.environ.update(given.variables)
    os.chdir(given.directory)
    os.umask(given.umask)
    sys.path[:] = dict.fromkeys([given.directory, *given.path, *own])
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    tempfile.tempdir = None
    time.tzset()
    name_this_process(f"tfos_nb {given.supervisor}")  # as ps and top show it


class _Forker:
    """Forks for one supervisor, one process at a time."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._child: tuple[int, int] | None = None  # its process number, and a descriptor that tells of its end

    def run(self) -> None:
        """Fork whenever that is asked for, until the supervisor has gone; what was forked ends then."""
        while True:
            control = self._control.fileno()
            ready, _, _ = select.select([control, *([self._child[1]] if self._child else [])], [], [])
            if self._child is not None and self._child[1] in ready:
                self._reap(*self._child)
            if control in ready and not self._obey():
                break
        if self._child is not None:
            os.killpg(self._child[0], signal.SIGKILL)

    def _reap(self, pid: int, watch: int) -> None:
        _, status = os.waitpid(pid, 0)
        os.close(watch)
        self._child = None
        with contextlib.suppress(OSError):  # the supervisor has gone; the next look at it says so
            self._control.send(wire.encode(Ended(pid, os.waitstatus_to_exitcode(status))))

    def _obey(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _MOST, _DESCRIPTORS)
        except ConnectionError:
            return False
        if not data:
            return False
        order = wire.decode(data)
        if self._child is not None:  # it was killed, and its end was not seen yet
            os.killpg(self._child[0], signal.SIGKILL)
            self._reap(*self._child)
        ready, leads = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            os.close(ready)
            _become(order, fds, leads)
        os.close(leads)
        # Who is told of it may end its group at once: there is one from here on, or the process has ended.
        if not select.select([ready], [], [], _LEADS_WITHIN)[0]:
            os.kill(pid, signal.SIGKILL)  # it was stopped
        os.close(ready)
        for fd in fds:
            os.close(fd)
        self._child = pid, os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            self._control.send(wire.encode(Forked(pid, os.getpid())))
        return True


def _become(order: Fork, fds: list[int], leads: int) -> None:
    """Go on as the program of an order, which closes ``leads`` when it leads a group of its own; never returns."""
    import numpy as np

    code = 1
    try:
        if order.program == PYTHON_DAEMON:  # it makes itself a group's leader, which the leader of a session cannot
            os.setpgid(0, 0)
        else:
            os.setsid()
        os.close(leads)
        *given, output = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        np.random.seed()  # Python reseeds its own generator in a fork
        os.environ["TFOS_NB_PARENT"] = str(os.getppid())
        sys.argv = ["tfos_nb", *map(str, given), *order.arguments]
        if order.program not in PROGRAMS:
            raise ValueError(f"{order.program} is not forked")
        importlib.import_module(order.program).main()
    except Exception:  # noqa: BLE001 - it is written to the program's own output
        traceback.print_exc()
    finally:
        os._exit(code)  # only an error comes here


def import_all() -> None:
    """Import what every node needs, so that none does it again."""
    spare_scikit_learn()
    import keras  # noqa: F401
    import pyarrow.flight  # noqa: F401
    import pyspark.cloudpickle  # noqa: F401 - it unpickles main; from Spark's zip it would be compiled each time
    import tensorflow  # noqa: F401

    from tfos_nb.runtime.program import setup  # noqa: F401

    for program in PROGRAMS:
        importlib.import_module(program)


def main() -> None:
    """Run as a forker of one's own, or as an application's server."""
    purpose, descriptor = sys.argv[1], int(sys.argv[2])
    if purpose == "fork":
        die_with_parent()
        import_all()
        _Forker(socket.socket(fileno=descriptor)).run()
        return
    alive, directory = int(sys.argv[3]), sys.argv[4]
    terms = read_frame(sys.stdin.buffer)
    if server := os.fork():
        with contextlib.suppress(OSError):  # of a disk that is full; it is wanted only to end one server of too many
            os.ftruncate(alive, 0)
            os.write(alive, str(server).encode())
        os._exit(0)  # it must not depend on the process that started it
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    name_this_process("tfos_nb warm")
    before = dict(os.environ)
    import_all()
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    os.chdir("/")  # it outlives the directory that it was started in, by which Python may have found what it imported
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all that was imported
    _tell_ready(Path(directory))
    WarmServer(socket.socket(fileno=descriptor), alive, directory, terms, imported).run()


if __name__ == "__main__":
    # By its own name: what it imports imports it, and a message that both had registered would be another's.
    from tfos_nb.runtime.node import warm_process

    warm_process.main()
