"""The panel as static HTML: one string, without scripts or external files.

Hosts without widgets show it while the cluster runs, and it stays in the saved file. It has the style of the live
panel. If the host removes the style (GitHub, an untrusted notebook), a plain table and the sentence remain. They set no
colour, so they are readable on a light and on a dark background.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path

from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, NodeState
from tfos_nb.truncate import clip, clip_lines, clip_telling
from tfos_nb.widgets.charts.static import render_charts, render_epochs
from tfos_nb.widgets.html_table import bar, curve, render_table
from tfos_nb.widgets.words import facts, wording
from tfos_nb.widgets.words.problems import aside, headline, own_line, problem_first

__all__ = ["render_html", "render_section"]

FEW_NODES = 12
"""Up to this number each node has a row. With more, each node has a cell, and only the most important ones a row."""

SHOWN_OF_MANY = 5

LOG_LINES = 100

LONGEST_LINE = 1000

LONGEST_MESSAGE, LONGEST_TRACE = 8_000, 12_000
"""Maximum bytes of an error's message and traceback that are kept below the sentence."""

_SIGNS = {"bad": "✕", "warn": "!"}


def render_html(
    state: ClusterState,
    *,
    note: str = "",
    left: float | None = None,
    every_node: bool = False,
    links: Sequence[tuple[str, str]] = (),
    bare: bool = False,
) -> str:
    """Return a cluster as self-contained HTML.

    Parameters
    ----------
    state : ClusterState
        The state to show.
    note : str
        One more line at the end.
    left : float, optional
        Seconds until the training ends, if its pace was measured.
    every_node : bool
        Show a row for each node, however many there are.
    links : sequence of (str, str), optional
        Titles and URLs of pages that belong to the cluster.
    bare : bool
        Leave out the frame with its style, for :func:`render_section`.

    Returns
    -------
    str
        HTML in which every text from outside is escaped.
    """
    judged = problem_first(state.nodes)
    parts = [
        _head(state, links),
        _say(state, judged),
        _summary(state, wording.time_left(state, left)),
        _grid(state, judged),
        _curves(state),
        _nodes(state, judged, every_node),
        _log(state),
        f'<div class="t-foot">{escape(note)}</div>' if note else "",
    ]
    body = "".join(parts)
    return body if bare else render_section(f"TensorFlow cluster {state.name}", body)


def render_section(label: str, body: str) -> str:
    """Return HTML in the frame of the panel, with its style."""
    section = f'<section class="tfos-panel" aria-label="{escape(label)}">{body}</section>'
    html = f"<style>{_style()}</style>{section}"
    return html.encode("utf-8", "replace").decode()  # a traceback may have a lone surrogate; a message must not


@cache
def _style() -> str:
    """Return the style sheet of the live panel, without its comments and line breaks."""
    css = Path(__file__).with_name("panel.css").read_text(encoding="utf-8")
    return re.sub(r"/\*.*?\*/|\n", "", css, flags=re.DOTALL)


def _head(state: ClusterState, links: Sequence[tuple[str, str]]) -> str:
    elapsed = "" if state.status is ClusterStatus.PLANNED else wording.duration(state.elapsed)
    end = " · ".join(part for part in (state.spark_master, elapsed) if part)
    generation = f' <span class="t-dim">generation {state.generation}</span>' if state.generation > 1 else ""
    return (
        f'<div class="t-head"><b class="t-name">{escape(state.name)}</b> '
        f'<span class="t-pill t-{wording.tone(state)}">{escape(wording.cluster_word(state))}</span> '
        f'<span class="t-dim">{escape(wording.size(state))}</span>{generation} '
        f'<span class="t-end"><span class="t-dim">{escape(end)}</span>{_links(links)}</span></div>'
    )


def _links(links: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f' <a class="t-button" href="{escape(url)}" target="_blank" rel="noopener noreferrer">{escape(title)} ↗</a>'
        for title, url in links
    )


def _say(state: ClusterState, judged: list[tuple[NodeState, str]]) -> str:
    """Return the sentence, and below it the rest of an error, folded."""
    first, rest = headline(state.error, wording.LONGEST)
    failed = state.status is ClusterStatus.FAILED
    troubled = any(wrong or wording.tone(node) == "bad" for node, wrong in judged)
    warn = state.status is ClusterStatus.RECOVERING or (troubled and not state.status.ended)
    said = escape(wording.sentence(state))
    if failed and first:
        node, colon, cause = said.partition(": ")
        said = f"<b>{node}</b>{colon}{cause}" if colon else f"<b>{said}</b>"
    elif first and not state.status.ended and state.status is not ClusterStatus.RECOVERING:
        said += f"<div>{escape(first)}</div>"
    own = own_line(rest)
    if own is not None:
        where = f'<span class="t-dim">{escape(clip(own.where, 160))}</span>'
        said += f'<div class="t-own t-bad">{where}<code>{escape(clip(own.code, 240))}</code></div>'
    if aside(state):
        said += f'<div class="t-dim">{escape(aside(state))}</div>'
    said += _folded(headline(state.error)[0], rest)
    return f'<div class="t-say {"t-bad" if failed else "t-warn" if warn else ""}">{said}</div>'


def _folded(first: str, rest: str) -> str:
    """Return the folded parts that the sentence lacks: a long message, and the traceback. Both are cut if too long."""
    told = []
    if len(first) > wording.LONGEST:
        told.append(("the whole message", clip_telling(first, LONGEST_MESSAGE)))
    if rest:
        told.append(("traceback", clip_lines(rest, LONGEST_TRACE)))
    return "".join(
        f'<details><summary>{title}</summary><pre class="t-trace{" t-wrap" if title != "traceback" else ""}">'
        f"{escape(text)}</pre></details>"
        for title, text in told
    )


def _summary(state: ClusterState, left: float | None) -> str:
    """Return the tiles: progress, metrics, rate and remaining time."""
    tiles = "".join(_tile(tile) for tile in facts.tiles(state, left))
    return f'<div class="t-sum">{tiles}</div>' if tiles else ""


def _tile(tile: facts.Tile) -> str:
    wide = tile.key in ("epoch", "feed")
    below = bar(tile.percent, tile.tone, tile.key) if wide else curve(tile.curve)
    return (
        f'<div class="t-tile{" t-wide" if wide else ""}"><span class="t-label">{escape(tile.label)}</span> '
        f"<b>{escape(tile.value) or '—'}</b>{below}</div>"
    )


def _curves(state: ClusterState) -> str:
    """Return the charts of the metrics with the table behind them, folded."""
    charts = render_charts(state.points)
    if not charts:
        return ""
    folded = f"<details><summary>curves</summary>{charts}{render_epochs(state.points)}</details>"
    return f'<div class="t-foot t-curves">{folded}</div>'


def _grid(state: ClusterState, judged: list[tuple[NodeState, str]]) -> str:
    """Return a cell for each node of a large cluster. A node with a problem has a sign in addition to its colour."""
    if len(state.nodes) <= FEW_NODES or state.status is ClusterStatus.PLANNED:
        return ""
    wrong = {node.node: word for node, word in judged}
    few = len(state.nodes) <= 128
    cells, words, signs = [], [], {}
    for node in state.nodes:
        word = wrong[node.node] or wording.node_word(node)
        tone = "warn" if wrong[node.node] else wording.tone(node)
        words.append(word)
        signs[word] = _SIGNS.get(tone, "")
        name = node.node.removeprefix("worker:").replace(":", " ") if few else ""
        title, text = escape(f"{node.node} {word}"), escape(f"{signs[word]} {name}".strip())
        cells.append(f'<span class="t-cell t-{tone}" title="{title}">{text}</span>')
    counts = Counter(words).most_common()
    told = ", ".join(f"{n} {word}" for word, n in counts)
    legend = "  ·  ".join(f"{n} {word} {signs[word]}".strip() for word, n in counts)
    return (
        f'<div class="t-many"><div class="t-grid{"" if few else " t-dense"}" role="img" '
        f'aria-label="{len(state.nodes)} nodes: {escape(told)}">{" ".join(cells)}</div>'
        f'<div class="t-legend" aria-hidden="true">{escape(legend)}</div></div>'
    )


def _nodes(state: ClusterState, judged: list[tuple[NodeState, str]], every_node: bool) -> str:
    many = len(state.nodes) > FEW_NODES and not every_node
    if many:
        judged = judged[:SHOWN_OF_MANY]
    else:
        wrong = {node.node: word for node, word in judged}
        judged = [(node, wrong[node.node]) for node in state.nodes]
    told = f"the {len(judged)} to look at first, of {len(state.nodes)} nodes" if many else "the nodes"
    foot = f'<div class="t-foot">{told}</div>' if many else ""
    return render_table(state, judged, f"{state.name}: {told}") + foot


def _log(state: ClusterState) -> str:
    """Return the newest lines of the log, folded."""
    lines = state.log[-LOG_LINES:]
    if not lines:
        return ""
    written = "".join(
        f'<div class="t-line"><span>{time.strftime("%H:%M:%S", time.localtime(line.time))}</span> '
        f"<b>{escape(line.node)}</b>  {escape(clip_telling(line.text, LONGEST_LINE))}</div>"
        for line in lines
    )
    count = f"the log's last {len(lines)} lines" if len(lines) > 1 else "the log's last line"
    return f'<div class="t-foot"><details><summary>{count}</summary><div class="t-log">{written}</div></details></div>'
