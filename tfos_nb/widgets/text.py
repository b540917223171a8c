"""The panel as plain text: for a terminal, a log file and ``text/plain``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tfos_nb.state import ClusterState, ClusterStatus, NodeState
from tfos_nb.widgets import facts, wording
from tfos_nb.widgets.trouble import headline, trouble_first

__all__ = ["WIDTH", "render_text"]

WIDTH = 100
"""No line is longer."""

FEW_NODES = 16
"""Up to so many nodes have a line each; of more, the ones to look at."""

SHOWN_OF_MANY = 6


class _Column(NamedTuple):
    title: str
    width: int
    right: bool
    value: Callable[[NodeState, str], str]

    def write(self, text: str) -> str:
        """Bring text to the column's width: cut, never wider, so that nothing right of it moves."""
        cut = text if len(text) <= self.width else text[: self.width - 1] + "…"
        return cut.rjust(self.width) if self.right else cut.ljust(self.width)


def _where(node: NodeState, _: str) -> str:
    return f"{node.host} · {node.executor}" if node.executor else node.host


def _gpu(node: NodeState, _: str) -> str:
    use = facts.gpu(node)
    if use is None:
        return ""
    return f"{round(sum(use.percents) / len(use.percents))}%" if use.percents else use.memory.removeprefix("GPU ")


_COLUMNS = (
    _Column("node", 12, False, lambda node, _: node.node),
    _Column("host · executor", 22, False, _where),
    _Column("state", 11, False, lambda node, wrong: wording.wrong_word(node, wrong) or wording.node_word(node)),
    _Column("epoch", 7, True, lambda node, _: facts.steps(node).epoch),
    _Column("step", 13, True, lambda node, _: facts.steps(node).step),
    _Column("loss", 9, True, lambda node, _: wording.number(node.loss)),
    _Column("rows/s", 7, True, lambda node, _: wording.rate(node.rows_per_second)),
)

_GPU_COLUMN = _Column("GPU", 5, True, _gpu)

_PLAN_COLUMNS = (_COLUMNS[0], _Column("slot", 70, False, lambda node, _: node.detail))


def render_text(state: ClusterState, *, note: str = "", left: float | None = None, every_node: bool = False) -> str:
    """Draw a cluster as a table of fixed width.

    Parameters
    ----------
    state : ClusterState
        What to draw.
    note : str
        One more line at the end.
    left : float, optional
        Seconds until the training ends, if somebody measured its pace.
    every_node : bool
        Show each node, however many there are.

    Returns
    -------
    str
        Lines of at most 100 characters, without a newline at the end.
    """
    left = wording.time_left(state, left)
    lines = [_title(state, left), wording.sentence(state)]
    columns = _columns(state)
    many = len(state.nodes) > FEW_NODES and not every_node
    judged = trouble_first(state.nodes)
    wrong = {node.node: said for node, said in judged}
    shown = [node for node, _ in judged[:SHOWN_OF_MANY]] if many else list(state.nodes)
    if shown:
        lines.append("  ".join(column.write(column.title) for column in columns))
        lines.extend(
            "  ".join(column.write(column.value(node, wrong[node.node])) for column in columns) for node in shown
        )
    if many:
        lines.append(f"the {len(shown)} furthest behind of {len(state.nodes)} nodes")
    lines.extend(_facts(state))
    if note:
        lines.append(note)
    return "\n".join(_fit(line) for line in lines)


def _columns(state: ClusterState) -> tuple[_Column, ...]:
    if state.status is ClusterStatus.PLANNED:
        return _PLAN_COLUMNS
    return (*_COLUMNS, _GPU_COLUMN) if facts.has_gpus(state) else _COLUMNS


def _title(state: ClusterState, left: float | None) -> str:
    parts = [state.name, wording.cluster_word(state), wording.size(state)]
    parts += [f"generation {state.generation}"] if state.generation > 1 else []
    if state.status is not ClusterStatus.PLANNED:
        parts.append(wording.duration(state.elapsed))
    if left is not None and not state.status.ended:
        parts.append(f"~ {wording.duration(left)} left")
    return " · ".join(part for part in parts if part)


def _facts(state: ClusterState) -> list[str]:
    """Write the lines below the table: the whole cluster, the feed, the error."""
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
    if state.error and not state.status.ended:  # of an ended cluster the sentence tells it
        facts.append(("error", headline(state.error)[0]))
    return [f"{name:<8} {text}" for name, text in facts]


def _fit(line: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in line).rstrip()
    return printable if len(printable) <= WIDTH else printable[: WIDTH - 1] + "…"
