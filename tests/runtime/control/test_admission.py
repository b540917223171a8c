"""Unauthenticated connections to a node's row port are limited in time and number; rows still arrive."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.runtime.feed.test_transfer import batch_of, driver_of, ids_of_partition, send
from tests.waiting import until
from tfos_nb.runtime.control import admission
from tfos_nb.runtime.control.admission import UnauthenticatedPeers
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.feed.transfer import FeedServer

SECONDS = 20.0


@pytest.fixture
def server() -> Iterator[FeedServer]:
    with tempfile.TemporaryDirectory(prefix="feed-") as directory:
        passes = RowQueue("worker:0", directory, 1 << 20, 0, lambda message: None)
        made = FeedServer(passes, directory=directory, host="127.0.0.1", token="right")
        yield made
        passes.stop()
        made.close()


def connected(server: FeedServer, stack: ExitStack, count: int = 1) -> list[socket.socket]:
    """Open ``count`` connections that send nothing."""
    where = server.place.host, server.place.port
    return [stack.enter_context(socket.create_connection(where, SECONDS)) for _ in range(count)]


def hung_up(connection: socket.socket, seconds: float = SECONDS) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_a_silent_connection_is_closed_after_its_time_limit(server: FeedServer) -> None:
    strangers = UnauthenticatedPeers(server.place.port)
    with ExitStack() as stack:
        [stranger] = connected(server, stack)
        assert until(lambda: strangers.look(100.0) == 0 and len(strangers._since) == 1, SECONDS)
        assert strangers.look(119.9) == 0
        assert not hung_up(stranger, 0.1)
        assert strangers.look(120.0) == 1
        assert hung_up(stranger)
        assert until(lambda: strangers.look(121.0) == 0 and not strangers._since, SECONDS), "it is forgotten"


def test_the_oldest_of_too_many_connections_are_closed(server: FeedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_FEWEST", 3)
    monkeypatch.setattr(admission, "_most_descriptors", lambda: 12)
    strangers = UnauthenticatedPeers(server.place.port)
    with ExitStack() as stack:
        first = connected(server, stack, 2)
        assert until(lambda: strangers.look(1.0) == 0 and len(strangers._since) == 2, SECONDS)
        later = connected(server, stack, 3)
        assert until(lambda: len([peer for peer, _ in strangers._connections()]) == 5, SECONDS)
        assert strangers.look(2.0) == 2
        assert all(map(hung_up, first))
        assert not any(hung_up(one, 0.1) for one in later)


def test_an_authenticated_connection_is_never_closed() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        mine, anothers = (stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2))
        accepted = [stack.enter_context(listener.accept()[0]) for _ in range(2)]
        strangers = UnauthenticatedPeers(port)
        strangers.has_called(f"ipv4:127.0.0.1:{mine.getsockname()[1]}")
        assert (strangers.look(0.0), strangers.look(1000.0)) == (0, 1)
        assert hung_up(anothers)
        accepted[0].sendall(b"still here")
        assert mine.recv(10) == b"still here"


@pytest.mark.parametrize("written", ["ipv6:%5B::1%5D:{}", "ipv6:[::1]:{}"])
def test_a_peers_address_is_understood_in_every_form_grpc_writes(written: str) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6))
        client = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
        stack.enter_context(listener.accept()[0])
        strangers = UnauthenticatedPeers(listener.getsockname()[1])
        strangers.has_called(written.format(client.getsockname()[1]))
        assert (strangers.look(0.0), strangers.look(1000.0)) == (0, 0)


def test_closing_a_connection_that_is_already_gone_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as never_connected:
        strangers = UnauthenticatedPeers(1)
        monkeypatch.setattr(strangers, "_connections", lambda: [(("10.0.0.7", 1), never_connected)])
        assert (strangers.look(0.0), strangers.look(1000.0)) == (0, 1)


def test_rows_arrive_while_many_strangers_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_FEWEST", 5)
    ids = ids_of_partition(0, 300)
    with ExitStack() as stack, driver_of(1) as driver:
        monkeypatch.setattr(admission, "_HANDSHAKE_SECONDS", 0)  # silent connections are closed at once
        server = driver.nodes["worker:0"].server
        strangers = connected(server, stack, 60)
        place = driver.places["worker:0"]
        driver.places["worker:0"] = FeedPlace("/nowhere", place.host, place.port, place.certificate)
        feed = driver.begin()
        driver.read()

        def batches() -> Iterator[object]:
            for number, start in enumerate(range(0, 300, 100)):
                server.look(100.0 * (number + 1))  # the stream is open by the second batch
                yield batch_of(ids[start : start + 100])

        assert send(driver, feed, batches()) == 300
        driver.finish(feed)
        driver.await_readers()
        assert driver.nodes["worker:0"].seen == [ids]
        assert all(map(hung_up, strangers))


def test_a_node_without_free_descriptors_can_still_close_connections() -> None:
    """Run in a separate process with a low descriptor limit."""
    told = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=120, check=False)
    assert (told.returncode, told.stdout.strip()) == (0, "hung up on all"), told.stderr[-3000:]


FULL = """
import os, resource, socket, time
from tfos_nb.runtime.control.admission import UnauthenticatedPeers

listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
strangers = UnauthenticatedPeers(port)
clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
held = [listener.accept()[0] for _ in clients]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
assert strangers.look(0.0) == 0
assert strangers.look(60.0) == 20
assert all(client.recv(1) == b"" for client in clients)
print("hung up on all")
"""


@pytest.mark.parametrize(("hard", "takes"), [(4096, 500), (1000, None)])
def test_the_descriptor_limit_is_raised_for_connections_up_to_the_hard_limit(hard: int, takes: int | None) -> None:
    code = (
        "import resource; from tfos_nb.runtime.control.admission import descriptors_left, make_room;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (600, {hard})); before = descriptors_left();"
        "again = make_room(10); unchanged = resource.getrlimit(resource.RLIMIT_NOFILE)[0];"
        "print(before, again, unchanged, make_room(500), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    before, again, unchanged, most, soft = map(int, told.stdout.split())
    assert before == again
    assert unchanged == 600
    if takes is None:
        assert soft == hard
        assert before < most < 500
    else:
        assert most == takes
        assert soft == 600 + 2 * (takes - before)


def test_a_nodes_process_raises_its_soft_descriptor_limit() -> None:
    code = (
        "import resource; from tfos_nb.runtime.control.admission import raise_descriptors;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); raise_descriptors();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(told.stdout) == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))
