"""Start processes that end with their parent, and the channel between the two.

A node is never forked from a process in which TensorFlow has run an operation: it would hang for ever in its first
``tf.function``. It may be forked from one that has only imported TensorFlow
(:mod:`tfos_nb.runtime.node.warm_process`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import io
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
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from tfos_nb.runtime.control import wire

__all__ = [
    "Channel",
    "Peer",
    "address_towards",
    "answers",
    "boot",
    "die_with_parent",
    "host_and_port",
    "is_here",
    "kill_group",
    "left_behind",
    "machine",
    "may_be_read_by_peer",
    "name_this_process",
    "owner",
    "peer_of",
    "private_directory",
    "python_path",
    "read_frame",
    "refuses",
    "remove_directory",
    "remove_left_behind",
    "run_apart",
    "short_temporary_directory",
    "signal_name",
    "start_module",
    "this_system",
    "ticks_at_start",
    "write_frame",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_PTRACER = 0x59616D61
_ANSWERS_WITHIN = 1.0  # seconds; a process that has ended refuses at once
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_LENGTH = struct.Struct("!Q")
_LONGEST = (1 << 32) + 64  # msgpack says in 32 bits how long a message is
_PIECE = 16 << 20
_LONGEST_ROOT = 45  # bytes of a temporary directory's name: a socket's path below it may have at most 103
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
    """Have the kernel end this process when its parent ends (Linux; elsewhere the channel's end does the same).

    The signal comes when the parent's thread that forked ends. So a parent must start its children from a thread that
    lives as long as it does.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT_VARIABLE)
    if expected and os.getppid() != int(expected):
        os._exit(1)  # the parent ended before the line above, so no signal will come


def name_this_process(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show for this process, on Linux, which keeps 15 bytes of it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode()[:15])


class Peer(NamedTuple):
    """The process that has made a pair of sockets, or that listened or connected, and its user."""

    pid: int
    user: int


def peer_of(connected: socket.socket) -> Peer | None:
    """Return who is at the other end of a Unix socket (SO_PEERCRED, unix(7)); None where the system does not say it."""
    if not hasattr(socket, "SO_PEERCRED"):  # only Linux has it
        return None
    pid, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, user)


def may_be_read_by_peer(connected: socket.socket) -> None:
    """Let the process at the other end of a Unix socket, and its children, read this one's memory, as py-spy does.

    Linux's Yama may allow that to parents only (``kernel.yama.ptrace_scope`` is 1), and the parent of a node's process
    is a warm process, not its supervisor. Without Yama there is nothing to allow.
    """
    if peer := peer_of(connected):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, ctypes.c_ulong(peer.pid), 0, 0, 0)


class _Process(Protocol):
    pid: int


def kill_group(process: _Process) -> None:
    """Kill a process and all that it started: TensorFlow ignores the polite signals."""
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
    """Return this host's address on the route to another host. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def host_and_port(host: str, port: int) -> str:
    """Format an address for gRPC: an IPv6 host is put in brackets (RFC 3986, section 3.2.2).

    Examples
    --------
    >>> host_and_port("10.0.0.7", 40123), host_and_port("fd00::7", 40123)
    ('10.0.0.7:40123', '[fd00::7]:40123')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def answers(host: str, port: int) -> bool:
    """Whether a process listens there and accepts a connection within a second."""
    try:
        socket.create_connection((host, port), _ANSWERS_WITHIN).close()
    except OSError:
        return False
    return True


def greets(address: str) -> bool:
    """Whether a gRPC server is alive at ``host:port``: it sends its settings to each client (RFC 9113, section 3.4).

    An accepted connection is not enough. When a process is killed, Linux closes its connections before its listening
    sockets, and accepts new connections until these are closed.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_WITHIN) as connection:
            return bool(connection.recv(1))
    except OSError:
        return False


def ticks_at_start(pid: int) -> int:
    """Return when a process was started, in ticks since the boot, which a change of the clock leaves alone; or 0.

    See proc_pid_stat(5), field 22.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


@functools.cache
def this_system() -> str:
    """Return what names the running kernel and its processes' numbers, among hosts and containers; empty if unknown.

    Its boot, which random(4) numbers, and the namespace of process numbers, which containers of one host do not share.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def refuses(host: str, port: int) -> bool:
    """Whether that host refuses the connection, since no process listens; a silent host may only be unreachable."""
    try:
        socket.create_connection((host, port), _ANSWERS_WITHIN).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def private_directory(kind: str, sockets: bool = True) -> str:
    """Make a directory for this process, and remove those of processes that were killed.

    It is in the temporary directory, and only this user can enter it. This process holds a lock on it until
    :func:`remove_directory`, or its own end. The path of a socket must be short. So with ``sockets``, and if the user's
    temporary directory has a long name, the directory is in the machine's temporary directory instead.
    """
    prefix, root = remove_left_behind(kind, sockets)
    directory = tempfile.mkdtemp(prefix=f"{prefix}{owner()}-", dir=root)
    _locks[directory] = lock = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some file systems have no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory


def remove_left_behind(kind: str, sockets: bool = True) -> tuple[str, str]:
    """Remove the directories that killed processes have left; return the prefix of their names, and where they are."""
    prefix, root = f"tfos_nb-{kind}-", short_temporary_directory() if sockets else tempfile.gettempdir()
    for path in left_behind(prefix, root):
        shutil.rmtree(path, ignore_errors=True)
    return prefix, root


def remove_directory(directory: str) -> None:
    """Remove a directory of this process (:func:`private_directory`), and all that is in it. Idempotent."""
    shutil.rmtree(directory, ignore_errors=True)
    lock = _locks.pop(directory, None)
    if lock is not None:
        os.close(lock)


def python_path() -> tuple[str, ...]:
    """Return this process's import path, for processes that start in another directory."""
    return tuple(entry or os.getcwd() for entry in sys.path)


def path_variable(*more: str) -> str:
    """Return a ``PYTHONPATH`` with this process's import path, followed by ``more``."""
    return os.pathsep.join([*filter(None, sys.path), *more])


def run_apart(*arguments: str, path: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in a new process in which TensorFlow sees no GPU, and return its result and output.

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
    """Return the temporary directory, or the machine's if its name would make a socket's path too long."""
    root = tempfile.gettempdir()
    machines = "/tmp"  # noqa: S108 - the directory in it is this user's alone
    return root if len(os.fsencode(root)) <= _LONGEST_ROOT or not os.access(machines, os.W_OK) else machines


def owner() -> str:
    """Return a unique name of this process for file names: its process id, container and machine.

    Hosts and containers may share a temporary directory, and each has its own process ids.
    """
    return f"{os.getpid()}-{machine()}"


@functools.cache
def machine() -> str:
    """Return a name for the set of process ids that this process sees: the container, on a machine since its boot."""
    space = "0"
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{space}-{boot()}"


@functools.cache
def boot() -> str:
    """Return a name of this machine since its boot: Linux' boot id (random(4)), or the host's name."""
    identity = socket.gethostname()
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        identity = file.read().strip()
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def is_here(machines_boot: str, path: str) -> bool:
    """Return whether a file is on this machine; a file in a shared directory exists on all machines that share it."""
    return machines_boot == boot() and os.path.exists(path)


def left_behind(prefix: str, root: str = "") -> list[str]:
    """Find entries of ended processes in the temporary directory: ``PREFIX<owner>-…`` (:func:`owner`).

    Entries of another host's processes stay: this host cannot tell whether those processes have ended.
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
    """Return whether a process holds a lock on it: machines that were cloned while running have the same boot id."""
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


def write_frame(stream: IO[bytes] | io.BufferedIOBase, message: Any) -> None:
    """Write one message to a pipe."""
    data = wire.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes] | io.BufferedIOBase) -> Any:
    """Read one message from a pipe; None at its end.

    Raises
    ------
    ValueError
        If the bytes are not a message. The reader cannot continue then, since the next message's start is unknown.
    """
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (left,) = _LENGTH.unpack(head)
    if left > _LONGEST:
        raise ValueError(f"a message cannot have {left} bytes")
    pieces = []
    while left and (piece := stream.read(min(left, _PIECE))):  # allocate only for bytes that have come
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
        """Send, from any thread; return False if the other side has gone."""
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
            If it sends bytes that are not a message.
        """
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> Any:
        try:
            return read_frame(self._reader)
        except OSError:
            return None

    def close(self) -> None:
        """Close the channel; a reader in another thread ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
