"""The driver's one port: callers without the token get nothing, and the end of every stream is noticed."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from tests.waiting import until
from tfos_nb.driver.ended_doors import ended_doors
from tfos_nb.errors import TfosError
from tfos_nb.runtime.control import admission, wire
from tfos_nb.runtime.control.door import Door, DoorAddress, DoorClient, Link
from tfos_nb.runtime.control.identity import SERVER_NAME, Identity
from tfos_nb.runtime.control.lifecycle import EndNode, FeedPlace, NodeJob, Refused, Reservation, Stop
from tfos_nb.runtime.feed.feed_task import FeedTask
from tfos_nb.runtime.feed.transfer import FeedTicket, NodeStream
from tfos_nb.runtime.node.spark_task import NodeTask

SECONDS = 20.0
ATTEND, ASK = "/tfos_nb.Door/Attend", "/tfos_nb.Door/Ask"


class RecordingHandler:
    """Returns each question as its answer and records every call."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.calls: list[tuple[str, Any]] = []
        self.links: list[Link] = []
        self.ticks = 0

    def _record(self, name: str, message: Any) -> None:
        with self.changed:
            self.calls.append((name, message))
            self.changed.notify_all()

    def arrived(self, link: Link, message: Any) -> None:
        self.links.append(link)
        self._record("arrived", message)

    def received(self, link: Link, message: Any) -> None:
        self._record("received", message)

    def left(self, link: Link) -> None:
        self._record("left", None)

    def asked(self, message: Any) -> Any:
        self._record("asked", message)
        if isinstance(message, Stop):
            raise RuntimeError(message.reason)
        return message

    def ticked(self, late: float) -> None:
        with self.changed:
            self.ticks += 1
            self.changed.notify_all()

    def count(self, name: str) -> int:
        return sum(call == name for call, _ in self.calls)

    def await_count(self, name: str, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.count(name) >= count, SECONDS), self.calls[-5:]


@pytest.fixture(scope="module", autouse=True)
def _no_doors_of_other_tests() -> None:
    ended_doors.close_all()


@pytest.fixture
def handler() -> RecordingHandler:
    return RecordingHandler()


@pytest.fixture
def door(handler: RecordingHandler) -> Iterator[Door]:
    door = Door(handler, host="127.0.0.1", bind="127.0.0.1")
    yield door
    door.close()


@pytest.fixture
def address(door: Door) -> DoorAddress:
    return door.open()


def threads_of_the_door() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tfos_nb door"]


def raw_channel(address: DoorAddress) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(root_certificates=address.certificate)
    options = [("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.enable_http_proxy", 0)]
    return grpc.secure_channel(f"{address.host}:{address.port}", credentials, options)


def call(channel: grpc.Channel, method: str, request: bytes, metadata: Any) -> bytes:
    if method == ASK:
        return bytes(channel.unary_unary(ASK)(request, timeout=SECONDS, metadata=metadata))
    stream = channel.stream_stream(ATTEND)(iter([request]), timeout=SECONDS, metadata=metadata)
    return b"".join(stream)


def test_a_question_is_answered(address: DoorAddress) -> None:
    with DoorClient(address) as client:
        assert client.ask(Reservation("worker:0", "host", 1, "0", 0, 7)) == Reservation(
            "worker:0", "host", 1, "0", 0, 7
        )


def test_messages_arrive_in_order_in_both_directions(address: DoorAddress, handler: RecordingHandler) -> None:
    with DoorClient(address) as client:
        stream = client.attend()
        for number in range(100):
            stream.send(number)
        handler.await_count("received", 99)
        assert [message for name, message in handler.calls if name != "left"] == list(range(100))
        assert handler.calls[0][0] == "arrived"
        for number in range(100):
            handler.links[0].send(number)
        handler.links[0].end()
        assert list(stream) == list(range(100))
        stream.end()


@pytest.mark.parametrize("method", [ASK, ATTEND])
@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param((), id="no token"),
        pytest.param((("tfos-token", ""),), id="empty token"),
        pytest.param((("tfos-token", "0" * 64),), id="wrong token"),
        pytest.param((("authorization", "Bearer x"),), id="another header"),
    ],
)
def test_a_caller_without_the_token_is_not_heard(
    address: DoorAddress, handler: RecordingHandler, method: str, metadata: Any
) -> None:
    with raw_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        call(channel, method, wire.encode(EndNode()), metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert handler.calls == []


@pytest.mark.parametrize("method", [ASK, ATTEND, "/tfos_nb.Door/Other"])
def test_a_stranger_is_refused_before_its_message_is_read(
    address: DoorAddress, handler: RecordingHandler, method: str
) -> None:
    """Otherwise anybody could make the driver hold a thousand questions of 256 MiB each."""
    told = threading.Event()

    def says_nothing() -> Iterator[bytes]:
        assert told.wait(SECONDS)
        yield from ()

    with raw_channel(address) as channel:
        call = channel.stream_unary(method).future(says_nothing(), timeout=SECONDS, metadata=())
        assert call.exception().code() is grpc.StatusCode.UNAUTHENTICATED
        told.set()
    assert handler.calls == []


def test_silent_strangers_are_disconnected_and_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each connection takes a descriptor of the notebook's kernel, which usually has 1,024."""
    monkeypatch.setattr(admission, "_HANDSHAKE_SECONDS", 2)
    monkeypatch.setattr(admission, "descriptors_left", lambda: 40)
    handler = RecordingHandler()
    door = Door(handler, host="127.0.0.1", bind="127.0.0.1")
    address = door.open()
    with ExitStack() as stack:
        stack.callback(door.close)
        strangers = [stack.enter_context(socket.create_connection((address.host, address.port))) for _ in range(100)]
        assert until(lambda: len(still_open(strangers)) <= 40, SECONDS)
        assert until(lambda: not still_open(strangers), SECONDS)
        with DoorClient(address) as client:
            assert client.ask(EndNode()) == EndNode()


def test_strangers_who_send_nothing_after_the_tls_handshake_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_IDLE_SECONDS", 1)
    handler = RecordingHandler()
    door = Door(handler, host="127.0.0.1", bind="127.0.0.1")
    address = door.open()
    with ExitStack() as stack:
        stack.callback(door.close)
        client = stack.enter_context(DoorClient(address))
        node = client.attend()
        node.send(EndNode())
        strangers = [stack.enter_context(raw_channel(address)) for _ in range(3)]
        for stranger in strangers:
            grpc.channel_ready_future(stranger).result(SECONDS)
        lost = [threading.Event() for _ in strangers]
        for stranger, event in zip(strangers, lost, strict=True):
            stranger.subscribe(lambda state, event=event: state is grpc.ChannelConnectivity.IDLE and event.set())
        assert all(event.wait(SECONDS) for event in lost)
        assert client.ask(EndNode()) == EndNode()
        assert not any(name == "left" for name, *_ in handler.calls), "a node's stream may be silent for long"


def still_open(connections: list[socket.socket]) -> list[socket.socket]:
    found = []
    for connection in connections:
        connection.setblocking(False)
        try:
            if connection.recv(1):
                found.append(connection)
        except BlockingIOError:
            found.append(connection)
        except OSError:
            pass
    return found


def test_a_node_of_another_cluster_is_refused_with_that_reason(address: DoorAddress, handler: RecordingHandler) -> None:
    other = DoorAddress(address.host, address.port, address.certificate, "f" * 64)
    with DoorClient(other) as client:
        stream = client.attend()
        stream.send(EndNode())
        with pytest.raises(TfosError, match="belongs to another cluster"):
            list(stream)
        stream.end()
    assert handler.calls == []


def test_thousands_of_calls_to_a_busy_driver_are_all_answered(
    address: DoorAddress, handler: RecordingHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, free = threading.Event(), threading.Event()

    def asked(message: Any) -> Any:
        if message == "first":
            busy.set()
            assert free.wait(SECONDS)
        return message

    monkeypatch.setattr(handler, "asked", asked)
    token = (("tfos-token", address.token),)
    with raw_channel(address) as channel:
        ask = channel.unary_unary(ASK)
        first = ask.future(wire.encode("first"), timeout=SECONDS, metadata=token)
        assert busy.wait(SECONDS)
        others = [ask.future(wire.encode(number), timeout=SECONDS, metadata=token) for number in range(3500)]
        free.set()
        assert wire.decode(first.result()) == "first"
        assert [wire.decode(other.result()) for other in others] == list(range(3500))


def test_the_right_token_alone_opens_no_other_method(address: DoorAddress, handler: RecordingHandler) -> None:
    token = (("tfos-token", address.token),)
    with raw_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/tfos_nb.Door/Other")(b"", timeout=SECONDS, metadata=token)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert handler.calls == []


def test_a_client_without_tls_is_refused(address: DoorAddress, handler: RecordingHandler) -> None:
    metadata = (("tfos-token", address.token),)
    with grpc.insecure_channel(f"{address.host}:{address.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(ASK)(wire.encode(1), timeout=5, metadata=metadata)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert handler.calls == []


def test_a_client_refuses_a_door_with_another_key(address: DoorAddress, handler: RecordingHandler) -> None:
    imposter = DoorAddress(address.host, address.port, Identity.create().certificate, address.token)
    with DoorClient(imposter) as client, pytest.raises(grpc.RpcError) as caught:
        client.ask(1, timeout=5)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert handler.calls == []


def test_the_port_speaks_tls_and_nothing_else(address: DoorAddress) -> None:
    context = ssl.create_default_context(cadata=address.certificate.decode())
    with socket.create_connection((address.host, address.port), SECONDS) as plain:
        with context.wrap_socket(plain, server_hostname=SERVER_NAME) as secure:
            assert secure.version() in ("TLSv1.2", "TLSv1.3")


@pytest.mark.parametrize("garbage", [b"\x80\x04K\x07.", b"\xc1\xc1", b""], ids=["a pickle", "noise", "nothing"])
def test_garbage_from_a_node_ends_only_its_own_stream(
    address: DoorAddress, handler: RecordingHandler, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    token = (("tfos-token", address.token),)
    with raw_channel(address) as channel:
        assert call(channel, ATTEND, garbage, token) == b""
        with pytest.raises(grpc.RpcError):
            call(channel, ASK, garbage, token)
    handler.await_count("left", 1)
    assert handler.count("arrived") == handler.count("asked") == 0
    with DoorClient(address) as client:  # the door still works
        assert client.ask("well?") == "well?"
    assert "could not be processed" in caplog.text


def test_an_error_of_the_handler_reaches_only_the_caller(address: DoorAddress) -> None:
    with DoorClient(address) as client:
        with pytest.raises(grpc.RpcError):
            client.ask(Stop("an error of the handler", 0.0))
        assert client.ask(1) == 1


def test_a_node_that_hangs_up_is_noticed(address: DoorAddress, handler: RecordingHandler) -> None:
    client = DoorClient(address)
    stream = client.attend()
    stream.send(EndNode())
    handler.await_count("arrived", 1)
    client.close()
    handler.await_count("left", 1)
    stream.end()
    handler.links[0].send(EndNode())  # no node is connected: nothing happens


def test_a_node_that_ends_its_stream_is_noticed_after_its_last_message(
    address: DoorAddress, handler: RecordingHandler
) -> None:
    with DoorClient(address) as client:
        stream = client.attend()
        for number in range(3):
            stream.send(number)
        stream.end()
        assert list(stream) == []
    handler.await_count("left", 1)
    assert [name for name, _ in handler.calls] == ["arrived", "received", "received", "left"]


def test_two_hundred_streams_share_one_thread(door: Door, address: DoorAddress, handler: RecordingHandler) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(DoorClient(address))
        before = threading.active_count()
        streams = [client.attend() for _ in range(200)]
        for number, stream in enumerate(streams):
            stream.send(number)
        handler.await_count("arrived", 200)
        assert sorted(message for _, message in handler.calls) == list(range(200))
        assert len(threads_of_the_door()) == 1
        assert client.ask("and a question") == "and a question"
        for link in handler.links:
            link.send(EndNode())
        assert [next(iter(stream)) for stream in streams] == [EndNode()] * 200
        door.close()
        assert [list(stream) for stream in streams] == [[]] * 200
        assert handler.count("left") == 200
        for stream in streams:
            stream.end()
    assert threads_of_the_door() == []
    never = threading.Event()
    for _ in range(100):  # the streams' own threads, on the nodes' side
        if threading.active_count() <= before:
            break
        never.wait(0.1)
    assert threading.active_count() <= before


def test_close_may_be_called_twice_or_before_open(handler: RecordingHandler) -> None:
    door = Door(handler, host="127.0.0.1", bind="127.0.0.1")
    door.close()
    door.open()
    door.close()
    door.close()
    assert threads_of_the_door() == []


def test_nobody_can_connect_after_close(door: Door, address: DoorAddress) -> None:
    door.close()
    with pytest.raises(ConnectionRefusedError), socket.create_connection((address.host, address.port), SECONDS):
        pass


def test_the_clock_keeps_ticking(address: DoorAddress, handler: RecordingHandler) -> None:
    with handler.changed:
        assert handler.changed.wait_for(lambda: handler.ticks >= 2, SECONDS)


def test_a_used_port_is_skipped_and_a_fully_used_range_is_named(
    handler: RecordingHandler, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        full = Door(handler, host="127.0.0.1", bind="127.0.0.1", ports=range(port, port + 1))
        with pytest.raises(TfosError, match=f"could not listen on 127.0.0.1, port {port}: .*TFOS_SERVER_PORT"):
            full.open()
        full.close()
        door = Door(handler, host="127.0.0.1", bind="127.0.0.1", ports=range(port, port + 50))
        try:
            assert door.open().port in range(port + 1, port + 50)
            assert capfd.readouterr().err == "", "gRPC has nothing to say of a used port"
        finally:
            door.close()


def test_an_address_of_another_machine_is_named(handler: RecordingHandler) -> None:
    door = Door(handler, host="192.0.2.77", bind="192.0.2.77")
    with pytest.raises(TfosError, match=r"could not listen on 192\.0\.2\.77.*is not a known address of this machine"):
        door.open()


SECRET = "5ec3e7" * 10
ADDRESS = DoorAddress("host", 1, SECRET.encode(), SECRET)
PLACE = FeedPlace("/s", "host", 1, SECRET.encode())


@pytest.mark.parametrize(
    "holder",
    [
        ADDRESS,
        PLACE,
        Identity(SECRET.encode(), SECRET.encode()),
        NodeJob(
            "worker:0", "c", 0, "0", "h", 1, True, certificate=SECRET.encode(), token=SECRET, payload=SECRET.encode()
        ),
        NodeTask(("worker:0",), "c", ADDRESS, True, frozenset(), {}, {}, (), SECRET.encode()),
        FeedTask(1, ADDRESS),
        Reservation("worker:0", "h", 1, "0", 0, 7),
        Refused("worker:0", "h", "why"),
        DoorClient(ADDRESS),
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_no_secret_is_in_a_repr(holder: Any) -> None:
    assert SECRET not in repr(holder)
    assert SECRET not in str(holder)


def test_the_repr_of_the_feeds_stream_does_not_contain_its_token() -> None:
    fields = {field.name: field.repr for field in NodeStream.__dataclass_fields__.values()}
    assert not fields["token"]
    assert not fields["place"]
    assert SECRET not in repr(FeedTicket(1, 2))


def test_each_door_has_a_token_and_a_key_of_its_own(handler: RecordingHandler) -> None:
    doors = [Door(handler, host="127.0.0.1", bind="127.0.0.1") for _ in range(2)]
    try:
        one, two = (door.open() for door in doors)
        assert len(one.token) == 64
        assert one.token != two.token
        assert one.certificate != two.certificate
    finally:
        for door in doors:
            door.close()
