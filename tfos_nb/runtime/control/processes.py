"""Processes that do not outlive the one that started them, and the channel between the two.

A node is never a fork of a process in which TensorFlow has run an operation: it would hang for ever in its first
``tf.function``. It may be one of a process that has imported TensorFlow (:mod:`tfos_nb.runtime.node.warm_process`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Protocol

from tfos_nb.runtime.control import wire

__all__ = [
    "Channel",
    "address_towards",
    "answers",
    "boot",
    "die_with_parent",
    "host_and_port",
    "is_here",
    "kill_group",
    "left_behind",
    "machine",
    "name_this_process",
    "owner",
    "private_directory",
    "python_path",
    "read_frame",
    "refuses",
    "remove_directory",
    "run_apart",
    "short_temporary_directory",
    "signal_name",
    "start_module",
    "write_frame",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_ANSWERS_WITHIN = 1.0  # seconds; a process that has ended refuses at once
_LENGTH = struct.Struct("!Q")
_LONGEST = (1 << 32) + 64  # msgpack says in 32 bits how long a message is
_PIECE = 16 << 20
_LONGEST_ROOT = 45  # bytes of a temporary directory's name: with ours under it, a socket's path may have 103
PARENT_VARIABLE = "TFOS_NB_PARENT"
_locks: dict[str, int] = {}  # by directory of this process: a descriptor of it, on which the lock is


def start_module(
    module: str,
    *,
    env: Mapping[str, str],
    fds: tuple[int, ...] = (),
    arguments: tuple[str, ...] = (),
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | None = subprocess.DEVNULL,
    stderr: int | None = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in a process group of its own, with this interpreter."""
    full = {**env, PARENT_VARIABLE: str(os.getpid())}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command, env=full, pass_fds=fds, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that ends (Linux; elsewhere the channel does it).

    The signal goes by the parent's thread that forked, so a parent must start its children from a thread that stays.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT_VARIABLE)
    if expected and os.getppid() != int(expected):
        os._exit(1)  # the parent went before the line above: nobody is left to hear of it


def name_this_process(name: str) -> None:
    """Have ``ps`` and ``top`` show a name for this process, where they can: Linux, which keeps 15 bytes of it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode()[:15])


class _Process(Protocol):
    pid: int


def kill_group(process: _Process) -> None:
    """End a process and all that it started, at once: TensorFlow swallows the polite signals."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def signal_name(returncode: int) -> str | None:
    """Name the signal of a ``Popen.returncode``; None if the process ended by itself.

    Examples
    --------
    >>> signal_name(-9)
    'SIGKILL'
    """
    if returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the way to another. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def host_and_port(host: str, port: int) -> str:
    """Write an address as gRPC reads it: that of an IPv6 host in brackets (RFC 3986, section 3.2.2).

    Examples
    --------
    >>> host_and_port("10.0.0.7", 40123), host_and_port("fd00::7", 40123)
    ('10.0.0.7:40123', '[fd00::7]:40123')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there, and takes a connection within a second."""
    try:
        socket.create_connection((host, port), _ANSWERS_WITHIN).close()
    except OSError:
        return False
    return True


def greets(host: str, port: int) -> bool:
    """Whether a server of gRPC is alive there: it sends its settings to whoever connects (RFC 9113, section 3.4).

    To be let in is not enough. Linux closes the connections of a process that is killed before what it listens with,
    and accepts others for as long as that takes.
    """
    try:
        with socket.create_connection((host, port), _ANSWERS_WITHIN) as connection:
            return bool(connection.recv(1))
    except OSError:
        return False


def refuses(host: str, port: int) -> bool:
    """Whether that host says that nobody listens there; one that is silent may not be heard at the moment."""
    try:
        socket.create_connection((host, port), _ANSWERS_WITHIN).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def private_directory(kind: str, sockets: bool = True) -> str:
    """Make a directory of this process, and remove those of processes that were killed.

    It is in the temporary directory, and only this user can enter it. This process holds a lock on it until
    :func:`remove_directory`, or its own end. The path of a socket has to be short: where there are to be some and the
    user's temporary directory has a long name, it is in the machine's.
    """
    prefix, root = f"tfos_nb-{kind}-", short_temporary_directory() if sockets else tempfile.gettempdir()
    for path in left_behind(prefix, root):
        shutil.rmtree(path, ignore_errors=True)
    directory = tempfile.mkdtemp(prefix=f"{prefix}{owner()}-", dir=root)
    _locks[directory] = lock = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system may have no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory


def remove_directory(directory: str) -> None:
    """Remove a directory of this process (:func:`private_directory`), and all that is in it. Idempotent."""
    shutil.rmtree(directory, ignore_errors=True)
    lock = _locks.pop(directory, None)
    if lock is not None:
        os.close(lock)


def python_path() -> tuple[str, ...]:
    """Return where this process imports from, for processes that start in another directory."""
    return tuple(entry or os.getcwd() for entry in sys.path)


def path_variable(*more: str) -> str:
    """Return a ``PYTHONPATH`` by which a child finds what this process does, and then what is in ``more``."""
    return os.pathsep.join([*filter(None, sys.path), *more])


def run_apart(*arguments: str, path: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in a process of its own, in which TensorFlow sees no GPU, and return what it printed.

    Parameters
    ----------
    *arguments : str
        The interpreter's.
    path : sequence of str
        What its ``sys.path`` has beside that of this process.
    seconds : float
        How long it may take.

    Raises
    ------
    subprocess.TimeoutExpired
        If it takes longer.
    """
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path_variable(*path), **quiet},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def short_temporary_directory() -> str:
    """Return the temporary directory, or the machine's where its name would make a socket's path too long."""
    root = tempfile.gettempdir()
    machines = "/tmp"  # noqa: S108 - the directory in it is this user's alone
    return root if len(os.fsencode(root)) <= _LONGEST_ROOT or not os.access(machines, os.W_OK) else machines


def owner() -> str:
    """Name this process in a name: its number, and of which container of which machine's numbers that is one.

    Hosts and containers may share a temporary directory, and in each of them the others' numbers are somebody else's
    or nobody's.
    """
    return f"{os.getpid()}-{machine()}"


@functools.cache
def machine() -> str:
    """Name whose process numbers are this process' own: the container's, on a machine since it was started."""
    space = "0"
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{space}-{boot()}"


@functools.cache
def boot() -> str:
    """Name this machine since it was started: by Linux' own identity of that (random(4)), or by the host's name."""
    identity = socket.gethostname()
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        identity = file.read().strip()
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def is_here(machines_boot: str, path: str) -> bool:
    """Return whether a file is on this machine; one of a shared directory is there on all that share it."""
    return machines_boot == boot() and os.path.exists(path)


def left_behind(prefix: str, root: str = "") -> list[str]:
    """Find what processes that are gone have left in the temporary directory: ``PREFIX<owner>-…`` (:func:`owner`).

    What processes of another host have left stays: nobody here can tell whether they are gone.
    """
    root, ours, found = root or tempfile.gettempdir(), f"{machine()}-", []
    for name in os.listdir(root) if os.path.isdir("/proc") else ():
        number, _, rest = name.removeprefix(prefix).partition("-")
        known = name.startswith(prefix) and number.isdigit() and rest.startswith(ours)
        path = os.path.join(root, name)
        if known and not os.path.exists(f"/proc/{number}") and not _is_held(path):
            found.append(path)
    return found


def _is_held(path: str) -> bool:
    """Return whether a process holds its lock: machines that were copied while they ran have one boot's identity."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def write_frame(stream: IO[bytes], message: Any) -> None:
    """Write one message to a pipe."""
    data = wire.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """Read one message from a pipe; None at its end.

    Raises
    ------
    ValueError
        If it is none. What comes after it is none either, since nobody knows where it begins.
    """
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (left,) = _LENGTH.unpack(head)
    if left > _LONGEST:
        raise ValueError(f"no message has {left} bytes")
    pieces = []
    while left and (piece := stream.read(min(left, _PIECE))):  # memory for what comes, not for what is announced
        pieces.append(piece)
        left -= len(piece)
    return None if left else wire.decode(b"".join(pieces))


class Channel:
    """Messages both ways over a socket pair between a process and its child."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = end.makefile("rb")
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Make a channel and the socket to hand to the child."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    @classmethod
    def of_fd(cls, fd: int) -> Channel:
        """Take up the end that the parent passed."""
        return cls(socket.socket(fileno=fd))

    def send(self, message: Any) -> bool:
        """Send, from any thread; False if the other side has gone."""
        data = wire.encode(message)
        try:
            with self._lock:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            return False
        return True

    def __iter__(self) -> Iterator[Any]:
        """Yield messages until the other side has gone.

        Raises
        ------
        ValueError
            If it says what is no message.
        """
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> Any:
        try:
            return read_frame(self._reader)
        except OSError:
            return None

    def close(self) -> None:
        """Hang up; a reader in another thread ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
