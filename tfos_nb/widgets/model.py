"""Data of a cluster for the page: a small dictionary with everything that the panel shows.

It is sent again whenever something changes. So it has at most :data:`BUDGET` bytes, for any size of the cluster and any
output of the nodes. :mod:`tfos_nb.widgets.words.wording` formats words and numbers; the page only counts time. A node
is a list, and ``fields`` names its elements.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from tfos_nb.redaction import without_password
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, LogLine, NodeState, NodeStatus
from tfos_nb.state.log_buffer import brief_line
from tfos_nb.truncate import clip, clip_lines, size
from tfos_nb.widgets.words import facts, wording
from tfos_nb.widgets.words.curves import quantise, span
from tfos_nb.widgets.words.problems import NO_NUMBER, aside, headline, own_line, problem_first

__all__ = ["BUDGET", "FIELDS", "IN_DETAIL", "STOPPABLE", "change_key", "key_of", "page_model"]

BUDGET = 20_000
"""Maximum size of a message, in bytes of JSON."""

IN_DETAIL = 64
"""Maximum number of nodes that are sent in detail, the most important ones first. Each other node is one character."""

FOR_TEXTS = 2_500
"""Bytes that are reserved for the sentence, the error, the plan and the log."""

FEW_NODES = 12
"""Up to this number of nodes, curves are long and nodes stay in the order of the plan."""

_FEW_POINTS = ((48, 48),)
_POINTS = ((16, 10), (10, 8), (6, 5))
"""Points of the loss's curve and of the other metrics' curves. The first pair with which the message fits is used."""

FIELDS = (
    "name", "host", "executor", "state", "epoch", "step", "percent", "metrics", "curves", "rate", "left", "gpu", "cpu",
    "memory", "beat", "detail",
)  # fmt: skip
"""Names of the elements of a node's list."""

_STATES = (
    ("planned", "idle"), ("reserved", "warn"), ("starting", "warn"), ("waiting", "warn"), ("running", "run"),
    ("training", "run"), ("evaluating", "run"), ("serving", "ok"), ("done", "ok"), ("failed", "bad"), ("lost", "bad"),
    ("stopped", "idle"), ("slow", "warn"), ("silent", "warn"), (NO_NUMBER, "warn"), ("stuck", "warn"),
)  # fmt: skip
"""Words for a node's state, with their colours. A node's state is sent as an index of this list."""

_STATE_PLACES = {word: place for place, (word, _) in enumerate(_STATES)}
STOPPABLE = (ClusterStatus.STARTING, ClusterStatus.RUNNING, ClusterStatus.RECOVERING, ClusterStatus.STOPPING)


def page_model(
    state: ClusterState, *, note: str = "", left: float | None = None, said: str = "", stoppable: bool = True
) -> dict[str, Any]:
    """Return the dictionary that the page shows.

    Parameters
    ----------
    state : ClusterState
        The state to show.
    note : str
        A line at the end.
    left : float, optional
        Seconds until the training ends, used if the nodes do not report it.
    said : str
        The cluster's answer to a press of the Stop button.
    stoppable : bool
        Whether a press of the Stop button can reach the cluster.

    Returns
    -------
    dict
        A dictionary of values that JSON can represent.
    """
    judged = problem_first(state.nodes)
    wrong = {node.node: word for node, word in judged}
    shown = [node for node, _ in judged[:IN_DETAIL]] if len(state.nodes) > FEW_NODES else list(state.nodes)
    model = _head(state, wording.time_left(state, left), stoppable)
    model |= {"note": clip(note, 300), "said": clip(said, 300)}
    few = len(state.nodes) <= FEW_NODES
    for points in _FEW_POINTS if few else _POINTS:
        model |= _nodes(state, shown, wrong, points)
        if size(model) <= BUDGET - FOR_TEXTS:
            break
    while model["nodes"] and size(model) > BUDGET - FOR_TEXTS:  # names, hosts and metrics of extraordinary length
        model["nodes"] = model["nodes"][: len(model["nodes"]) * 3 // 4]
    _add_long_texts(model, state)
    return model


def change_key(state: ClusterState, *, note: str = "", said: str = "") -> str:
    """Return a text that differs if the page would show something else, apart from times that the page counts."""
    return key_of(page_model(state, note=note, said=said))


def key_of(model: dict[str, Any]) -> str:
    """Return the text of :func:`change_key` for a model."""
    if model["ended"]:
        return json.dumps(model)
    tiles = [tile[:2] if tile[0] == "left" else tile for tile in model["tiles"]]
    nodes = [[value for place, value in enumerate(node) if place not in _TIMES] for node in model["nodes"]]
    return json.dumps({**model, "elapsed": 0, "left": None, "tiles": tiles, "nodes": nodes})


_TIMES = (FIELDS.index("left"), FIELDS.index("beat"))


def _head(state: ClusterState, left: float | None, stoppable: bool) -> dict[str, Any]:
    return {
        "id": state.id,
        "name": clip(state.name, 80),
        "status": state.status.value,
        "ended": state.status.ended,
        "stoppable": stoppable and state.status in STOPPABLE,
        "word": wording.cluster_word(state),
        "tone": wording.tone(state),
        "size": clip(wording.size(state), 200),
        "generation": state.generation,
        "elapsed": None if state.status is ClusterStatus.PLANNED else round(state.elapsed, 1),
        "left": None if left is None else round(left),
        "master": clip(state.spark_master, 80),
        "tensorboard": clip(without_password(state.log_dir), 120),
        "tiles": [
            [
                tile.key,
                clip(tile.label, 60),
                tile.value,
                tile.percent,
                tile.tone,
                _curve(tile.curve, 48),
                clip(tile.metric, 60),
            ]
            for tile in facts.tiles(state, left)
        ],
    }


def _nodes(
    state: ClusterState, shown: list[NodeState], wrong: dict[str, str], points: tuple[int, int]
) -> dict[str, Any]:
    few = len(state.nodes) <= FEW_NODES
    names = facts.metric_names(state)
    gpu_names = dict(sorted((use.name, use.short) for node in shown if (use := facts.gpu(node)) is not None))
    domain = _domain([node.host for node in shown])
    lengths = (points[:1] + points[1:] * len(names))[: len(names)]
    places = [_place(node, wrong) for node in state.nodes]
    return {
        "fields": FIELDS,
        "states": _STATES,
        "metrics": [clip(facts.title(name), 24) for name in names],
        "charts": [clip(name, 60) for name in names],
        "gpus": facts.has_gpus(state),
        "gpuNames": [clip(name, 48) for name in gpu_names],
        "gpuShort": [clip(short, 20) for short in gpu_names.values()],
        "room": facts.room(state),
        "domain": domain,
        "nodes": [
            _node(replace(node, host=node.host.removesuffix(domain)), wrong, names, lengths, list(gpu_names))
            for node in shown
        ],
        "cells": "" if few else "".join(chr(ord("a") + place) for place in places),
        "roles": _roles(state.nodes),
    }


def _node(
    node: NodeState, wrong: dict[str, str], names: list[str], lengths: tuple[int, ...], gpu_names: list[str]
) -> list[Any]:
    """Return a node's list, with the elements of :data:`FIELDS`."""
    far = facts.steps(node)
    gpu = facts.gpu(node)
    cpu, memory = facts.machine(node)
    return [
        clip(node.node, 24),
        clip(node.host, 32),
        clip(node.executor, 12),
        _place(node, wrong),
        far.epoch,
        far.step,
        far.percent,
        [wording.number(node.metrics.get(name)) for name in names],
        _curves([(node.curves.get(name, ()), length) for name, length in zip(names, lengths, strict=True)]),
        "" if node.status.ended else wording.rate(node.rows_per_second),
        None if node.seconds_left is None or node.status.ended else round(node.seconds_left),
        None if gpu is None else [gpu_names.index(gpu.name), gpu.percents[:8], clip(gpu.memory, 24)],
        cpu,
        memory,
        None if node.heartbeat_age is None or node.status.ended else round(node.heartbeat_age, 1),
        clip(node.detail, 90) if node.step is None or node.status in (NodeStatus.FAILED, NodeStatus.LOST) else "",
    ]


def _place(node: NodeState, wrong: dict[str, str]) -> int:
    return _STATE_PLACES[wrong[node.node] or wording.node_word(node)]


def _roles(nodes: Sequence[NodeState]) -> list[list[Any]]:
    """Return the names of all nodes as ``[role, first index, count]`` for consecutive indices, else one by one."""
    runs: list[list[Any]] = []
    for node in nodes:
        role, _, number = node.node.rpartition(":")
        index = int(number) if role and number.isdecimal() else None
        name = node.node if index is None else role
        if index is not None and runs and runs[-1][0] == name and runs[-1][1] == index - runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([name, index, 1])
    return [[clip(name, 24), first, count] for name, first, count in runs]


def _domain(hosts: list[str]) -> str:
    """Return the common domain of many hosts, which is sent only once; empty if there is none or hosts are few."""
    alike = takewhile(lambda chars: len(set(chars)) == 1, zip(*(host[::-1] for host in hosts), strict=False))
    shared = "".join(chars[0] for chars in alike)[::-1]
    domain = shared[shared.find(".") :] if "." in shared else ""
    is_name = not domain.replace(".", "").isdecimal()  # not the end of an IP address
    return domain if len(hosts) > FEW_NODES and is_name and len(domain) <= 120 else ""


def _curves(curves: list[tuple[Sequence[float], int]]) -> list[list[str]] | str:
    """Return the curves of a node: long ones each with its lowest and highest value, short ones in one string."""
    if all(length >= 20 for _, length in curves):
        return [_curve(values, length) for values, length in curves]
    return " ".join(quantise(values, length) for values, length in curves)


def _curve(values: Sequence[float], points: int) -> list[str]:
    """Return a curve as its points and its lowest and highest value; empty if there is no curve yet."""
    line, ends = quantise(values, points), span(values)
    return [line, f"{ends[0]:.3g}", f"{ends[1]:.3g}"] if line and ends is not None else []


def _add_long_texts(model: dict[str, Any], state: ClusterState) -> None:
    """Add the long texts to a model, cut to the remaining bytes: first the error, then the plan, then the log."""
    first, rest = headline(state.error)
    own = own_line(rest)
    model["sentence"] = clip(wording.sentence(state, counting=True), 600)
    model["aside"] = aside(state)
    model["error"] = clip(first, 600)
    model["own"] = [clip(own.where, 160), clip(own.code, 240)] if own else []
    left = BUDGET - size(model) - 200
    model["trace"] = clip_lines(rest, min(6_000, left // 3))
    model["plan"] = clip(state.plan, min(2_000, left // 4), more="\n…")
    model["log"] = _newest(state.log, min(10_000, BUDGET - size(model) - 200))


def _newest(log: Sequence[LogLine], room: int) -> list[list[Any]]:
    """Return the newest lines that fit into ``room`` bytes, the oldest of them first."""
    taken: list[list[Any]] = []
    for line in reversed(log):
        written = brief_line(line)
        room -= size(written) + 2
        if room < 0:
            break
        taken.append(written)
    return taken[::-1]
