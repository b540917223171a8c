"""The table of nodes in static HTML, and the bars and curves in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import NamedTuple

from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, NodeState
from tfos_nb.truncate import clip
from tfos_nb.widgets.words import facts, wording
from tfos_nb.widgets.words.curves import span, svg_lines, thin

__all__ = ["bar", "curve", "render_table"]

CURVE_POINTS = 32


LONGEST_DETAIL = 300


class _Column(NamedTuple):
    title: str
    css: str
    cell: Callable[[NodeState, str], str]
    key: str = ""
    """Its name in :func:`facts.room` if a narrow panel leaves it out; else empty."""


def render_table(state: ClusterState, judged: Sequence[tuple[NodeState, str]], caption: str) -> str:
    """Return the table with a row for each node in ``judged``, which pairs nodes with their problem, or ``""``."""
    rooms = facts.room(state)
    columns = [
        column._replace(css=f"{column.css} t-from{rooms[column.key]}") if column.key in rooms else column
        for column in _columns(state)
    ]
    kind = " t-gpus" if facts.has_gpus(state) else ""
    kind += " t-planned" if state.status is ClusterStatus.PLANNED else " t-ended" if state.status.ended else ""
    titles = "".join(f'<th scope="col" class="{column.css}">{escape(column.title)}</th>' for column in columns)
    rows = "".join(_row(columns, node, wrong) for node, wrong in judged)
    return (
        f'<div class="t-scroll"><table class="t-nodes{kind}"><caption class="t-unseen">{escape(caption)}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def bar(percent: int | None, tone: str, label: str) -> str:
    """Return a thin bar. If the percentage is not known, return its empty track, so that the layout does not change."""
    if percent is None:
        return '<div class="t-track"></div>'
    return (
        f'<div class="t-track t-{tone}" role="progressbar" aria-label="{escape(label)}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{percent}"><div style="width:{percent}%"></div></div>'
    )


def curve(values: Sequence[float]) -> str:
    """Return a curve as high as a line of text; empty if there are fewer than two points."""
    lines = svg_lines(thin(values, CURVE_POINTS), 100, 16)
    drawn = "".join(f'<polyline fill="none" stroke="currentColor" points="{points}"/>' for points in lines)
    if not drawn:
        return ""
    return (
        '<svg class="t-curve" width="72" height="16" viewBox="0 0 100 16" preserveAspectRatio="none" '
        f'aria-hidden="true">{drawn}</svg>'
    )


def _columns(state: ClusterState) -> list[_Column]:
    """Return the columns for which the state has data."""
    if state.status is ClusterStatus.PLANNED:
        return [
            _Column("Node", "t-c-node", _who),
            _Column("Slot", "t-c-step", lambda node, _: escape(node.detail) or "—"),
        ]
    columns = [
        _Column("Node", "t-c-node", _who),
        _Column("State", "t-c-state", _state),
        _Column("Epoch · step", "t-c-step", _steps),
    ]
    columns += [
        _Column(facts.title(name), "t-c-metric", partial(_metric, name), f"metric{place}")
        for place, name in enumerate(facts.metric_names(state))
    ]
    if not state.status.ended:
        columns.append(_Column("Rows/s", "t-num t-c-rate", lambda node, _: wording.rate(node.rows_per_second)))
        columns.append(_Column("Time left", "t-num t-c-left", _left, "left"))
    if facts.has_gpus(state):
        columns.append(_Column("GPU", "t-c-gpu", _gpu))
    if not state.status.ended or any(map(any, map(facts.machine, state.nodes))):
        columns.append(_Column("CPU · mem", "t-num t-c-cpu", _machine, "cpu"))
    return columns


def _row(columns: Sequence[_Column], node: NodeState, wrong: str) -> str:
    first, *others = columns
    cells = "".join(f'<td class="{column.css}">{column.cell(node, wrong)}</td>' for column in others)
    return f'<tr><th scope="row" class="{first.css}">{first.cell(node, wrong)}</th>{cells}</tr>'


def _who(node: NodeState, _: str) -> str:
    where = escape(" · ".join(part for part in (node.host, node.executor) if part))
    second = f'<br><span class="t-second t-mono" title="{where}">{where}</span>' if where else ""
    return f'<span class="t-who">{escape(node.node)}</span>{second}'


def _state(node: NodeState, wrong: str) -> str:
    tone = "warn" if wrong else wording.tone(node)
    word = wording.wrong_word(node, wrong) or wording.node_word(node)
    return f'<span class="t-pill t-{tone}">{escape(word)}</span>'


def _steps(node: NodeState, wrong: str) -> str:
    """Return the step with its bar; for a node without steps or one that failed, its detail with the bar."""
    tone = "warn" if wrong else wording.tone(node)
    far = facts.steps(node)
    drawn = bar(far.percent, tone, f"steps of {node.node}")
    if node.detail and (not far.step or tone == "bad"):
        detail = escape(clip(node.detail, LONGEST_DETAIL))
        return f'<span class="t-dim" title="{detail}">{detail}</span>{drawn}'
    epoch = f'<span class="t-dim">{far.epoch}</span>' if far.epoch else ""
    return (" · ".join(part for part in (epoch, far.step) if part) or "—") + drawn


def _metric(name: str, node: NodeState, _: str) -> str:
    values = node.curves.get(name, ())
    ends = span(values)
    drawn = curve(values)
    title = f' title="lowest {wording.number(ends[0])}, highest {wording.number(ends[1])}"' if ends and drawn else ""
    return f"<span{title}>{wording.number(node.metrics.get(name))}</span>{drawn}"


def _left(node: NodeState, _: str) -> str:
    return "" if node.seconds_left is None or node.status.ended else f"~ {wording.about(node.seconds_left)}"


def _gpu(node: NodeState, _: str) -> str:
    use = facts.gpu(node)
    if use is None:
        return '<span class="t-dim">no GPU</span>'
    if not use.short:
        return escape(use.memory)
    mean = f"{round(sum(use.percents) / len(use.percents))}%" if use.percents else ""
    memory = f'<span class="t-second">{escape(use.memory)}</span>' if use.memory else ""
    return f'<div class="t-both"><abbr title="{escape(use.name)}">{escape(use.short)}</abbr> {mean}</div>{memory}'


def _machine(node: NodeState, _: str) -> str:
    cpu, memory = facts.machine(node)
    return f'{cpu}<br><span class="t-second">{memory}</span>' if memory else cpu
