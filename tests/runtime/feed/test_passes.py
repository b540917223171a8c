"""A dataset stops waiting for passes when its last iterator is closed."""

from __future__ import annotations

import threading

from tests.runtime.feed import test_row_queue
from tests.runtime.feed.test_row_queue import Node
from tests.waiting import until
from tfos_nb.runtime.feed.passes import Pass, Readers

SECONDS = 20.0

node = test_row_queue.node


def asking(node: Node, readers: Readers, found: list[Pass | None]) -> threading.Thread:
    """Ask for the next pass in a thread, as an iterator of TensorFlow's does."""
    thread = threading.Thread(target=lambda: found.append(node.queue.next_pass(readers)), daemon=True)
    thread.start()
    assert until(lambda: readers._waiting, SECONDS)
    return thread


def test_a_closed_reader_takes_no_pass(node: Node) -> None:
    readers, found = Readers(), list[Pass | None]()
    readers.opened()
    thread = asking(node, readers, found)
    readers.closed()
    thread.join(SECONDS)
    assert found == [None]
    assert node.queue.missed == 0


def test_a_reader_waits_for_the_pass_while_another_iterator_is_open(node: Node) -> None:
    readers, found = Readers(), list[Pass | None]()
    readers.opened()
    readers.opened()
    thread = asking(node, readers, found)
    readers.closed()
    assert thread.is_alive()
    readers.closed()
    thread.join(SECONDS)
    assert found == [None]


def test_a_reader_keeps_waiting_if_no_iterator_was_known_when_it_began(node: Node) -> None:
    readers, found = Readers(), list[Pass | None]()
    thread = asking(node, readers, found)
    readers.opened()
    readers.closed()
    thread.join(0.2)
    assert thread.is_alive()
    node.queue.close()
    thread.join(SECONDS)
    assert node.queue.missed == 1
