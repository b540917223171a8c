"""How many connections a port takes, and how long it waits for one that says nothing.

Whoever reaches a port can connect to it, and is a stranger until TLS has been agreed on and a token been sent. Each
connection is a descriptor of the process that listens. The driver's, which is the kernel of a notebook, keeps some for
itself: gRPC counts for it. Arrow Flight passes no such option to its gRPC, so a node's port for rows is looked after by
:class:`Strangers`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

__all__ = ["Strangers", "descriptors_left", "make_room", "raise_descriptors", "server_options"]

_HANDSHAKE_SECONDS = 20  # thousands of nodes that come at once wait for each other's; gRPC's own limit is 120
_IDLE_SECONDS = 60
_KEPT = 256  # descriptors for the process itself
_FEWEST = 64
_PLENTY = 1 << 16
_DESCRIPTORS = "/dev/fd"
_INTERNET = (socket.AF_INET, socket.AF_INET6)

_Peer = tuple[str, int]


def server_options() -> list[tuple[str, int]]:
    """Return what a gRPC server is told of them, by the descriptors that this process has left."""
    return [
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_SECONDS * 1000),
        # A node has a stream, and a task a question now and then; a stranger may have agreed on TLS, and say no more.
        ("grpc.max_connection_idle_ms", _IDLE_SECONDS * 1000),
        ("grpc.max_allowed_incoming_connections", descriptors_left()),
        # gRPC would turn away nodes that come while a thousand others wait to be let in, or that have waited for 30 s.
        ("grpc.server.max_pending_requests", 1_000_000),
        ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
        ("grpc.server_max_unrequested_time_in_server", 300),
    ]


def descriptors_left() -> int:
    """Return how many connections this process may take, so that it can still open what it needs."""
    most = _most_descriptors()
    used = len(os.listdir(_DESCRIPTORS)) if os.path.isdir(_DESCRIPTORS) else _KEPT
    # The other half is for what the kernel opens later: files, Spark's connections, other clusters' doors.
    return max(_FEWEST, (most - used - _KEPT) // 2)


def _most_descriptors() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else most


def make_room(connections: int) -> int:
    """Let this process have enough descriptors for so many connections, as far as it may; return how many it may take.

    It may have as many as its hard limit says. No more are taken than are needed: a process of the user's, such as the
    kernel, hands its limit on to programs that walk through all descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    missing = 2 * (connections - descriptors_left())  # one is kept for each that is taken
    if missing > 0:
        most = soft + missing if hard == resource.RLIM_INFINITY else min(soft + missing, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return descriptors_left()


def raise_descriptors() -> None:
    """Let this process have as many descriptors as it may, within reason: strangers take longer to take them all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        within_reason = _PLENTY if hard == resource.RLIM_INFINITY else min(hard, _PLENTY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, within_reason), hard))


class Strangers:
    """Those connected to a port of this process who have not made a call with the token.

    :meth:`look` hangs up on who has had its time, and on the eldest where there are too many.

    Parameters
    ----------
    port : int
        Where this process listens.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._most = max(_FEWEST, _most_descriptors() // 4)  # Spark's own tasks may come by hundreds
        self._known: set[_Peer] = set()
        self._since: dict[_Peer, float] = {}
        # A connection is looked at through a copy of its descriptor, whose number may be another's a moment later. The
        # copy has its place from the beginning, since strangers may leave none.
        self._nothing, self._copy = (os.open(os.devnull, os.O_RDONLY) for _ in range(2))

    def has_called(self, peer: str) -> None:
        """Learn that a peer, in gRPC's words (``ipv4:10.0.0.7:40123``), has brought the token. From any thread."""
        address, _, port = unquote(peer).partition(":")[2].rpartition(":")
        self._known.add((_plain(address), int(port)))

    def look(self, now: float) -> int:
        """Hang up, at a moment of the monotonic clock; return on how many. From one thread."""
        known = set(self._known)
        present = [peer for peer, _ in self._connections()]
        self._known.difference_update(known.difference(present))
        self._since = {peer: self._since.get(peer, now) for peer in present if peer not in self._known}
        eldest_first = sorted(self._since, key=self._since.__getitem__)
        leaving = set(eldest_first[: max(0, len(eldest_first) - self._most)])
        leaving.update(peer for peer, since in self._since.items() if now - since >= _HANDSHAKE_SECONDS)
        if leaving:
            for peer, connection in self._connections():
                if peer in leaving:
                    _hang_up(connection)
        return len(leaving)

    def _connections(self) -> Iterator[tuple[_Peer, socket.socket]]:
        """Yield who is connected to the port, with a socket to be used before the next one."""
        for descriptor in _descriptors():
            with contextlib.suppress(OSError):  # it is none, or not connected, or no more
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                os.dup2(descriptor, self._copy, inheritable=False)
                connection = socket.socket(fileno=self._copy)
                try:
                    if connection.family in _INTERNET and connection.getsockname()[1] == self._port:
                        address, port = connection.getpeername()[:2]
                        yield (_plain(address), port), connection
                finally:
                    connection.detach()
                    os.dup2(self._nothing, self._copy, inheritable=False)

    def close(self) -> None:
        """Look no more."""
        os.close(self._nothing)
        os.close(self._copy)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has left by itself in this very moment
        connection.shutdown(socket.SHUT_RDWR)


def _plain(address: str) -> str:
    """Return an address as the socket and gRPC both have it: without brackets, zone, and what maps IPv4 into IPv6."""
    return address.strip("[]").partition("%")[0].removeprefix("::ffff:")


def _descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:  # to look takes one, too, and none may be left
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _PLENTY))
