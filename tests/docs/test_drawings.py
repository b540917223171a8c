"""Layout of the drawings of docs/architecture.md: texts do not overlap, and many arrows are drawn as one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.docs.drawings import BOLD, LETTER, LINE, NODE, drawings, status_drawing
from tfos_nb.driver.membership.members import TRANSITIONS
from tfos_nb.state.cluster_state import NodeStatus

SVG = "{http://www.w3.org/2000/svg}"


class Area(NamedTuple):
    """Area of a text or a rectangle; the width of a text is an estimate."""

    left: float
    top: float
    right: float
    bottom: float
    what: str

    def meets(self, other: Area) -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)

    def holds(self, other: Area) -> bool:
        wide_enough = self.left <= other.left and other.right <= self.right
        return wide_enough and self.top <= other.top and other.bottom <= self.bottom


def areas(drawn: str, kind: str) -> list[Area]:
    """Return the areas of the elements of a kind, except rotated ones."""
    return [_area(one) for one in ElementTree.fromstring(drawn).iter(SVG + kind) if "transform" not in one.attrib]


def _area(element: ElementTree.Element) -> Area:
    x, y, kind = float(element.attrib["x"]), float(element.attrib["y"]), element.attrib["class"]
    if element.text is None:
        return Area(x, y, x + float(element.attrib["width"]), y + float(element.attrib["height"]), kind)
    width = len(element.text) * (BOLD if kind == "head" else LETTER)
    left = x - width * {"start": 0, "middle": 0.5, "end": 1}[element.attrib["text-anchor"]]
    return Area(left, y - LINE + 4, left + width, y + 4, element.text)


def crowded(drawn: str) -> list[tuple[str, str]]:
    """Return the texts that overlap another text or an edge of a rectangle, or that leave the drawing."""
    texts, rectangles = areas(drawn, "text"), areas(drawn, "rect")
    found = [(one.what, other.what) for one, other in itertools.combinations(texts, 2) if one.meets(other)]
    return found + [(text.what, one.what) for text in texts for one in rectangles if _is_on_edge(text, one)]


def _is_on_edge(text: Area, rectangle: Area) -> bool:
    return not rectangle.holds(text) and (rectangle.what == "panel" or rectangle.meets(text))


@pytest.mark.parametrize("name", drawings())
def test_no_text_overlaps_another_or_an_edge(name: str) -> None:
    assert len(areas(drawings()[name], "text")) > 15
    assert crowded(drawings()[name]) == []


@pytest.mark.parametrize(
    ("name", "written", "instead"),
    [
        ("node-status.svg", "main was called", "main was called by its process"),
        ("cluster-status.svg", "RECOVERING", "RECOVERING ITS NODES"),
        (
            "layers.svg",
            "A layer imports only those below it.",
            "A layer imports only those below it. " * 4,
        ),
    ],
)
def test_a_text_too_long_for_its_place_is_detected(name: str, written: str, instead: str) -> None:
    assert written in drawings()[name]
    assert crowded(drawings()[name].replace(written, instead)) != []


@pytest.mark.parametrize("name", drawings())
def test_a_drawing_has_a_title_and_a_description(name: str) -> None:
    title, description = list(ElementTree.fromstring(drawings()[name]))[:2]
    assert (title.tag, description.tag) == (f"{SVG}title", f"{SVG}desc")
    assert title.text
    assert description.text


def test_a_bundled_arrow_names_the_statuses_that_it_does_not_come_from() -> None:
    failed_stays = {one: dict(after) for one, after in TRANSITIONS.items()}
    del failed_stays[NodeStatus.FAILED][NodeStatus.LOST]
    assert "but FAILED and STOPPED" not in status_drawing(NODE, TRANSITIONS)
    assert "but FAILED and STOPPED" in status_drawing(NODE, failed_stays)


def test_statuses_that_few_others_lead_to_have_separate_arrows() -> None:
    few = {one: dict(after) for one, after in TRANSITIONS.items()}
    for one in (NodeStatus.PLANNED, NodeStatus.RESERVED, NodeStatus.FAILED):
        del few[one][NodeStatus.STOPPED]
    assert status_drawing(NODE, TRANSITIONS).count("thick") - status_drawing(NODE, few).count("thick") == 1


def test_a_status_without_a_place_is_refused() -> None:
    places = {name: place for name, place in NODE.places.items() if name != "LOST"}
    with pytest.raises(ValueError, match=r"'LOST' has no place; add one to the chart in tests/docs/drawings\.py"):
        status_drawing(replace(NODE, places=places), TRANSITIONS)
