"""A node's position in its cluster, and the servers that it waits for before TensorFlow connects to them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tfos_nb.runtime.control.plan import Node
from tfos_nb.runtime.program import strategies
from tfos_nb.runtime.program.strategies import ClusterTask, await_servers

SECONDS = 20.0
SPEC = {"chief": ["h:1"], "worker": ["h:2", "h:3"], "evaluator": ["h:4"]}
WITH_PS = {"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:5"]}


@pytest.mark.parametrize(
    ("node", "spec", "chief_trains", "known"),
    [
        # is_chief, number, num_workers, place_among_readers, may_be_synchronous
        ("chief:0", SPEC, False, (True, 0, 3, (0, 3), True)),
        ("worker:1", SPEC, False, (False, 3, 3, (2, 3), True)),
        ("evaluator:0", SPEC, False, (False, 1, 3, (0, 1), False)),
        ("worker:0", {"worker": ["h:2"]}, False, (True, 0, 1, (0, 1), False)),
        ("worker:1", {"worker": ["h:2", "h:3"]}, False, (False, 1, 2, (1, 2), True)),
        ("ps:0", WITH_PS, False, (False, 0, 2, (0, 1), False)),
        ("chief:0", WITH_PS, False, (True, 1, 2, (0, 1), False)),
        ("chief:0", WITH_PS, True, (True, 1, 3, (0, 3), False)),
        ("worker:0", WITH_PS, True, (False, 2, 3, (1, 3), False)),
    ],
)
def test_a_node_knows_its_position_in_the_cluster(node: str, spec: Any, chief_trains: bool, known: Any) -> None:
    one = ClusterTask(Node.parse(node), spec, chief_trains=chief_trains)
    assert (one.is_chief, one.number, one.num_workers, one.place_among_readers, one.may_be_synchronous) == known


@pytest.fixture
def holder() -> Iterator[socket.socket]:
    """A port that is bound but does not listen, like a node's before TensorFlow's server runs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


def greet(held: socket.socket) -> None:
    """Serve one caller as gRPC does: send the settings frame."""
    held.listen()
    connection, _ = held.accept()
    with connection:
        connection.sendall(b"\0")


def test_a_server_is_waited_for_until_it_runs(holder: socket.socket) -> None:
    address = f"127.0.0.1:{holder.getsockname()[1]}"
    over = threading.Event()
    waiting = threading.Thread(target=lambda: (await_servers([address]), over.set()), daemon=True)
    waiting.start()
    assert not over.wait(0.2)
    greet(holder)
    assert over.wait(SECONDS)


def test_waiting_for_a_server_that_never_starts_ends_without_an_error(
    holder: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "_AWAITED", 0.1)
    began = time.monotonic()
    await_servers([f"127.0.0.1:{holder.getsockname()[1]}"] * 3)
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "awaited"),
    [
        ({"worker": ["a:1", "b:2"]}, "worker", 0, []),
        ({"worker": ["a:1", "b:2"]}, "worker", 1, ["a:1"]),
        ({"chief": ["c:3"], "worker": ["a:1"]}, "worker", 0, ["c:3"]),
        ({"chief": ["c:3"], "worker": ["a:1"]}, "chief", 0, []),
        ({"worker": ["a:1"], "evaluator": ["e:4"]}, "evaluator", 0, []),
    ],
)
def test_a_synchronous_strategy_waits_for_its_leader(
    cluster: Any, kind: str, index: int, awaited: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(strategies, "await_servers", asked.extend)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}))
    strategies._await_leader()
    assert asked == awaited


def test_a_program_without_a_cluster_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "await_servers", lambda addresses: pytest.fail("it waits"))
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategies._await_leader()
