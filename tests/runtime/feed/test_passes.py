"""What ends with the last iterator over a dataset."""

from __future__ import annotations

import threading

from tests.runtime.feed import test_row_queue
from tests.runtime.feed.test_row_queue import Node
from tfos_nb.runtime.feed.passes import Pass, Readers

SECONDS = 20.0

node = test_row_queue.node


def asking(node: Node, readers: Readers, found: list[Pass | None]) -> threading.Thread:
    """Ask for the next pass in a thread, as an iterator of TensorFlow's does."""
    thread = threading.Thread(target=lambda: found.append(node.queue.next_pass(readers)), daemon=True)
    thread.start()
    with readers._changed:
        assert readers._changed.wait_for(lambda: readers._waiting, SECONDS)
    return thread


def test_a_reader_that_is_gone_takes_no_pass(node: Node) -> None:
    readers, found = Readers(), list[Pass | None]()
    readers.opened()
    thread = asking(node, readers, found)
    readers.closed()
    assert not readers._waiting, "it has waited until the thread was released"
    thread.join(SECONDS)
    assert found == [None]
    assert node.queue.missed == 0


def test_the_pass_is_waited_for_while_another_iterator_is_alive(node: Node) -> None:
    readers, found = Readers(), list[Pass | None]()
    readers.opened()
    readers.opened()
    thread = asking(node, readers, found)
    readers.closed()
    assert thread.is_alive()
    readers.closed()
    thread.join(SECONDS)
    assert found == [None]


def test_a_dataset_without_a_known_iterator_is_never_left(node: Node) -> None:
    readers, found = Readers(), list[Pass | None]()
    thread = asking(node, readers, found)
    readers.opened()
    readers.closed()
    thread.join(0.2)
    assert thread.is_alive()
    node.queue.close()
    thread.join(SECONDS)
    assert node.queue.missed == 1
