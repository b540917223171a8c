"""The panel as plain text: for a terminal, a log file and ``text/plain``."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, NodeState
from tfos_nb.widgets.words import facts, terminal, wording
from tfos_nb.widgets.words.problems import headline, problem_first

__all__ = ["WIDTH", "render_text"]

WIDTH = 100
"""Maximum length of a line; on a narrower terminal it is the terminal's width."""

NARROWEST = 40
"""Width that is used for a terminal that is narrower or reports no width."""

_LINES_OF_A_SENTENCE = 4

_GAP = "  "

FEW_NODES = 16
"""Up to this number each node has a line. With more, only the most important ones have one."""

SHOWN_OF_MANY = 6


class _Column(NamedTuple):
    title: str
    width: int
    right: bool
    value: Callable[[NodeState, str], str]
    least: int = 0
    """Minimum width to which it may shrink; 0 if it may not shrink."""
    given_up: int = 0
    """Order in which columns are left out of short lines: 1 before 2; 0 is never left out."""

    def write(self, text: str) -> str:
        """Return text cut or padded to the column's width, so that the columns to the right do not move."""
        text = terminal.plain(text)
        if terminal.width(text) > self.width:
            text = text.partition(" · ")[0]  # the host without the executor
        return terminal.pad(text, self.width, right=self.right)

    def within(self, width: int) -> _Column:
        """Return the column at another width."""
        return self._replace(width=width)


def _where(node: NodeState, _: str) -> str:
    return f"{node.host} · {node.executor}" if node.executor else node.host


def _gpu(node: NodeState, _: str) -> str:
    use = facts.gpu(node)
    if use is None:
        return ""
    return f"{round(sum(use.percents) / len(use.percents))}%" if use.percents else ", ".join(node.gpus)


_COLUMNS = (
    _Column("node", 12, False, lambda node, _: node.node, least=10),
    _Column("host · executor", 22, False, _where, least=12, given_up=1),
    _Column("state", 11, False, lambda node, wrong: wording.wrong_word(node, wrong) or wording.node_word(node)),
    _Column("epoch", 7, True, lambda node, _: facts.steps(node).epoch, given_up=5),
    _Column("step", 13, True, lambda node, _: facts.steps(node).step, least=11, given_up=4),
    _Column("loss", 9, True, lambda node, _: wording.number(node.loss)),
    _Column("rows/s", 7, True, lambda node, _: wording.rate(node.rows_per_second), given_up=3),
)

_GPU_COLUMN = _Column("GPU", 5, True, _gpu, given_up=2)

_PLAN_COLUMNS = (_COLUMNS[0], _Column("slot", 70, False, lambda node, _: node.detail, least=20))


def render_text(
    state: ClusterState,
    *,
    note: str = "",
    left: float | None = None,
    every_node: bool = False,
    width: int = WIDTH,
) -> str:
    """Return a cluster as a table of fixed width.

    Parameters
    ----------
    state : ClusterState
        The state to show.
    note : str
        One more line at the end.
    left : float, optional
        Seconds until the training ends, if its pace was measured.
    every_node : bool
        Show each node, however many there are.
    width : int
        Maximum characters of a line, from 40 to 100. If the table is wider, its columns shrink and the least important
        ones are left out. Sentences continue on the next line.

    Returns
    -------
    str
        Lines of at most ``width`` characters, without a newline at the end.
    """
    width = min(max(width, NARROWEST), WIDTH)
    left = wording.time_left(state, left)
    lines = [*_wrapped(_title(state, left), width), *_wrapped(wording.sentence(state), width)]
    columns = _fitting(_columns(state), width)
    many = len(state.nodes) > FEW_NODES and not every_node
    judged = problem_first(state.nodes)
    wrong = {node.node: said for node, said in judged}
    shown = [node for node, _ in judged[:SHOWN_OF_MANY]] if many else list(state.nodes)
    if shown:
        rows = [[column.title for column in columns]]
        rows += [[column.value(node, wrong[node.node]) for column in columns] for node in shown]
        lines += [_line(columns, row) for row in rows]
    if many:
        lines.append(f"the {len(shown)} furthest behind of {len(state.nodes)} nodes")
    for fact in _facts(state):
        lines += _wrapped(fact, width, " " * 9)
    if note:
        lines += _wrapped(note, width)
    return "\n".join(lines)


def _columns(state: ClusterState) -> tuple[_Column, ...]:
    if state.status is ClusterStatus.PLANNED:
        return _PLAN_COLUMNS
    return (*_COLUMNS, _GPU_COLUMN) if facts.has_gpus(state) else _COLUMNS


def _fitting(columns: tuple[_Column, ...], width: int) -> tuple[_Column, ...]:
    """Leave out columns until the others can shrink to the width, shrink them, and return them."""
    shrunk = sum(column.least or column.width for column in columns) + len(_GAP) * (len(columns) - 1)
    goes = min((column for column in columns if column.given_up), key=lambda one: one.given_up, default=None)
    if shrunk > width and goes is not None:
        return _fitting(tuple(column for column in columns if column is not goes), width)
    over = sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1) - width
    fitted = []
    for column in sorted(columns, key=lambda one: one.width, reverse=True):
        less = min(max(over, 0), column.width - column.least if column.least else 0)
        over -= less
        fitted.append(column.within(column.width - less))
    by_title = {column.title: column for column in fitted}
    return tuple(by_title[column.title] for column in columns)


def _line(columns: tuple[_Column, ...], values: list[str]) -> str:
    return _plain(_GAP.join(column.write(value) for column, value in zip(columns, values, strict=True)))


def _title(state: ClusterState, left: float | None) -> str:
    parts = [state.name, wording.cluster_word(state), wording.size(state)]
    parts += [f"generation {state.generation}"] if state.generation > 1 else []
    if state.status is not ClusterStatus.PLANNED:
        parts.append(wording.duration(state.elapsed))
    if left is not None and not state.status.ended:
        parts.append(f"~ {wording.duration(left)} left")
    return " · ".join(part for part in parts if part)


def _facts(state: ClusterState) -> list[str]:
    """Return the lines below the table: the whole cluster, the feed, the error."""
    total = wording.progress(state)
    facts = []
    if total.metrics or total.rows_per_second is not None:
        words = [f"{name} {wording.number(value)}" for name, value in total.metrics[:5]]
        words += [f"{wording.rate(total.rows_per_second)} rows/s"] if total.rows_per_second is not None else []
        facts.append(("cluster", ", ".join(words)))
    if state.feed is not None:
        feed = state.feed
        passes = f", {feed.epochs} passes" if feed.epochs > 1 else ""
        parts = f", {feed.partitions_done} of {feed.partitions} partitions" if feed.partitions else ""
        facts.append(("feed", f"{wording.count(feed.rows)} rows{parts}{passes}"))
    if state.error and not state.status.ended:  # the sentence of an ended cluster has the error already
        facts.append(("error", headline(state.error)[0]))
    return [f"{name:<8} {text}" for name, text in facts]


def _plain(line: str) -> str:
    return terminal.plain(line).rstrip()


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap text between words, to at most four lines."""
    return textwrap.wrap(
        _plain(text),
        width,
        subsequent_indent=indent,
        max_lines=_LINES_OF_A_SENTENCE,
        placeholder=" …",
        drop_whitespace=True,
        break_on_hyphens=False,
    )
