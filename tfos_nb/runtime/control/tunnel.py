"""Carry TensorBoard's bytes from the chief's executor to the driver: both ends of the connection.

::

    kernel's web server ── unix socket ──▶ TunnelListener (driver, in the door's loop)
                                               │ OpenTunnel(number), on the node's stream
                                               ▼
    TensorBoard ◀── unix socket ──── TunnelEnd (supervisor) ── carry: a stream of bytes each way ──▶ door

No process connects to an executor. The driver asks on the stream that the node keeps open, and the supervisor connects
to the door, as for everything else. Each connection of a browser is one gRPC stream. HTTP/2 multiplexes them over the
supervisor's one connection, and its flow control slows TensorBoard down when a page reads slowly. TLS and the token are
the door's.

A kernel whose cluster's driver side is on another host reaches that listener by a door, too::

    kernel's web server ── unix socket ──▶ TunnelEntry ── carry ──▶ door ─▶ TunnelForwarder ── unix socket ──▶ the above
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import socketserver
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from tfos_nb.runtime.control.wire import message

__all__ = ["OpenTunnel", "TunnelEnd", "TunnelEntry", "TunnelForwarder", "TunnelListener"]

logger = logging.getLogger(__name__)

_CHUNK = 64 << 10
_ANSWER_SECONDS = 10.0  # within which a supervisor must connect after it was asked
_DIAL_SECONDS = 10
_TIME = struct.Struct("ll")  # a timeval
_AT_ONCE = 32  # streams that one supervisor carries; a browser opens six


@message
@dataclass(frozen=True)
class OpenTunnel:
    """Request of the driver: connect TensorBoard with a stream of this number."""

    number: int


# --- the driver's end: everything runs in the door's loop ---------------------------------------------------------


@dataclass(eq=False)
class _TunnelConnection:
    """One connection that waits for its stream, then is spliced with it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class TunnelListener:
    """A unix socket on the driver; every connection to it comes out at the chief's TensorBoard.

    Parameters
    ----------
    path : str
        Where to listen; in a directory that other users cannot enter.
    ask : callable
        Sends a message to the node's supervisor; False if it has none now. Called in the door's loop.
    """

    def __init__(self, path: str, ask: Callable[[OpenTunnel], bool]) -> None:
        self.path = path
        self._ask = ask
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _TunnelConnection] = {}
        self._open: set[_TunnelConnection] = set()
        self._server: asyncio.AbstractServer | None = None

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._connected, self.path)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        for passage in self._open:
            passage.over.set()
            passage.writer.transport.abort()  # not close: that would wait for a page that does not read
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, passage = next(self._numbers), _TunnelConnection(reader, writer)
        self._waiting[number] = passage
        self._open.add(passage)
        try:
            if self._ask(OpenTunnel(number)):
                await asyncio.wait_for(passage.taken.wait(), _ANSWER_SECONDS)
                await passage.over.wait()
        except asyncio.TimeoutError:
            logger.info("a supervisor did not connect for TensorBoard within %.0f s", _ANSWER_SECONDS)
        finally:
            self._waiting.pop(number, None)
            writer.close()
            with contextlib.suppress(OSError):  # the page has gone
                await writer.wait_closed()  # until the page has read all; close() aborts a page that does not read
            self._open.discard(passage)

    async def carry(self, number: int, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Splice a supervisor's stream with the connection of that number: what the stream gets is yielded."""
        passage = self._waiting.pop(number, None)
        if passage is None:
            return
        passage.taken.set()
        towards_page = asyncio.create_task(_copy(incoming, passage.writer, passage.writer.close))
        try:
            while data := await passage.reader.read(_CHUNK):
                yield data
            await towards_page  # the page has sent everything, and still reads
        except ConnectionError:
            pass  # the page was closed
        finally:
            towards_page.cancel()
            passage.over.set()


async def _copy(incoming: AsyncIterator[bytes], writer: asyncio.StreamWriter, end: Callable[[], None]) -> None:
    """Write bytes, no faster than they are read; then end the connection, or this direction of it."""
    with contextlib.suppress(ConnectionError):
        async for data in incoming:
            writer.write(data)
            await writer.drain()
        end()


class TunnelForwarder:
    """Connect each stream that a client opens with a unix socket on this host.

    Parameters
    ----------
    path : callable
        Returns the socket's path, empty while there is none. Called in the door's loop.
    """

    def __init__(self, path: Callable[[], str]) -> None:
        self._path = path
        self._open: set[asyncio.StreamWriter] = set()

    async def close(self) -> None:
        """Close all connections."""
        for writer in self._open:
            writer.transport.abort()

    async def carry(self, number: int, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Splice a client's stream with a connection of its own: what the connection gets is yielded."""
        path = self._path()
        if not path:
            return
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:
            return
        self._open.add(writer)
        outwards = asyncio.create_task(_copy(incoming, writer, writer.write_eof))
        try:
            while data := await reader.read(_CHUNK):
                yield data
        except ConnectionError:
            pass  # the door closes
        finally:
            outwards.cancel()
            writer.close()
            self._open.discard(writer)


# --- the clients' ends: threads, like the rest of them --------------------------------------------------------------


class Carrier(Protocol):
    """Client that opens streams to the door; :class:`tfos_nb.runtime.control.door.DoorClient` implements it."""

    def carry(self, number: int, outgoing: Iterator[bytes]) -> Iterator[bytes]:
        """Open a stream of this number: send the iterator's bytes, and return an iterator over those received."""
        ...


class TunnelEnd:
    """Connects streams of the door with a unix socket on this host.

    Parameters
    ----------
    client : DoorClient
        What dials the door.
    path : callable
        The socket's path, or None while there is none.
    """

    def __init__(self, client: Carrier, path: Callable[[], str | None]) -> None:
        self._client = client
        self._path = path
        self._free = threading.BoundedSemaphore(_AT_ONCE)

    def open(self, asked: OpenTunnel) -> None:
        """Open the stream that the driver asked for, in a thread."""
        threading.Thread(target=self._run, args=(asked.number,), name="tfos_nb tunnel", daemon=True).start()

    def _run(self, number: int) -> None:
        with self._free:
            _exchange(self._client, number, self._dial())

    def _dial(self) -> socket.socket | None:
        path = self._path()
        if path is None:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Set the timeout in the system, not in Python: Python's makes the socket non-blocking, and when many connect at
        # once, a non-blocking socket is refused instead of queued.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(_DIAL_SECONDS, 0))
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            return None
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(0, 0))
        return connection


class TunnelEntry:
    """A unix socket of a kernel; every connection to it is a stream to a door that forwards it.

    Parameters
    ----------
    client : DoorClient
        What dials the door.
    path : str
        Where to listen; in a directory that other users cannot enter.
    """

    def __init__(self, client: Carrier, path: str) -> None:
        self.path = path
        self._server = _EntryServer(path, client)
        os.chmod(path, 0o600)
        threading.Thread(target=self._server.serve_forever, name="tfos_nb tunnel", daemon=True).start()

    def close(self) -> None:
        """Stop listening; open connections stay."""
        self._server.shutdown()
        self._server.server_close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)


class _EntryServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, path: str, client: Carrier) -> None:
        self._client = client
        super().__init__(path, socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Carry one connection, in a thread of its own."""
        _exchange(self._client, 0, request)


def _exchange(client: Carrier, number: int, connection: socket.socket | None) -> None:
    """Splice a stream of this number with a connection, to the end of either; None is a connection that has ended."""
    try:
        if connection is None:
            next(client.carry(number, iter(())), None)
            return
        for data in client.carry(number, _received(connection)):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        logger.debug("the connection of stream %d was closed", number)
    except Exception as error:  # noqa: BLE001 - of gRPC's many: the door, or this stream, has gone
        logger.debug("stream %d ended: %s", number, type(error).__name__)
    finally:
        if connection is not None:
            _hang_up(connection)


def _received(connection: socket.socket) -> Iterator[bytes]:
    """Yield a connection's bytes; gRPC asks for the next piece only after it has sent the last one."""
    with contextlib.suppress(OSError):
        while data := connection.recv(_CHUNK):
            yield data


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
