"""The drawings of docs/architecture.md, made from the code's tables: ``python -m tests.docs.drawings``.

::

    TRANSITIONS (driver.membership.members)          ──▶  docs/pictures/node-status.svg
    CLUSTER_TRANSITIONS (driver.cluster_lifecycle)   ──▶  docs/pictures/cluster-status.svg
    the contracts of layers (pyproject.toml)         ──▶  docs/pictures/layers.svg

The places of the statuses are chosen here by hand, so that the drawing is easy to read. All arrows, their causes and
the order of the layers come from the code.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from tfos_nb.driver.cluster_lifecycle import CLUSTER_TRANSITIONS
from tfos_nb.driver.membership.members import TRANSITIONS

__all__ = ["CLUSTER", "NODE", "Chart", "Place", "drawings", "layers_drawing", "layers_of", "status_drawing"]

CHECKOUT = Path(__file__).parents[2]
PICTURES = CHECKOUT / "docs/pictures"

WIDTH, MARGIN = 760, 24
BOX = 34  # height of a status
LINE = 15  # height of a line of text
LETTER, BOLD = 6.3, 7.2  # width of a letter in a wide font, since the reader's is not known
FEW = 2  # if at most two statuses do not lead to a status, it gets one bundled arrow
CARD = 206  # greatest width of the card of a bundled arrow
LEFT, LEFT_WIDTH, RIGHT, RIGHT_WIDTH = 54, 376, 486, 250  # the two stacks of layers
ASIDE = 14  # how far from the middle of a status an arrow with a corner begins or ends
FLOOR, GAP = 26, 4  # height of a layer, and the space between two

STYLE = """
svg{--bg:#fbfcfd;--ink:#1c2024;--dim:#59616b;--line:#d5dae0;--idle:#6b7480;--run:#2f6fde;--ok:#1a7f4b;--warn:#b26a00;--bad:#c0352b}
@media (prefers-color-scheme:dark){
svg{--bg:#171b20;--ink:#e8ebee;--dim:#a9b1ba;--line:#39414a;--idle:#98a2ad;--run:#6ea8ff;--ok:#4cc38a;--warn:#f0a63c;--bad:#ff7b70}
}
text{font:11.5px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:var(--dim)}
.label{paint-order:stroke;stroke:var(--bg);stroke-width:4px;stroke-linejoin:round}
.name{font-size:12px;font-weight:600;fill:var(--ink)}
.head{font-weight:600;fill:var(--ink)}
.layer{font-size:12px;fill:var(--ink)}
.panel{fill:var(--bg);stroke:var(--line)}
.idle{--tone:var(--idle)}.run{--tone:var(--run)}.ok{--tone:var(--ok)}.warn{--tone:var(--warn)}.bad{--tone:var(--bad)}
.box{fill:var(--tone);fill-opacity:.13;stroke:var(--tone);stroke-width:1.5}
.card{fill:none;stroke:var(--idle);stroke-dasharray:4 3}
.arrow{fill:none;stroke:var(--idle);stroke-width:1.5;marker-end:url(#tip)}
.thick{stroke-width:3.5;marker-end:url(#thick-tip)}
.tip{fill:var(--idle)}
.floor{fill:var(--ink);fill-opacity:.045}
.opened{fill:var(--run);fill-opacity:.10}
"""
"""The colours are those of the panel (tfos_nb/widgets/panel.css), on a light and on a dark page."""

TIPS = """<defs>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" \
orient="auto"><path class="tip" d="M0,0 8,4 0,8z"/></marker>
<marker id="thick-tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="13" markerHeight="13" \
markerUnits="userSpaceOnUse" orient="auto"><path class="tip" d="M0,0 8,4 0,8z"/></marker>
</defs>"""

OPENED = "runtime"
"""The package whose own layers stand beside the others."""
RULES = ("A layer imports only those below it.", "Names side by side do not import each other.")
"""The rules of the contracts."""

Point = tuple[float, float]
Table = Mapping[str, Mapping[str, str]]


class Place(NamedTuple):
    """Centre of a status in its drawing, and its colour, which is that of the panel."""

    x: float
    y: float
    tone: str


class Label(NamedTuple):
    """Place of a text: a point, how the text is aligned to it, and its greatest width.

    ``up`` is how far the lines stand above the point: 1 is all of them, 0 none, 0.5 half of them.
    """

    x: float
    y: float
    align: str
    room: float
    up: float


@dataclass(frozen=True)
class Chart:
    """Layout of a drawing of statuses.

    ``box`` is the width of a status. ``rise`` is how far an arrow that passes over other statuses rises above them.
    """

    title: str
    height: int
    box: int
    rise: int
    places: Mapping[str, Place]


NODE = Chart(
    "The statuses of a node",
    height=464,
    box=84,
    rise=54,
    places={
        "PLANNED": Place(66, 146, "idle"),
        "RESERVED": Place(192, 146, "warn"),
        "STARTING": Place(317, 146, "warn"),
        "TRAINING": Place(443, 146, "run"),
        "FEEDING": Place(568, 146, "warn"),
        "DONE": Place(694, 146, "ok"),
        "LOST": Place(192, 248, "bad"),
        "FAILED": Place(411, 248, "bad"),
        "STOPPED": Place(630, 248, "idle"),
    },
)
CLUSTER = Chart(
    "The statuses of a cluster",
    height=412,
    box=102,
    rise=80,
    places={
        "PLANNED": Place(75, 140, "idle"),
        "STARTING": Place(225, 140, "warn"),
        "RUNNING": Place(376, 140, "run"),
        "RECOVERING": Place(376, 270, "warn"),
        "STOPPING": Place(538, 140, "warn"),
        "DONE": Place(685, 140, "ok"),
        "FAILED": Place(685, 236, "bad"),
        "STOPPED": Place(685, 332, "idle"),
    },
)


# --- shapes


def picture(title: str, description: str, height: float, shapes: Iterable[str]) -> str:
    """Return an SVG file of these shapes, on a panel with a background of its own."""
    size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">',
            "<!-- Made by python -m tests.docs.drawings -->",
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            f"<style>{STYLE}</style>",
            TIPS,
            rectangle(0.5, 0.5, WIDTH - 1, height - 1, "panel"),
            *shapes,
            "</svg>\n",
        ]
    )


def rectangle(left: float, top: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle with round corners."""
    return f'<rect class="{kind}" x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="8"/>'


def text(x: float, y: float, words: str, kind: str, align: str = "middle") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{align}">{escape(words)}</text>'


def label(at: Label, words: str) -> list[str]:
    """Return a text, broken into lines of its greatest width."""
    lines = wrapped(words, at.room)
    first = at.y - (len(lines) - 1) * LINE * at.up
    return [text(at.x, first + number * LINE, line, "label", at.align) for number, line in enumerate(lines)]


def wrapped(words: str, room: float) -> list[str]:
    """Return as few lines as fit the width, of about the same length."""
    widths = range(int(room / LETTER), 0, -1)
    broken = [textwrap.wrap(words, width, break_long_words=False) for width in widths]
    return [lines for lines in broken if len(lines) == len(broken[0])][-1]


def arrow(points: Sequence[Point], kind: str = "arrow") -> str:
    """Return an arrow through these points, with round corners."""
    steps = [f"M{points[0][0]:g},{points[0][1]:g}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        (x1, y1), (x2, y2) = near(corner, before), near(corner, after)
        steps.append(f"L{x1:g},{y1:g} Q{corner[0]:g},{corner[1]:g} {x2:g},{y2:g}")
    steps.append(f"L{points[-1][0]:g},{points[-1][1]:g}")
    return f'<path class="{kind}" d="{" ".join(steps)}"/>'


def near(corner: Point, other: Point, radius: float = 10) -> Point:
    """Return the point at a distance from a corner, on the line to another point."""
    (x1, y1), (x2, y2) = corner, other
    part = radius / (abs(x2 - x1) + abs(y2 - y1))
    return x1 + (x2 - x1) * part, y1 + (y2 - y1) * part


def sign(number: float) -> int:
    """Return 1 for a number greater than 0, else -1."""
    return 1 if number > 0 else -1


# --- statuses


def status_drawing(chart: Chart, transitions: Mapping[Any, Mapping[Any, str]]) -> str:
    """Return the drawing of a table of transitions, with their causes."""
    table = {one.value: {to.value: why for to, why in after.items()} for one, after in transitions.items()}
    bundled = [to for to in table if is_bundled(table, to)]
    shapes = [shape for to in bundled for shape in bundle(chart, table, to)]
    for one, after in table.items():
        for to, why in after.items():
            if to not in bundled:
                points, at = route(chart, one, to, both_ways=one in table[to] and one not in bundled)
                shapes += [arrow(points), *label(at, why)]
    shapes += [shape for name in table for shape in status(chart, name)]
    described = (
        "Each arrow is an allowed change of the status, with its cause. A table in docs/architecture.md has all."
    )
    return picture(chart.title, described, chart.height, shapes)


def place_of(chart: Chart, name: str) -> Place:
    """Return the place of a status; raise an error if a new status has none."""
    if name not in chart.places:
        raise ValueError(f"{chart.title}: {name!r} has no place; add one to the chart in tests/docs/drawings.py")
    return chart.places[name]


def status(chart: Chart, name: str) -> list[str]:
    """Return a status: a box with its name."""
    x, y, tone = place_of(chart, name)
    box = rectangle(x - chart.box / 2, y - BOX / 2, chart.box, BOX, f"box {tone}")
    return [box, text(x, y + 4, name, "name")]


# --- single arrows


def route(chart: Chart, one: str, to: str, *, both_ways: bool) -> tuple[list[Point], Label]:
    """Return the points of an arrow, and where its cause stands."""
    start, end = place_of(chart, one), place_of(chart, to)
    aside = 6 if both_ways else 0  # leaves space for the arrow back
    if start.x == end.x:
        return vertical(start, end, aside)
    if start.y != end.y:
        return around_a_corner(chart, start, end)
    between = [place for place in chart.places.values() if place.y == start.y and is_between(place, start, end)]
    return over_others(chart, start, end) if between else horizontal(chart, start, end, aside)


def is_between(place: Place, start: Place, end: Place) -> bool:
    return min(start.x, end.x) < place.x < max(start.x, end.x)


def horizontal(chart: Chart, start: Place, end: Place, aside: float) -> tuple[list[Point], Label]:
    """Return an arrow to a neighbour: its cause stands above it, or below it where it goes to the left."""
    way = sign(end.x - start.x)
    y, middle, room = start.y - way * aside, (start.x + end.x) / 2, abs(end.x - start.x) - 12
    points = [(start.x + way * chart.box / 2, y), (end.x - way * chart.box / 2, y)]
    if way > 0:
        return points, Label(middle, start.y - BOX / 2 - 8, "middle", room, 1)
    return points, Label(middle, start.y + BOX / 2 + 17, "middle", room, 0)


def over_others(chart: Chart, start: Place, end: Place) -> tuple[list[Point], Label]:
    """Return an arrow that passes above the statuses in between."""
    top = start.y - BOX / 2
    lane, middle = top - chart.rise, (start.x + end.x) / 2
    points = [(start.x, top), (start.x, lane), (end.x, lane), (end.x, top)]
    return points, Label(middle, lane - 7, "middle", abs(end.x - start.x) + chart.box, 1)


def vertical(start: Place, end: Place, aside: float) -> tuple[list[Point], Label]:
    """Return an arrow up or down: its cause stands to the right, or to the left where it goes up."""
    way = sign(end.y - start.y)
    x, middle = start.x + way * aside, (start.y + end.y) / 2
    points = [(x, start.y + way * BOX / 2), (x, end.y - way * BOX / 2)]
    return points, Label(x + way * 8, middle + 4, "start" if way > 0 else "end", 136, 0.5)


def around_a_corner(chart: Chart, start: Place, end: Place) -> tuple[list[Point], Label]:
    """Return an arrow to another row and column: its level part is at the lower end, with the cause below it.

    The cause begins at the corner, and continues to the middle of the status at the other end.
    """
    down, way = end.y > start.y, sign(end.x - start.x)
    if down:
        x = start.x + way * ASIDE
        points = [(x, start.y + BOX / 2), (x, end.y), (end.x - way * chart.box / 2, end.y)]
    else:
        x = end.x - way * ASIDE
        points = [(start.x + way * chart.box / 2, start.y), (x, start.y), (x, end.y + BOX / 2)]
    level, other = (end.y, end.x) if down else (start.y, start.x)
    inward = sign(other - x)
    at = Label(x + inward * 8, level + BOX / 2 + 15, "start" if inward > 0 else "end", abs(other - x) - 8, 0)
    return points, at


# --- bundled arrows


def is_bundled(table: Table, to: str) -> bool:
    """Return whether nearly all other statuses lead to this one."""
    return len(without(table, to)) <= FEW


def without(table: Table, to: str) -> list[str]:
    """Return the other statuses that do not lead to this one."""
    return [one for one in table if one != to and to not in table[one]]


def bundle(chart: Chart, table: Table, to: str) -> list[str]:
    """Return one arrow in place of many: its card names their statuses and causes."""
    x, y, _ = place_of(chart, to)
    rows = card_rows(table, to)
    width = max((indent + len(line)) * (BOLD if kind == "head" else LETTER) for indent, line, kind in rows) + 24
    height = len(rows) * LINE + 20
    left = max(MARGIN, x - width / 2)
    if y == max(place.y for place in chart.places.values()):
        top = y + BOX / 2 + 26
        points = [(x, top), (x, y + BOX / 2 + 2)]
    else:
        top = y - BOX / 2 - 46 - height
        points = [(x, top + height), (x, y - BOX / 2 - 2)]
    texts = [
        text(left + 12 + indent * 9, top + (19 if kind == "head" else 23) + number * LINE, line, kind, "start")
        for number, (indent, line, kind) in enumerate(rows)
    ]
    return [rectangle(left, top, width, height, "card"), arrow(points, "arrow thick"), *texts]


def card_rows(table: Table, to: str) -> list[tuple[int, str, str]]:
    """Return the lines of a card, each with its indent and its kind: the statuses, then the causes, the usual first."""
    causes = [why for why, _ in Counter(after[to] for after in table.values() if to in after).most_common()]
    rows = [(0, line, "head") for line in origin(without(table, to))]
    for why in causes:
        first, *others = wrapped(f"• {why}", CARD - 20)
        rows += [(0, first, ""), *((1, line, "") for line in others)]
    return rows


def origin(but: Sequence[str]) -> list[str]:
    """Say from which statuses a bundled arrow comes."""
    return ["from every status", f"but {' and '.join(but)}"] if but else ["from every other status"]


# --- layers


def layers_of(pyproject: str) -> dict[str, list[list[str]]]:
    """Return the layers of each package that has a contract of them, from the top to the bottom."""
    found = {}
    for contract in pyproject.split("[[tool.importlinter.contracts]]")[1:]:
        if 'type = "layers"' in contract:
            (package,) = _list_in(contract, "containers")
            found[package] = [re.findall(r"\w+", layer) for layer in _list_in(contract, "layers")]
    return found


def _list_in(contract: str, name: str) -> list[str]:
    """Return a list of texts from a TOML file, parsed as Python (3.10 has no ``tomllib``)."""
    found = re.search(rf"^{name} = (\[.*?\])$", contract, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"a contract of layers must have {name!r}, got {contract!r}")
    return [str(one) for one in ast.literal_eval(found[1])]


def layers_drawing(pyproject: str) -> str:
    """Return the drawing of the layers of ``tfos_nb``, beside those of its package ``runtime``."""
    layers = layers_of(pyproject)
    outer, inner = layers["tfos_nb"], layers[f"tfos_nb.{OPENED}"]
    top = 50
    bottom = top + len(outer) * (FLOOR + GAP) - GAP
    opened = top + outer.index([OPENED]) * (FLOOR + GAP)
    inner_top = bottom - len(inner) * (FLOOR + GAP) + GAP
    shapes = [
        arrow([(38, top), (38, bottom - 3)], "arrow thick"),
        f'<text transform="translate(25 {(top + bottom) / 2:g}) rotate(-90)" text-anchor="middle">imports</text>',
        text(LEFT + LEFT_WIDTH / 2, top - 16, "tfos_nb", "name"),
        *stack(outer, LEFT, LEFT_WIDTH, top),
        f'<path class="opened" d="{wedge(opened, inner_top - 8, bottom + 8)}"/>',
        text(RIGHT + RIGHT_WIDTH / 2, inner_top - 24, f"tfos_nb.{OPENED}", "name"),
        *stack(inner, RIGHT + 8, RIGHT_WIDTH - 16, inner_top),
        *label(Label(LEFT, bottom + 32, "start", WIDTH - LEFT - MARGIN, 0), " ".join(RULES)),
    ]
    return picture("The layers of tfos_nb", " ".join(RULES), bottom + 52, shapes)


def wedge(opened: float, top: float, bottom: float) -> str:
    """Return the outline that widens from a layer on the left to the stack on the right."""
    edge = LEFT + LEFT_WIDTH
    ground = f"H{RIGHT + RIGHT_WIDTH - 8} q8,0 8,8 V{bottom - 8} q0,8 -8,8 H{RIGHT}"
    layer = f"H{LEFT + 8} q-8,0 -8,-8 V{opened + 8} q0,-8 8,-8z"
    return f"M{LEFT + 8},{opened} H{edge} L{RIGHT},{top} {ground} L{edge},{opened + FLOOR} {layer}"


def stack(layers: Sequence[Sequence[str]], left: float, width: float, top: float) -> list[str]:
    """Return layers above each other, each with its names, evenly spaced."""
    shapes = []
    for number, names in enumerate(layers):
        y = top + number * (FLOOR + GAP)
        if names != [OPENED]:
            shapes.append(rectangle(left, y, width, FLOOR, "floor"))
        room = (width - sum(map(len, names)) * LETTER) / (len(names) + 1)
        x = left
        for name in names:
            x += room + len(name) * LETTER / 2
            shapes.append(text(x, y + 17, name, "layer"))
            x += len(name) * LETTER / 2
    return shapes


# --- files


def drawings() -> dict[str, str]:
    """Return all drawings, by the names of their files."""
    return {
        "node-status.svg": status_drawing(NODE, TRANSITIONS),
        "cluster-status.svg": status_drawing(CLUSTER, CLUSTER_TRANSITIONS),
        "layers.svg": layers_drawing((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")),
    }


if __name__ == "__main__":
    for name, drawn in drawings().items():
        (PICTURES / name).write_text(drawn, encoding="utf-8")
        print(PICTURES.relative_to(CHECKOUT) / name)
