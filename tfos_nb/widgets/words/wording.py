"""Texts of the renderings: the sentence, the numbers, and the states of nodes. Text and HTML share them."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from tfos_nb.errors import counted
from tfos_nb.state.cluster_state import JOINED, LEAVING, WITHOUT, ClusterState, ClusterStatus, NodeState, NodeStatus
from tfos_nb.widgets.words.problems import NO_NUMBER, headline, problem_first

__all__ = [
    "LONGEST",
    "Progress",
    "about",
    "cluster_word",
    "count",
    "duration",
    "memory",
    "node_word",
    "number",
    "progress",
    "rate",
    "sentence",
    "size",
    "time_left",
    "tone",
    "wrong_word",
]

LONGEST = 600
"""Maximum number of characters of an error in a sentence. The whole error is folded below it."""

_CLUSTER_TONES = {
    ClusterStatus.PLANNED: "idle",
    ClusterStatus.STARTING: "warn",
    ClusterStatus.RUNNING: "run",
    ClusterStatus.RECOVERING: "warn",
    ClusterStatus.STOPPING: "warn",
    ClusterStatus.DONE: "ok",
    ClusterStatus.FAILED: "bad",
    ClusterStatus.STOPPED: "idle",
}
_NODE_TONES = {
    NodeStatus.PLANNED: "idle",
    NodeStatus.RESERVED: "warn",
    NodeStatus.STARTING: "warn",
    NodeStatus.FEEDING: "warn",
    NodeStatus.TRAINING: "run",
    NodeStatus.DONE: "ok",
    NodeStatus.FAILED: "bad",
    NodeStatus.LOST: "bad",
    NodeStatus.STOPPED: "idle",
}
_TRAINING_ROLES = ("chief", "worker")

_STUCK = 2  # nodes of which the sentence says what they do


def number(value: float | None) -> str:
    """Format a loss or a metric in at most nine characters, so that columns keep their width.

    Examples
    --------
    >>> number(0.18702), number(12345.678), number(1.5e-07), number(None)
    ('0.1870', '12345.7', '1.5e-07', '')
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        return f"{value:.3g}"
    return f"{value:.4f}" if size < 1000 else f"{value:.1f}"


def count(value: int) -> str:
    """Format a whole number with a thousands separator."""
    return f"{value:,}"


def rate(value: float | None) -> str:
    """Format rows per second with three significant digits.

    Examples
    --------
    >>> rate(950.4), rate(21_430), rate(1.2e6), rate(None)
    ('950', '21.4 k', '1.20 M', '')
    """
    if value is None or not math.isfinite(value):
        return ""
    if value < 999.5:
        return f"{value:.0f}"
    scaled, unit = (value / 1e3, "k") if value < 999.5e3 else (value / 1e6, "M")
    digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{digits}f} {unit}"


def memory(value: int | None) -> str:
    """Format a number of bytes in MB or GB."""
    if value is None:
        return ""
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes and seconds, or hours and minutes.

    Examples
    --------
    >>> duration(4.2), duration(131), duration(7980)
    ('4 s', '2 min 11 s', '2 h 13 min')
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def about(seconds: float) -> str:
    """Format a duration in one unit, for a narrow column.

    Examples
    --------
    >>> about(58.4), about(131), about(7980)
    ('58 s', '2 min', '2 h')
    """
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    return f"{whole / 60:.0f} min" if whole < 6000 else f"{whole / 3600:.0f} h"


def size(state: ClusterState) -> str:
    """Return the cluster's numbers of nodes by role: ``"2 workers · 1 ps"``."""
    roles = Counter(node.node.partition(":")[0] for node in state.nodes)
    plural = {"worker": "workers", "evaluator": "evaluators"}
    return " · ".join(
        role if role == "chief" else f"{n} {plural.get(role, role) if n > 1 else role}" for role, n in roles.items()
    )


def cluster_word(state: ClusterState) -> str:
    """Return a word for the cluster's status; while it runs, for what its nodes do."""
    if state.status is ClusterStatus.RUNNING:
        statuses = {node.status for node in state.nodes if _trains(node)}
        if any(node.status is NodeStatus.TRAINING and _has_begun(node) for node in state.nodes if _trains(node)):
            return "Training"
        if NodeStatus.FEEDING in statuses:
            return "Waiting for rows"
    return str(state.status.value).capitalize()


def node_word(node: NodeState) -> str:
    """Return a word for a node's status."""
    if node.status is NodeStatus.FEEDING:
        return "waiting"
    if node.status is NodeStatus.TRAINING and node.node.startswith("ps"):
        return "serving"
    if node.status is NodeStatus.TRAINING and node.phase == "evaluate":
        return "evaluating"
    if node.status is NodeStatus.TRAINING and not _has_begun(node):
        return "running"
    return str(node.status.value).lower()


def wrong_word(node: NodeState, wrong: str) -> str:
    """Return the problem from :func:`problem_first`; for a silent node with the time since its last heartbeat."""
    if wrong == "silent" and node.heartbeat_age is not None:
        return f"silent {duration(node.heartbeat_age)}"
    return wrong


def tone(thing: ClusterState | NodeState) -> str:
    """Return the colour of a cluster's or node's status: ok, run, warn, bad or idle."""
    if isinstance(thing, ClusterState):
        return _CLUSTER_TONES[thing.status]
    if thing.status is NodeStatus.TRAINING and thing.node.startswith("ps"):
        return "ok"
    return _NODE_TONES[thing.status]


@dataclass(frozen=True)
class Progress:
    """Progress of the training, by the node that is furthest behind.

    ``share`` is the finished fraction of the epoch and ``total`` that of all epochs, both from 0 to 1. They are None if
    the program does not report the number of steps or epochs.
    """

    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    share: float | None = None
    total: float | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    rows_per_second: float | None = None


def progress(state: ClusterState) -> Progress:
    """Return the progress of the whole cluster."""
    trainers = [node for node in state.nodes if _trains(node)]
    rates = [node.rows_per_second for node in trainers if node.rows_per_second is not None and not node.status.ended]
    metrics = next((node.metrics for node in trainers if node.metrics), {})
    moving = [node for node in trainers if node.epoch is not None]
    moving = [node for node in moving if node.status not in (NodeStatus.FAILED, NodeStatus.LOST)] or moving
    last = min(moving, key=lambda node: (node.epoch or 0, node.step or 0), default=None)
    if last is None or last.epoch is None:
        return Progress(metrics=tuple(metrics.items()), rows_per_second=sum(rates) if rates else None)
    share = min(1.0, (last.step or 0) / last.steps) if last.steps else None
    total = min(1.0, (last.epoch - 1 + share) / last.epochs) if last.epochs and share is not None else None
    return Progress(
        last.epoch, last.epochs, last.step, share, total, tuple(metrics.items()), sum(rates) if rates else None
    )


def time_left(state: ClusterState, measured: float | None = None) -> float | None:
    """Return the seconds until the last node is done, as reported by the nodes, or else ``measured``."""
    if state.status.ended:
        return None
    told = [node.seconds_left for node in state.nodes if node.seconds_left is not None and not node.status.ended]
    return max(told) if told else measured


def sentence(state: ClusterState, *, counting: bool = False) -> str:
    """Return one sentence about what happens or has happened.

    With ``counting``, the sentence does not have the time for which a node has been silent, since the page counts it.
    So the sentence does not change every second.
    """
    if state.status is ClusterStatus.RUNNING:
        return _say_running(state, counting)
    telling = {
        ClusterStatus.PLANNED: _say_planned,
        ClusterStatus.STARTING: _say_starting,
        ClusterStatus.RECOVERING: _say_recovering,
        ClusterStatus.STOPPING: _say_stopping,
        ClusterStatus.DONE: _say_done,
        ClusterStatus.FAILED: _say_failed,
        ClusterStatus.STOPPED: _say_stopped,
    }
    return telling[state.status](state)


def _say_planned(state: ClusterState) -> str:
    where = f" on {state.spark_master}" if state.spark_master else ""
    return f"Planned{where}: {counted(len(state.nodes), 'node')}. None is started yet."


def _say_starting(state: ClusterState) -> str:
    absent = [node for node in state.nodes if node.status is NodeStatus.PLANNED]
    came = len(state.nodes) - len(absent)
    if absent:
        return f"{came} of {counted(len(state.nodes), 'node')} came to the rendezvous; {_names(absent)} not yet."
    return f"All {counted(len(state.nodes), 'node')} came to the rendezvous; TensorFlow starts in them."


def _say_running(state: ClusterState, counting: bool) -> str:
    trainers = [node for node in state.nodes if _trains(node)]
    training = [node for node in trainers if node.status is NodeStatus.TRAINING]
    running = [node for node in training if not _has_begun(node)]
    training = [node for node in training if _has_begun(node)]
    waiting = [node for node in trainers if node.status is NodeStatus.FEEDING]
    done = [node for node in trainers if node.status is NodeStatus.DONE]
    gone = [node for node in state.nodes if node.status in (NodeStatus.FAILED, NodeStatus.LOST)]
    troubled = [(node, wrong) for node, wrong in problem_first(state.nodes) if wrong]
    parts = []
    if training:
        total = progress(state)
        of = f" of {total.epochs}" if total.epochs else ""
        epoch = f", epoch {total.epoch}{of}" if total.epoch else ""
        parts.append(f"{_names(training)} {'train' if len(training) > 1 else 'trains'}{epoch}")
    if running:
        parts.append(f"main runs on {_names(running)}")
    if waiting:
        parts.append(f"{_names(waiting)} {'wait' if len(waiting) > 1 else 'waits'} for rows")
    if done:
        parts.append(f"{_names(done)} {'are' if len(done) > 1 else 'is'} done")
    if gone:
        parts.append(f"{_names(gone)} {'are' if len(gone) > 1 else 'is'} gone")
    said = "; ".join(parts) or "The nodes are up"
    stuck = [node for node in state.nodes if node.stuck]
    if stuck:
        return f"{said}. Nothing moves: {'; '.join(f'{node.node} {node.detail}' for node in stuck[:_STUCK])}."
    slow = [node for node in state.nodes if node.slow]
    if slow and not counting:
        return f"{said}. {'. '.join(f'{node.node} {node.detail}' for node in slow[:_STUCK])}."
    if troubled:
        node, wrong = troubled[0]
        if wrong == NO_NUMBER:
            said += f". The loss of {node.node} is NaN"
        else:
            said += f". {node.node} is {wrong if counting else wrong_word(node, wrong)}"
        said += f", and {counted(len(troubled) - 1, 'other')} with it" if len(troubled) > 1 else ""
    return said + "."


def _say_recovering(state: ClusterState) -> str:
    first = headline(state.error, LONGEST)[0]
    if WITHOUT in first or first.endswith((JOINED, LEAVING)):
        return f"{first}."
    return f"{first or 'A node was lost'}. The others wait for its replacement.".replace("..", ".")


def _say_stopping(state: ClusterState) -> str:
    left = [node for node in state.nodes if not node.status.ended]
    return f"Stopping: {_names(left)} to end." if left else "Stopping: every node has ended."


def _say_done(state: ClusterState) -> str:
    """Return the outcome with its metrics, which a reader of the saved notebook wants to see."""
    rows = state.feed.rows if state.feed else 0
    fed = f", {count(rows)} rows" if rows else ""
    said = f"Done in {duration(state.elapsed)}{fed}"
    total = progress(state)
    metrics = ", ".join(f"{name} {number(value)}" for name, value in total.metrics[:4])
    return f"{said}{': ' if metrics else ''}{metrics}.{_say_unfed(state, total)}"


def _say_unfed(state: ClusterState, total: Progress) -> str:
    """Return a text about epochs without rows; empty if there were none.

    A ``fit`` that stops early by itself uses fewer passes than were fed, so it is not reported.
    """
    done, wanted = total.epoch or 0, total.epochs or 0
    if state.feed is None or not state.feed.rows or not state.feed.epochs <= done < wanted:
        return ""
    return f" Rows were fed for {done} of its {wanted} epochs (--epochs)."


def _say_failed(state: ClusterState) -> str:
    return headline(state.error, LONGEST)[0] or f"Failed after {duration(state.elapsed)}."


def _say_stopped(state: ClusterState) -> str:
    ended = [node for node in state.nodes if node.status.ended or node.status is NodeStatus.PLANNED]
    if len(ended) == len(state.nodes):
        return f"Stopped after {duration(state.elapsed)}; every node has ended."
    return f"Stopped after {duration(state.elapsed)}; {len(ended)} of {counted(len(state.nodes), 'node')} ended."


def _has_begun(node: NodeState) -> bool:
    """Return whether the node's program has read a row or reported a step. Before that, only its start is known."""
    return bool(node.rows or node.step or node.metrics or node.epoch is not None or node.phase)


def _trains(node: NodeState) -> bool:
    return node.node.partition(":")[0] in _TRAINING_ROLES


def _names(nodes: list[NodeState]) -> str:
    """Return the names of up to three nodes; for more nodes, return their number."""
    if len(nodes) > 3:
        roles = {re.sub(r":\d+$", "", node.node) for node in nodes}
        return f"{len(nodes)} {roles.pop()}s" if len(roles) == 1 else f"{len(nodes)} nodes"
    names = [node.node for node in nodes]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
