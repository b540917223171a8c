"""Which node answers which partition in inference."""

from __future__ import annotations

from tfos_nb.driver.placements import InferencePlacement
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.placement import AskPlaces, ClaimNode, ReleaseNode


def test_a_repeated_attempt_goes_to_another_node_and_work_is_spread() -> None:
    places = {name: FeedPlace(f"/{name}", "h", 1, b"") for name in ("worker:0", "worker:1", "worker:2")}
    closed = [""]
    exchange = InferencePlacement(lambda: places, lambda: closed[0])
    assert exchange.asked(AskPlaces("input")).places == places
    near = ("worker:0", "worker:1")
    assert [exchange.asked(ClaimNode("i", p, p, near)) for p in range(4)] == ["worker:0", "worker:1"] * 2
    assert exchange.asked(ClaimNode("i", 0, 10, near)) == "worker:1"
    exchange.asked(ReleaseNode("i", 0, 0))
    exchange.asked(ReleaseNode("i", 2, 2))
    assert exchange.asked(ClaimNode("i", 5, 11, near)) == "worker:0"
    assert exchange.asked(ClaimNode("i", 6, 12, ())) == "worker:2"  # no node on the task's host: any node
    closed[0] = "wait() has told the nodes"
    assert "wait() has told the nodes" in exchange.asked(AskPlaces("input")).refused
    closed[0] = ""
    places.clear()
    assert "every main has returned" in exchange.asked(AskPlaces("input")).refused
