"""Which hosts answer: one that accepts or refuses a connection does, one that says nothing does not."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tfos_nb.runtime.node.links import AskLinks, LinksSeen, see_links


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that does not answer: the kernel drops further connections to a server with a full backlog."""
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.9", 0), backlog=0))
        for _ in range(3):
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def test_hosts_that_accept_or_refuse_a_connection_are_reached_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.2", 0))  # as a supervisor holds the port before TensorFlow listens
        places = {"worker:0": server.getsockname(), "worker:1": bound.getsockname()}
        since = time.monotonic()
        assert see_links("worker:2", AskLinks(3, places), seconds=30.0) == LinksSeen("worker:2", 3)
        assert time.monotonic() - since < 10.0


def test_a_node_says_whether_its_own_tensorflow_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        places = {"worker:0": server.getsockname(), "worker:1": bound.getsockname()}
        assert see_links("worker:0", AskLinks(1, places)).serves
        assert not see_links("worker:1", AskLinks(1, places)).serves
        assert not see_links("worker:2", AskLinks(1, places)).serves, "it is absent"


def test_all_nodes_of_a_host_that_does_not_answer_are_named(silent: int) -> None:
    places = {"worker:0": ("127.0.0.1", 1), "worker:1": ("127.0.0.9", silent), "worker:3": ("127.0.0.9", 1)}
    assert see_links("worker:2", AskLinks(1, places), seconds=0.3).unreached == ("worker:1", "worker:3")


def test_many_hosts_are_asked_in_groups() -> None:
    places = {f"worker:{number}": (f"127.0.{number // 250}.{number % 250 + 1}", 1) for number in range(600)}
    assert see_links("worker:0", AskLinks(1, places), seconds=5.0).unreached == ()
