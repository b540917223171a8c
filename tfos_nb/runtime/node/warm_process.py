"""Process that has imported TensorFlow and only forks, so that a node's next process starts in milliseconds.

::

    supervisor ──socket: Environment, then Fork with descriptors──▶ forker ──fork──▶ TF process
    supervisor ◀──socket: Forked(pid), Ended(returncode)─────────── forker
                                                                       ▲ fork, for each supervisor that connects
                                                       warm server ────┘ has imported TensorFlow

A Spark application has one warm server (:class:`WarmServer`) on each host. The first supervisor starts it. The server
outlives that supervisor, so the nodes of the next cluster are forked from it too. Its socket is in a directory that
only this user can enter, and the directory's name is derived from the application's token. A client must run as this
user and send the token. A node with GPUs is never forked from the server. Its supervisor starts a forker for itself if
the node may be started again, and a fresh interpreter otherwise.

A process that is forked after TensorFlow was imported works. A process that is forked after TensorFlow has run an
operation hangs forever. Therefore no operation is ever run here, and the process has only one thread.
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
    peer_of,
    read_frame,
    short_temporary_directory,
    start_module,
    write_frame,
)
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.host.memory import Memory

__all__ = [
    "DAEMON_CONF",
    "PROGRAMS",
    "PYTHON_DAEMON",
    "Fork",
    "ForkedProcess",
    "ServerTerms",
    "WarmProcess",
    "can_fork",
    "changed_on_this_host",
    "import_all",
    "lacks_memory",
    "state_on_this_host",
]

DAEMON_CONF = "spark.python.daemon.module"
PYTHON_DAEMON = "tfos_nb.runtime.node.python_daemon"
PROGRAMS = ("tfos_nb.runtime.node.tensorflow_process", "tfos_nb.runtime.node.single_program", PYTHON_DAEMON)
"""Programs that can be forked: a node's process, a program of :mod:`tfos_nb.parallel`, and Spark's Python daemon."""

_MOST = 1 << 16  # maximum size of a message, in bytes
_ENVIRONMENT = 1 << 20  # maximum size of an Environment message, in bytes
_DESCRIPTORS = 3
_TOKEN_WITHIN = 5.0  # seconds for a new client to send its token
_LOCKED_WITHIN = 30.0  # seconds to wait for the lock, which a process holds while it finds or starts the server
_FORKS_WITHIN = 60.0  # seconds for a fork, which may first import TensorFlow; after it a node imports TensorFlow itself
_WARM_FORKS_WITHIN = 20.0  # the same, if all is imported: a forker that takes longer was stopped by a signal
_LEADS_WITHIN = 5.0  # seconds for a forked process to become the leader of a group
_CODE_WITHIN = 5.0  # seconds to wait for a process's exit code after its end; its forker may have been stopped
_LOOK_EVERY = 5.0  # seconds between two checks of the machine's memory
_LEAST_MEMORY = 0.05  # fraction of the memory that must be free; with less, a server without nodes ends
_MOST_SERVERS = 3  # servers of an application; each has other values of the variables that an import depends on
_PREFIX = "tfos_nb-warm-"
_READY = "ready"  # name of the file that lists the imported files and their modification times, once all are imported
_ANCHOR = "anchor-"  # prefix of the names of the files that note an executor's process id and start
_DIGITS = 8  # length of a digest in a directory's name: a socket's path must be short

# Environment variables that Python, TensorFlow, Keras and their libraries read when they are imported, or when the
# interpreter starts. A server has one set of values of these; all other variables are set after the fork. h5py sets
# HDF5_PLUGIN_PATH when it is imported, so only Spark workers that have applied a model have it: it is not compared.
# Variables that Spark sets per worker, such as PYTHON_FAULTHANDLER_DIR, are ignored too.
_IMPORT_READS = re.compile(
    r"PYTHON(?!PATH$|_)|PYTHON_(?:CONTEXT|CPU|FROZEN|GIL|JIT|PRESITE|THREAD|TLBC)"
    r"|TF_(?!CONFIG$)|TENSORFLOW|KERAS|XLA_|CUDA_|NVIDIA_|NCCL_|OMP_|KMP_|MKL_|OPENBLAS"
    r"|BLIS_|GOTO_|GFORTRAN_|NUMEXPR|NPY_|NUMPY|SCIPY_|PANDAS_|HDF5_(?!PLUGIN_PATH$)|GRPC_|ABSL_|PROTOCOL_BUFFERS"
    r"|WRAPT_|MSGPACK_|PILLOW_|OPENSSL_|SSLKEYLOGFILE$|ARROW_|JE_ARROW_|MALLOC_|GLIBC_|LD_|LANG$"
    r"|LANGUAGE$|LC_|HOME$"
)
_IMPORTED = ("tensorflow", "keras", "tf_keras", "numpy", "pyarrow", "tfos_nb")


@message
@dataclass(frozen=True)
class Environment:
    """First message to a forker: the supervisor, and the environment of the processes to fork.

    ``path`` has the entries that come before the interpreter's own in ``sys.path``.
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
    """Request to a forker: fork a process that runs ``program``.

    The message carries the program's descriptors, and last a descriptor for its output. ``program`` is one of
    :data:`PROGRAMS`. Its ``main`` finds the numbers of its descriptors in ``sys.argv``, followed by ``arguments``.
    """

    program: str
    arguments: tuple[str, ...] = ()


@message
@dataclass(frozen=True)
class Forked:
    """Answer of a forker: the process ids of the new process and of the forker."""

    pid: int
    forker: int


@message
@dataclass(frozen=True)
class Ended:
    """Message of a forker: a forked process has ended, with a return code as in ``subprocess.Popen``."""

    pid: int
    returncode: int


@message
@dataclass(frozen=True)
class ServerTerms:
    """Clients and lifetime of an application's warm server. It gets them through a pipe when it is started.

    Parameters
    ----------
    token : str
        The application's token, which each client must send.
    anchor : int
        Process id of the executor's JVM that asks. The server ends with the last of those that have asked.
    idle : float
        Seconds that the server waits for another node after its last one has ended.
    """

    token: str = field(repr=False)
    anchor: int
    idle: float


def state_on_this_host(env: Mapping[str, str], token: str) -> str:
    """Return the state of the application's warm server for these variables: ``cold``, ``importing`` or ``warm``."""
    directory = Path(_directory(env, token))
    if not _is_served(directory):
        return "cold"
    return "warm" if (directory / _READY).exists() else "importing"


def changed_on_this_host(token: str) -> dict[str, int | None]:
    """Return the files that changed since an application's warm servers imported them, with their times of change."""
    application = _directory({}, token)
    changed = {}
    for directory in _served_directories(application):
        for file, when in _imported_by(directory).items():
            if (now := _changed_at(file)) != when:
                changed[file] = now
    return changed


def can_fork() -> bool:
    """Return whether this system can report the end of a process that is not a child of this one."""
    return hasattr(os, "pidfd_open")


class ForkedProcess:
    """A process that a forker has forked, with a part of the interface of ``subprocess.Popen``."""

    def __init__(self, pid: int, stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self._ended = threading.Event()
        self._returncode = -signal.SIGKILL
        try:
            self._watch = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and the forker will send its exit code
            self._watch = -1

    def __del__(self) -> None:
        if self._watch >= 0:  # not after a wait: several threads may wait
            os.close(self._watch)

    def end(self, returncode: int) -> None:
        """Record that the process has ended with ``returncode``."""
        self._returncode = returncode
        self._ended.set()

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code, or the negative number of the signal that ended it."""
        if self._watch >= 0:
            select.select([self._watch], [], [])
        self._ended.wait(_CODE_WITHIN)
        return self._returncode


class WarmProcess:
    """A supervisor's connection to its forker.

    Parameters
    ----------
    control : socket.socket
        The connection. The forker ends when it is closed.
    process : subprocess.Popen, optional
        The forker, if it is a child of this process.
    forks_within : float
        Seconds that :meth:`fork` waits for the forker's answer.

    Raises
    ------
    OSError
        From :meth:`of_the_application`, if no server exists and none can be started.
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
        self._answers: queue.SimpleQueue[int] = queue.SimpleQueue()  # process ids; 0 after the forker's end
        self._lock = threading.Lock()
        self._ended: Ended | None = None  # the last one; process 0 is the forker itself
        threading.Thread(target=self._listen, name="tfos_nb warm process", daemon=True).start()

    @classmethod
    def of_ones_own(cls, env: Mapping[str, str]) -> WarmProcess:
        """Start a process that imports TensorFlow and forks only for this supervisor.

        The process ends with the thread that calls this.
        """
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = start_module(
            "tfos_nb.runtime.node.warm_process",
            env=env,
            fds=(theirs.fileno(),),
            arguments=("fork", str(theirs.fileno())),
            stderr=None,  # inherited, so that a failed import of TensorFlow appears in the supervisor's output
        )
        theirs.close()
        return cls(control, process)

    @classmethod
    def of_the_application(
        cls, env: Mapping[str, str], terms: ServerTerms, variables: Mapping[str, str] | None = None
    ) -> WarmProcess:
        """Connect to a new forker of the application's warm server on this host. Start the server if none runs.

        ``env`` is the environment for the imports. The forked processes get ``variables``, by default ``env``.
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
        """Fork a process and return it.

        Parameters
        ----------
        order : Fork
            The program to run and its arguments.
        fds : tuple of int
            Descriptors that the process gets.
        output : int, optional
            Descriptor of its output. Default: a pipe, which is the returned process's ``stdout``.

        Raises
        ------
        OSError
            If the forker has ended or does not answer.
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
        """Send the order and return the id of the forked process."""
        socket.send_fds(self._socket, [wire.encode(order)], list(fds))
        try:
            pid = self._answers.get(timeout=self._forks_within)  # the forker's end counts as an answer, 0
        except queue.Empty:
            raise TimeoutError(f"the warm process has not forked within {self._forks_within:g} s") from None
        if not pid:
            raise ConnectionResetError("the warm process has gone")
        return pid

    def close(self) -> None:
        """End the forker and the process that it has forked."""
        if self._process is not None:
            kill_group(self._process)
        elif self._forker and not self._is_gone:  # closing the socket does not end a forker stopped by a signal
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
        self._take(Ended(0, -signal.SIGKILL))  # the forked process ends with its forker
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
    """Connect to the application's server for these variables. If none runs, bind its socket and start it."""
    _make_private(directory)
    with _locked(os.path.join(directory, "lock")):
        path = os.path.join(directory, "socket")
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(_LOCKED_WITHIN)  # connect() blocks if the server was stopped and its backlog is full
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
    """Return the directory of the application's server for these variables, on this host and in this container."""
    application = hashlib.sha256(f"{token}\n{_container()}".encode()).hexdigest()[:_DIGITS]
    return f"{_family()}{application}-{_fingerprint(env)}"


def _start_server(directory: str, path: str, env: Mapping[str, str], terms: ServerTerms) -> None:
    for left in (path, os.path.join(directory, _READY)):  # files of a server that was killed
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
        # The server holds this lock while it lives, so other processes see that the directory is in use.
        alive = os.open(os.path.join(directory, "alive"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(alive, 0)  # it has the process id of a server that was killed
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
    with starting.stdin, contextlib.suppress(BrokenPipeError):  # it is dead, and connecting to its socket will fail
        write_frame(starting.stdin, terms)
    try:
        starting.wait(_LOCKED_WITHIN)
    except subprocess.TimeoutExpired:
        kill_group(starting)
        raise TimeoutError(f"the warm process did not start within {_LOCKED_WITHIN:g} s") from None


def _clear(own: str) -> None:
    """Remove the directories of servers that have ended, and end the application's oldest servers if it has too many.

    ``own`` is the directory that the caller is about to use.
    """
    for found in map(Path, glob.glob(f"{glob.escape(_family())}*")):
        with contextlib.suppress(OSError):
            gone = str(found) != own and not _is_served(found)
            if gone and time.time() - found.stat().st_mtime > _LOOK_EVERY:  # a newer one may belong to a server's start
                shutil.rmtree(found, ignore_errors=True)
    others = [found for found in _served_directories(own) if str(found) != own]
    for old in others[: max(0, len(others) + 1 - _MOST_SERVERS)]:
        _end_server(old)


def _served_directories(own: str) -> list[Path]:
    """Return the directories of the application's servers, the least recently used first."""
    name, kept = own.rpartition("-")[0], []
    for found in map(Path, glob.glob(f"{glob.escape(name)}-*")):
        with contextlib.suppress(OSError):
            if _is_served(found):
                kept.append((found.stat().st_mtime, found))
    return [found for _, found in sorted(kept)]


def _end_server(directory: Path) -> None:
    """End a server; the processes that it has forked continue."""
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((directory / "alive").read_text()), signal.SIGTERM)


def _end_if_stale(directory: Path) -> None:
    """End the server if a file that it has imported has changed since: nodes would run the old code."""
    if all(_changed_at(file) == when for file, when in _imported_by(directory).items()):
        return
    _end_server(directory)
    deadline, nothing = time.monotonic() + _LEADS_WITHIN, threading.Event()
    while _is_served(directory) and time.monotonic() < deadline:
        nothing.wait(0.02)


def _imported_by(directory: Path) -> dict[str, int]:
    """Return the files that a server has imported; none if it is still importing, or the disk is full."""
    try:
        imported: dict[str, int] = json.loads((directory / _READY).read_text())
    except (OSError, ValueError):
        return {}
    return imported


def _tell_ready(directory: Path) -> None:
    """Write the file that lists the imported files; leave it empty if the disk is full."""
    ready, part = directory / _READY, directory / f"{_READY}.part"
    try:
        part.write_text(json.dumps(_imported_files()))
        part.rename(ready)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
            ready.touch()


def _imported_files() -> dict[str, int]:
    """Return the files of all modules that this process has imported, with their modification times in ns."""
    files = {str(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    return {file: when for file in sorted(files) if (when := _changed_at(file)) is not None}


def _changed_at(file: str) -> int | None:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:  # it is in an archive, or was removed
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
    """Make a directory that only this user can enter; raise PermissionError if the existing one is not such."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    there = os.lstat(directory)
    if there.st_uid != os.getuid() or there.st_mode & 0o777 != 0o700 or os.path.islink(directory):
        raise PermissionError(f"{directory} is not a directory that only this user can enter")


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    deadline, nothing = time.monotonic() + _LOCKED_WITHIN, threading.Event()
    with open(path, "ab") as lock:
        while not _try_lock(lock):
            if time.monotonic() > deadline:  # the holder was stopped by a signal
                raise TimeoutError(f"another process has held {path} for {_LOCKED_WITHIN:g} s")
            nothing.wait(0.02)  # flock has no timeout, so poll
        yield


def _try_lock(file: IO[bytes]) -> bool:
    """Lock a file, unless another process holds its lock; return whether it is locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _family() -> str:
    """Return the common prefix of the directories of this user's servers on this machine.

    It names the machine because several hosts may share the temporary directory.
    """
    here = hashlib.sha256(machine().encode()).hexdigest()[:6]
    return os.path.join(short_temporary_directory(), f"{_PREFIX}{os.getuid()}-{here}-")


def _container() -> str:
    """Return the namespaces and the cgroup of this process. A server forks only for supervisors in the same ones."""
    with contextlib.suppress(OSError):
        spaces = sorted(os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns"))
        return "\n".join([*spaces, Path("/proc/self/cgroup").read_text()])
    return ""


def _fingerprint(env: Mapping[str, str]) -> str:
    """Return a digest of all that an import depends on: interpreter, packages, variables, and Keras' configuration."""
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
    """Serve an application on one host: fork a forker for each supervisor that connects.

    The server ends with the last executor that has asked, after ``terms.idle`` seconds without a node, if the machine's
    memory is nearly used up, or by a signal. Its forkers and their nodes continue until their supervisors end them.

    Parameters
    ----------
    listener : socket.socket
        Socket to which supervisors connect.
    alive : int
        Descriptor of the file that stays locked while the server lives.
    directory : str
        Directory of its socket.
    terms : ServerTerms
        Its clients and its lifetime.
    imported : mapping of str to str
        Environment variables that the imported modules have set.
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
        self._forkers: dict[int, int] = {}  # process descriptor (pidfd) -> process id
        self._idle_since = time.monotonic()
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(self._anchor, select.POLLIN)

    def run(self) -> None:
        """Serve until the server is no longer needed."""
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
        return is_unwanted or lacks_memory() or self._is_one_too_many(waited)

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
        """Return whether the application has too many servers, and this is one of the oldest.

        That happens when several are started at the same time, so that none sees the others.
        """
        if waited < _LOOK_EVERY:
            return False
        served = _served_directories(self._directory)
        return Path(self._directory) in served[: max(0, len(served) - _MOST_SERVERS)]

    def _withdraw(self) -> bool:
        """Remove the directory with the socket, so that no more clients connect.

        Return False, and leave it, if a client has just connected or another process holds the lock.
        """
        with contextlib.suppress(TimeoutError), _locked(os.path.join(self._directory, "lock")):
            if not select.select([self._listener], [], [], 0)[0]:
                if self._has_directory():
                    shutil.rmtree(self._directory, ignore_errors=True)
                return True
        return False

    def _has_directory(self) -> bool:
        """Return whether the directory still belongs to this server. Another may have made it again after a removal."""
        try:
            return os.stat(os.path.join(self._directory, "alive")).st_ino == os.fstat(self._alive).st_ino
        except OSError:
            return False

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        peer = peer_of(connection)
        if peer is None or peer.user != os.getuid():
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
        """Continue as the forker of one supervisor; never returns."""
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


def lacks_memory() -> bool:
    """Return whether the memory is nearly used up, so that a process that nobody uses should end."""
    return Memory.now().free_fraction < _LEAST_MEMORY


def _enter(given: Environment) -> None:
    """Replace the environment of this process by the supervisor's: variables, directory, umask and ``sys.path``."""
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
        self._child: tuple[int, int] | None = None  # its process id and its process descriptor (pidfd)

    def run(self) -> None:
        """Fork on each request until the supervisor has gone, then kill the forked process."""
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
        with contextlib.suppress(OSError):  # the supervisor has gone; the next receive finds that out
            self._control.send(wire.encode(Ended(pid, os.waitstatus_to_exitcode(status))))

    def _obey(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _MOST, _DESCRIPTORS)
        except ConnectionError:
            return False
        if not data:
            return False
        order = wire.decode(data)
        if self._child is not None:  # the supervisor has killed it, but its end was not noticed yet
            os.killpg(self._child[0], signal.SIGKILL)
            self._reap(*self._child)
        ready, leads = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            os.close(ready)
            _become(order, fds, leads)
        os.close(leads)
        # Wait until the process leads its group or has ended: a supervisor that has its id may kill that group at once.
        if not select.select([ready], [], [], _LEADS_WITHIN)[0]:
            os.kill(pid, signal.SIGKILL)  # it was stopped by a signal
        os.close(ready)
        for fd in fds:
            os.close(fd)
        self._child = pid, os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            self._control.send(wire.encode(Forked(pid, os.getpid())))
        return True


def _become(order: Fork, fds: list[int], leads: int) -> None:
    """Continue as the program of an order; never returns. Closing ``leads`` says that this process leads its group."""
    import numpy as np

    code = 1
    try:
        if order.program == PYTHON_DAEMON:  # PySpark's daemon calls setpgid, which fails in the leader of a session
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
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:  # noqa: BLE001 - it is written to the program's own output
        traceback.print_exc()
    finally:
        os._exit(code)  # reached only after an error, and after sys.exit


def import_all() -> None:
    """Import the modules that every node needs, so that forked nodes need not import them."""
    spare_scikit_learn()
    import keras  # noqa: F401
    import pyarrow.flight  # noqa: F401
    import pyspark.cloudpickle  # noqa: F401 - it unpickles main; from Spark's zip it would be compiled each time
    import tensorflow  # noqa: F401

    from tfos_nb.runtime.program import setup  # noqa: F401

    for program in PROGRAMS:
        importlib.import_module(program)


def main() -> None:
    """Run as the forker of one supervisor (``fork``) or as an application's server (``serve``)."""
    purpose, descriptor = sys.argv[1], int(sys.argv[2])
    if purpose == "fork":
        die_with_parent()
        import_all()
        _Forker(socket.socket(fileno=descriptor)).run()
        return
    alive, directory = int(sys.argv[3]), sys.argv[4]
    terms = read_frame(sys.stdin.buffer)
    if server := os.fork():
        with contextlib.suppress(OSError):  # the disk is full; the id is needed only to end a surplus server
            os.ftruncate(alive, 0)
            os.write(alive, str(server).encode())
        os._exit(0)  # the server must not be a child of the process that started it
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    name_this_process("tfos_nb warm")
    before = dict(os.environ)
    import_all()
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    os.chdir("/")  # it outlives the directory in which it was started; not earlier: modules may be imported from there
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the pages of all imported objects
    _tell_ready(Path(directory))
    WarmServer(socket.socket(fileno=descriptor), alive, directory, terms, imported).run()


if __name__ == "__main__":
    # Import the module by its name: other modules import it too, and __main__ would register its messages twice.
    from tfos_nb.runtime.node import warm_process

    warm_process.main()
