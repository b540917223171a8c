"""Limit how many connections a port takes, and how long it waits for a silent one.

Any process that reaches a port can connect to it. It is a stranger until it has finished the TLS handshake and sent the
token. Each connection uses a file descriptor of the listening process. The driver, which is a notebook's kernel, keeps
some for itself, with a limit in gRPC. Arrow Flight passes no such option to its gRPC, so :class:`UnauthenticatedPeers`
guards a node's port for rows.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

__all__ = ["UnauthenticatedPeers", "descriptors_left", "make_room", "raise_descriptors", "server_options"]

_HANDSHAKE_SECONDS = 20  # thousands of nodes that come at once wait for each other's; gRPC's own limit is 120
_IDLE_SECONDS = 60
_KEPT = 256  # descriptors for the process itself
_FEWEST = 64
_PLENTY = 1 << 16
_DESCRIPTORS = "/dev/fd"
_INTERNET = (socket.AF_INET, socket.AF_INET6)

_Peer = tuple[str, int]


def server_options() -> list[tuple[str, int]]:
    """Return a gRPC server's options for these limits, from the descriptors that this process has left."""
    return [
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_SECONDS * 1000),
        # A node has a stream, and a task asks now and then. A stranger may finish the handshake and then stay silent.
        ("grpc.max_connection_idle_ms", _IDLE_SECONDS * 1000),
        ("grpc.max_allowed_incoming_connections", descriptors_left()),
        # By default gRPC refuses nodes while a thousand others wait to be accepted, or after they have waited for 30 s.
        ("grpc.server.max_pending_requests", 1_000_000),
        ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
        ("grpc.server_max_unrequested_time_in_server", 300),
    ]


def descriptors_left() -> int:
    """Return how many connections this process may take while keeping descriptors for its own files."""
    most = _most_descriptors()
    used = len(os.listdir(_DESCRIPTORS)) if os.path.isdir(_DESCRIPTORS) else _KEPT
    # The other half is for what the kernel opens later: files, Spark's connections, other clusters' doors.
    return max(_FEWEST, (most - used - _KEPT) // 2)


def _most_descriptors() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else most


def make_room(connections: int) -> int:
    """Raise this process's limit of descriptors for so many connections; return how many connections it may take.

    The hard limit is the maximum. The limit is raised no more than needed: a user's process, such as the kernel, passes
    its limit to child programs, and some of these iterate over all descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    missing = 2 * (connections - descriptors_left())  # one is kept for each that is taken
    if missing > 0:
        most = soft + missing if hard == resource.RLIM_INFINITY else min(soft + missing, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return descriptors_left()


def raise_descriptors() -> None:
    """Raise this process's limit of descriptors as far as reasonable, so that strangers need longer to use them up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        within_reason = _PLENTY if hard == resource.RLIM_INFINITY else min(hard, _PLENTY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, within_reason), hard))


class UnauthenticatedPeers:
    """Peers connected to a port of this process that have not made a call with the token.

    :meth:`look` disconnects those that were silent for too long, and the oldest ones if they are too many.

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
        # A connection is inspected through a copy of its descriptor, because its number may be reused at any moment.
        # The copy's descriptor is reserved in advance, since strangers may use up all others.
        self._nothing, self._copy = (os.open(os.devnull, os.O_RDONLY) for _ in range(2))

    def has_called(self, peer: str) -> None:
        """Record that a peer, in gRPC's notation (``ipv4:10.0.0.7:40123``), has sent the token. From any thread."""
        address, _, port = unquote(peer).partition(":")[2].rpartition(":")
        self._known.add((_plain(address), int(port)))

    def look(self, now: float) -> int:
        """Disconnect strangers whose time is over at the monotonic time ``now``; return how many. From one thread."""
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
        """Yield the peers connected to the port, each with a socket that is valid until the next one."""
        for descriptor in filter(_is_socket, _descriptors()):
            # Suppressed: it is not connected, or closed by now.
            with contextlib.suppress(OSError), self._copy_of(descriptor) as connection:
                if connection.family in _INTERNET and connection.getsockname()[1] == self._port:
                    address, port = connection.getpeername()[:2]
                    yield (_plain(address), port), connection

    @contextlib.contextmanager
    def _copy_of(self, descriptor: int) -> Iterator[socket.socket]:
        os.dup2(descriptor, self._copy, inheritable=False)
        connection = socket.socket(fileno=self._copy)
        try:
            yield connection
        finally:
            connection.detach()
            os.dup2(self._nothing, self._copy, inheritable=False)

    def close(self) -> None:
        """Release the reserved descriptor."""
        os.close(self._nothing)
        os.close(self._copy)


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # closed by now
        return False


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer has just disconnected itself
        connection.shutdown(socket.SHUT_RDWR)


def _plain(address: str) -> str:
    """Return an address in a form comparable between socket and gRPC: without brackets, zone or IPv4-mapped prefix."""
    return address.strip("[]").partition("%")[0].removeprefix("::ffff:")


def _descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:  # listing them needs a descriptor too, and none may be left
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _PLENTY))
