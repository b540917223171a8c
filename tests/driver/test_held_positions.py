"""States from which training can continue in the middle of a pass, and the rows that they include."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.runtime.feed.test_transfer import driver_of
from tfos_nb.driver.ledger import FeedLedger, HeldPositions
from tfos_nb.runtime.feed.messages import ClaimRows
from tfos_nb.runtime.feed.positions import PositionHeld


def said(node: str, state: str, reached: Mapping[int, int] | None = None) -> PositionHeld:
    return PositionHeld(node, 1, state, dict(reached or {0: 10}))


def test_training_can_continue_from_a_state_once_every_node_has_reported_it() -> None:
    held, nodes = HeldPositions(), ("worker:0", "worker:1")
    book = FeedLedger(1, nodes)
    assert book.claim(ClaimRows(1, 0, 0, 16)).ends == [8, 16]
    held.take(said("worker:0", "first", {0: 5}), nodes, book)
    held.take(said("worker:0", "second", {0: 8}), nodes, book)  # worker:0 is ahead
    assert held.states == ()
    held.take(said("worker:1", "first", {0: 11}), nodes, book)
    assert held.states == ("first",)
    assert held.rows_of("first").spans == {0: ((0, 5), (8, 11))}
    held.take(said("worker:1", "second", {0: 3}), nodes, book)  # worker:1 has no rows before row 3
    assert held.rows_of("second").spans == {0: ((0, 8),)}


def test_positions_reported_before_a_loss_are_forgotten() -> None:
    held, nodes = HeldPositions(), ("worker:0", "worker:1")
    book = FeedLedger(1, nodes)
    held.take(said("worker:0", "half"), nodes, book)
    held.forget_parts()
    held.take(said("worker:1", "half"), nodes, book)
    assert held.states == ()


def test_the_number_of_kept_positions_is_bounded() -> None:
    held, nodes = HeldPositions(), ("worker:0", "worker:1")
    book = FeedLedger(1, nodes)
    for number in range(100):
        held.take(said("worker:0", f"of one {number}"), nodes, book)
        held.take(said("worker:0", f"{number:03d}"), ("worker:0",), book)
    assert held.states[-1] == "099"
    assert len(held.states) == len(held._parts) == 16


def test_a_state_on_the_disk_outlives_those_that_follow_it_in_memory() -> None:
    held, nodes = HeldPositions(), ("worker:0", "worker:1")
    book = FeedLedger(1, nodes)
    for number in range(100):
        held.take(replace(said("worker:0", f"{number:03d}"), stored=number in (10, 40)), nodes, book)
        held.take(said("worker:1", f"{number:03d}"), nodes, book)
    assert held.states[:2] == ("010", "040")
    assert held.states[-1] == "099"
    assert len(held.states) == 18


def test_the_rows_of_a_state_are_known_after_its_ledger_was_closed() -> None:
    with driver_of(2, buffer_bytes=1 << 30) as driver:
        feed = driver.controller.begin(1, False, 1, 1)
        for name, reached in zip(driver.nodes, (30, 40), strict=True):
            feed.ledger.claim(ClaimRows(feed.number, 0, 0, 100))
            assert driver.controller.position_held(PositionHeld(name, feed.number, "half", {0: reached})) == (
                reached == 40
            )
        wanted = driver.controller.held.rows_of("half").spans
    with driver_of(2, buffer_bytes=1 << 30) as driver:
        feed = driver.controller.begin(1, False, 1, 1)
        for name, reached in zip(driver.nodes, (30, 40), strict=True):
            feed.ledger.claim(ClaimRows(feed.number, 0, 0, 100))
            driver.controller.position_held(PositionHeld(name, feed.number, "half", {0: reached}))
        driver.controller.close_ledgers([feed])
        assert driver.controller.held.rows_of("half").spans == wanted != {}
