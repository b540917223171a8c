"""The driver's one port, and its three kinds of calls.

::

    executor side                                          driver
    ─────────────                                          ──────
    supervisor ── attend: a stream each way, one a node ─▶ Door ─▶ DoorHandler.arrived / received / left
    FeedTask   ── ask: a question, an answer ────────────▶ Door ─▶ DoorHandler.asked
    supervisor ── carry: bytes each way ─────────────────▶ Door ─▶ TunnelListener (tfos_nb.runtime.control.tunnel)

The door of a detached cluster's process on an executor is one, too: kernels ask it (tfos_nb.detached.server.CallDesk),
and it forwards their streams of bytes (TunnelForwarder).

gRPC over TLS. The key is made for this cluster and pinned by the executors, so no certificate authority is needed; a
256-bit token is in the metadata of every call. Both reach the executors inside Spark's own task closure. Payloads are
:mod:`tfos_nb.runtime.control.wire` messages.

The server runs in one thread with an asyncio loop, so that thousands of nodes cost no thread each. The
:class:`DoorHandler`'s methods are called in that thread and must not block.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio

from tfos_nb.errors import TfosError
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.admission import server_options
from tfos_nb.runtime.control.identity import SERVER_NAME, Identity
from tfos_nb.runtime.control.processes import host_and_port
from tfos_nb.runtime.control.tunnel import OpenTunnel, TunnelForwarder, TunnelListener

__all__ = [
    "ASK",
    "ATTEND",
    "Door",
    "DoorAddress",
    "DoorClient",
    "DoorHandler",
    "Link",
    "broadcast",
    "dial",
    "metadata_of",
]

logger = logging.getLogger(__name__)

ATTEND, ASK, _CARRY = "/tfos_nb.Door/Attend", "/tfos_nb.Door/Ask", "/tfos_nb.Door/Carry"
_NUMBER, _TOKEN = "tfos-number", "tfos-token"
_DIGITS = 18  # of a stream's number
_OPTIONS = [
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
]

# Nodes may ping without limit.
_SERVER_OPTIONS = [("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)]
_TICK = 1.0


@dataclass(frozen=True)
class DoorAddress:
    """All that an executor needs to reach the driver. Its repr leaves the secrets out.

    ``relayed`` says that host and port are a relay's, so answers take longer. ``patience`` is the number of seconds
    after which a silent driver counts as gone.
    """

    host: str
    port: int
    certificate: bytes = field(repr=False)
    token: str = field(repr=False)
    relayed: bool = False
    patience: float = 15.0


class Link:
    """The driver's end of one node's stream.

    Attributes
    ----------
    node : str or None
        The node's name. The handler sets it.
    stream : int or None
        The handler's number for this stream. The handler sets it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.node: str | None = None
        self.stream: int | None = None

    def send(self, message: Any) -> None:
        """Send a message to the node, from any thread; does nothing if the node has gone."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the stream is too
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

    def end(self) -> None:
        """End the stream after the messages that were sent."""
        self.send(None)

    async def _outgoing(self) -> AsyncIterator[bytes]:
        while (message := await self._outbox.get()) is not None:
            yield message.data if isinstance(message, _Encoded) else wire.encode(message)


@dataclass(frozen=True)
class _Encoded:
    """Message to many nodes, which share its encoded bytes."""

    data: bytes


def broadcast(links: Sequence[Link], message: Any) -> None:
    """Send the same message to many nodes of one door, from any thread: it is encoded once."""
    if not links:
        return
    encoded = _Encoded(wire.encode(message))

    def put() -> None:
        for link in links:
            link._outbox.put_nowait(encoded)

    with contextlib.suppress(RuntimeError):  # as above
        links[0]._loop.call_soon_threadsafe(put)


class DoorHandler(Protocol):
    """Handler of the door's messages. Called in the door's thread, one call at a time; must not block."""

    def arrived(self, link: Link, message: Any) -> None:
        """Take the first message of a stream."""

    def received(self, link: Link, message: Any) -> None:
        """Take every later one."""

    def left(self, link: Link) -> None:
        """Take the end of a stream, for whatever reason."""

    def asked(self, message: Any) -> Any:
        """Answer a question."""

    def ticked(self, late: float) -> None:
        """Check time limits, once a second. The call is ``late`` by so many seconds, in which no message was read."""


class Door:
    """The driver's gRPC server.

    Parameters
    ----------
    handler : DoorHandler
        Handles the messages.
    host : str
        The name or address by which executors reach the driver.
    bind : str
        The address to listen on.
    ports : range or None
        Ports to try in turn; None takes any free one.
    """

    def __init__(self, handler: DoorHandler, *, host: str, bind: str, ports: range | None = None) -> None:
        self._handler = handler
        self._host = host
        self._bind = bind
        self._ports = ports or range(0, 1)
        self._identity = Identity.create()
        self._token = secrets.token_hex(32)
        self._opened: Future[int] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._links: set[Link] = set()
        self._tunnel: TunnelListener | TunnelForwarder | None = None
        self._thread = threading.Thread(target=self._run, name="tfos_nb door", daemon=True)

    def open(self, timeout: float = 10.0) -> DoorAddress:
        """Listen, and return the address and secrets that executors need."""
        self._thread.start()
        port = self._opened.result(timeout)
        return DoorAddress(self._host, port, self._identity.certificate, self._token)

    def open_tunnel(self, path: str, ask: Callable[[OpenTunnel], bool], timeout: float = 10.0) -> None:
        """Listen on a unix socket whose connections come out at a node: see :class:`TunnelListener`. At most once."""
        assert self._loop is not None, "the door is open"
        self._tunnel = listener = TunnelListener(path, ask)
        asyncio.run_coroutine_threadsafe(listener.open(), self._loop).result(timeout)

    def forward(self, path: Callable[[], str]) -> None:
        """Connect the streams of bytes that clients open with a unix socket: see :class:`TunnelForwarder`."""
        self._tunnel = TunnelForwarder(path)

    def close_tunnel(self, timeout: float = 10.0) -> None:
        """Stop listening on the unix socket, if it does; the door stays open."""
        tunnel, self._tunnel = self._tunnel, None
        if tunnel is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(tunnel.close(), self._loop).result(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """End every stream and stop listening. Idempotent; from any thread but the door's own."""
        loop, closing = self._loop, self._closing
        if loop is not None and closing is not None:
            with contextlib.suppress(RuntimeError):  # already closed
                loop.call_soon_threadsafe(closing.set)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the thread that waits in open() must receive it
            if self._opened.done():
                logger.exception("the door's thread ended by an error")
            else:
                self._opened.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_quiet_poller)
        self._closing = asyncio.Event()
        server = grpc.aio.server(options=[*_OPTIONS, *_SERVER_OPTIONS, *server_options()])
        server.add_generic_rpc_handlers((_Handlers(self),))
        port = self._listen(server)
        await server.start()
        self._opened.set_result(port)
        ticker = asyncio.create_task(self._tick())
        await self._closing.wait()
        ticker.cancel()
        if self._tunnel is not None:
            await self._tunnel.close()
        for link in self._links:
            link.end()
        await server.stop(grace=0.5)

    def _listen(self, server: grpc.aio.Server) -> int:
        credentials = grpc.ssl_server_credentials([(self._identity.key, self._identity.certificate)])
        for port in self._ports:
            if _is_taken(self._bind, port):
                continue
            with contextlib.suppress(RuntimeError):
                if bound := server.add_secure_port(host_and_port(self._bind, port), credentials):
                    return int(bound)
        given = f"{self._ports[0]}-{self._ports[-1]}" if len(self._ports) > 1 else str(self._ports[0] or "")
        where = f"port {given}: it is in use, or " if given else "any port: "
        raise TfosError(
            f"the driver could not listen on {self._bind}, {where}{self._bind} is not a known address of this machine. "
            "Set TFOS_SERVER_HOST and TFOS_SERVER_PORT (one port, or a range such as 40000-40100)"
        )

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_TICK)  # this is the clock itself
            try:
                self._handler.ticked(time.monotonic() - before - _TICK)
            except Exception:
                logger.exception("the handler's check of time limits failed")

    async def _attend(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        link = Link(asyncio.get_running_loop())
        self._links.add(link)
        reader = asyncio.create_task(self._read(link, requests))
        try:
            async for reply in link._outgoing():
                yield reply
        finally:
            self._links.discard(link)
            reader.cancel()

    async def _read(self, link: Link, requests: AsyncIterator[bytes]) -> None:
        take = self._handler.arrived
        try:
            async for request in requests:
                take(link, wire.decode(request))
                take = self._handler.received
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("a node's message could not be processed")
        finally:
            self._handler.left(link)
            link.end()

    async def _ask(self, request: bytes, context: Any) -> bytes:
        return wire.encode(self._handler.asked(wire.decode(request)))

    async def _carry(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        number = _said(context.invocation_metadata(), _NUMBER)
        if self._tunnel is not None and number.isdigit() and len(number) <= _DIGITS:
            async for data in self._tunnel.carry(int(number), requests):
                yield data

    def _may_speak(self, metadata: Any) -> bool:
        return hmac.compare_digest(_said(metadata, _TOKEN).encode(), self._token.encode())


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, door: Door) -> None:
        self._door = door
        self._stranger = grpc.stream_stream_rpc_method_handler(_turn_away)
        self._methods = {
            ATTEND: grpc.stream_stream_rpc_method_handler(door._attend),
            ASK: grpc.unary_unary_rpc_method_handler(door._ask),
            _CARRY: grpc.stream_stream_rpc_method_handler(door._carry),
        }

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        known = self._door._may_speak(details.invocation_metadata)
        return self._methods.get(details.method) if known else self._stranger


async def _turn_away(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    """Refuse a call without reading it: gRPC would read a whole question before any code could inspect it."""
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid token")
    yield b""


def _said(metadata: Any, name: str) -> str:
    return next((str(value) for key, value in metadata or () if key == name), "")


def _quiet_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Drop the one error report that gRPC itself causes.

    All asyncio loops of a process share gRPC's poller. Each is woken, one of them reads, and the others get this error,
    which is harmless (github.com/grpc/grpc, issue 25364).
    """
    if isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)


def dial(address: DoorAddress, make: Callable[..., Any] = grpc.secure_channel, *options: tuple[str, Any]) -> Any:
    """Return a channel to a door, of ``grpc`` or, with ``make``, of ``grpc.aio``; nothing is sent yet."""
    patience = 120.0 if address.relayed else min(address.patience, 86_400.0)  # a C int of ms
    return make(
        host_and_port(address.host, address.port),
        grpc.ssl_channel_credentials(root_certificates=address.certificate),
        options=[
            *_OPTIONS,
            ("grpc.ssl_target_name_override", SERVER_NAME),
            ("grpc.enable_http_proxy", 0),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", int(patience * 1000)),  # also sets TCP_USER_TIMEOUT, for data already sent
            *options,
        ],
    )


def metadata_of(address: DoorAddress) -> tuple[tuple[str, str], ...]:
    """Return the metadata that every call must have."""
    return ((_TOKEN, address.token),)


class DoorClient:
    """The executor's end of the door.

    Parameters
    ----------
    address : DoorAddress
        From the driver.
    """

    def __init__(self, address: DoorAddress) -> None:
        self._metadata = metadata_of(address)
        self._channel = dial(address)
        self._ask = self._channel.unary_unary(ASK)

    def ask(self, question: Any, timeout: float = 30.0) -> Any:
        """Ask the driver; return its answer."""
        return wire.decode(self._ask(wire.encode(question), timeout=timeout, metadata=self._metadata))

    def attend(self) -> DoorStream:
        """Open this node's stream."""
        return DoorStream(self._channel.stream_stream(ATTEND), self._metadata)

    def carry(self, number: int, outgoing: Iterator[bytes]) -> Iterator[bytes]:
        """Open the stream of bytes that the driver asked for by this number."""
        method = self._channel.stream_stream(_CARRY)
        answers: Iterator[bytes] = method(outgoing, metadata=(*self._metadata, (_NUMBER, str(number))))
        return answers

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> DoorClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class DoorStream:
    """The executor's end of one node's stream: iterate over it for the driver's messages."""

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = method(iter(self._outbox.get, None), metadata=metadata)

    def send(self, message: Any) -> None:
        """Send a message to the driver, from any thread."""
        self._outbox.put(wire.encode(message))

    def __iter__(self) -> Iterator[Any]:
        """Yield the driver's messages until the stream ends, in order or not."""
        try:
            for data in self._call:
                yield wire.decode(data)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise TfosError("the driver refused this node's token: it belongs to another cluster") from None
            logger.debug("the stream to the driver ended: %s", error.code())

    def end(self) -> None:
        """End this side of the stream; messages that were sent still arrive."""
        self._outbox.put(None)


def _is_taken(host: str, port: int) -> bool:
    """Whether another server listens on a port: gRPC would write a line about it to standard error."""
    with contextlib.suppress(OSError):  # gRPC says what is wrong with the address
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            try:
                probe.bind(address)
            except OSError as error:
                return error.errno == errno.EADDRINUSE
    return False
