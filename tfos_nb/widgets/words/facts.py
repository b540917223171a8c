"""Texts of the panel's tiles and cells, which the page and the static HTML share."""

from __future__ import annotations

import re
from typing import NamedTuple

from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, NodeState
from tfos_nb.state.metric_order import in_order
from tfos_nb.widgets.words import wording

__all__ = ["Gpu", "Steps", "Tile", "gpu", "has_gpus", "machine", "metric_names", "room", "steps", "tiles", "title"]

METRICS = 4
"""Maximum number of metrics that have a column, including the loss."""

_ALWAYS, _ALWAYS_ENDED = 594, 464
"""Pixels of the columns that are always shown: node, state, step and loss; before the end also rate and heartbeat."""

_GPU = 120

_GIVE_WAY = (("metric1", 82), ("metric2", 82), ("metric3", 82), ("left", 82), ("cpu", 80))
"""Pixels of the columns that a narrow panel leaves out, the last one first.

The remaining time is also in a tile. The use of a node's CPU says the least about the training.
"""

_ROOMS = range(600, 1161, 40)
"""Widths of the panel in pixels, below which ``panel.css`` can leave out a column."""

_MAKER = re.compile(r"\b(nvidia|tesla|quadro|geforce|graphics|amd|instinct)\b", re.IGNORECASE)
_OF_THE_SAME = re.compile(r"[- ](\d+ ?GB|HBM\w*|SXM\d?|PCIe)\b", re.IGNORECASE)


class Tile(NamedTuple):
    """One of the numbers above the table.

    ``key`` identifies it on the page. ``percent`` is for its bar, if any. ``metric`` is the metric that it shows.
    """

    key: str
    label: str
    value: str
    percent: int | None = None
    tone: str = "run"
    curve: tuple[float, ...] = ()
    metric: str = ""


class Steps(NamedTuple):
    """Progress of a node: its epoch and step as text, and the percentage of the epoch."""

    epoch: str
    step: str
    percent: int | None


class Gpu(NamedTuple):
    """Use of a node's GPUs, as text. ``percents`` has the use of each GPU, and ``short`` their short name."""

    name: str
    percents: tuple[int, ...]
    memory: str
    short: str = ""


def tiles(state: ClusterState, left: float | None) -> list[Tile]:
    """Return the tiles of the whole cluster: progress, metrics, rate and remaining time."""
    if state.status in (ClusterStatus.PLANNED, ClusterStatus.STARTING):
        return []
    total = wording.progress(state)
    curves = next((node.curves for node in state.nodes if node.metrics), {})
    made = [_epoch_tile(state, total), *_feed_tiles(state)]
    values = dict(total.metrics)
    curve = tuple(curves.get("loss", ()))
    made.append(Tile("loss", "Loss", wording.number(values.get("loss")), curve=curve, metric="loss"))
    other = next((name for name in in_order(values) if name != "loss"), None)
    if other is not None:
        curve = tuple(curves.get(other, ()))
        made.append(Tile("metric", title(other), wording.number(values[other]), curve=curve, metric=other))
    if state.status.ended:
        made.append(Tile("left", "Took", wording.duration(state.elapsed)))
    else:
        made.append(Tile("rate", "Rows/s", wording.rate(total.rows_per_second)))
        made.append(Tile("left", "Time left", "" if left is None else f"~ {wording.duration(left)}"))
    return made


def title(metric: str) -> str:
    """Return a metric's name as the title of a column."""
    words = metric.replace("_", " ")
    return words[:1].upper() + words[1:]


def metric_names(state: ClusterState) -> list[str]:
    """Return the metrics that have a column: the loss and up to three others, training metrics first."""
    names = in_order(name for node in state.nodes for name in node.metrics)
    return names[: METRICS if names[:1] == ["loss"] else METRICS - 1]


def room(state: ClusterState) -> dict[str, int]:
    """Return the panel's minimum width in pixels for each column that a narrow panel leaves out."""
    needed = (_ALWAYS_ENDED if state.status.ended else _ALWAYS) + (_GPU if has_gpus(state) else 0)
    shown = {f"metric{place}" for place in range(len(metric_names(state)))}
    shown |= {"cpu"} if state.status.ended else {"cpu", "left"}
    rooms = {}
    for column, width in _GIVE_WAY:
        if column in shown:
            needed += width
            rooms[column] = next((room for room in _ROOMS if room >= needed), _ROOMS[-1])
    return rooms


def steps(node: NodeState) -> Steps:
    """Return the progress of a node."""
    epoch = "" if node.epoch is None else f"{node.epoch}/{node.epochs}" if node.epochs else str(node.epoch)
    step = "" if node.step is None else f"{node.step}/{node.steps}" if node.steps else str(node.step)
    return Steps(epoch, step, _percent((node.step or 0) / node.steps) if node.steps else None)


def has_gpus(state: ClusterState) -> bool:
    """Return whether any node has a GPU."""
    return any(node.gpus or node.gpu_use for node in state.nodes)


def short_name(gpu: str) -> str:
    """Return the short name of a GPU's model, without its manufacturer, memory and form factor.

    Examples
    --------
    >>> [short_name(name) for name in ("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4090")]
    ['H100', 'V100', 'RTX 4090']
    """
    return " ".join(_OF_THE_SAME.sub("", _MAKER.sub("", gpu)).split()) or gpu


def gpu(node: NodeState) -> Gpu | None:
    """Return the use of a node's GPUs; None if it has none. If NVML reports nothing, it has only their addresses."""
    if not node.gpu_use:
        return Gpu("", (), f"GPU {', '.join(node.gpus)}") if node.gpus else None
    names = list(dict.fromkeys(use.name for use in node.gpu_use if use.name))
    percents = tuple(round(use.percent) for use in node.gpu_use if use.percent is not None)
    used = [use.memory_used for use in node.gpu_use if use.memory_used is not None]
    total = [use.memory_total for use in node.gpu_use if use.memory_total is not None]
    memory = _gigabytes(sum(used)) if used else ""
    memory += f"{' / ' if used else ''}{_gigabytes(sum(total))}" if total else ""
    many = f"{len(node.gpu_use)} x " if len(node.gpu_use) > 1 else ""
    short = ", ".join(dict.fromkeys(map(short_name, names))) or "GPU"
    return Gpu(many + (", ".join(names) or "GPU"), percents, f"{memory} GB" if memory else "", many + short)


def machine(node: NodeState) -> tuple[str, str]:
    """Return a node's use of the CPU and of memory, as text."""
    return "" if node.cpu_percent is None else f"{node.cpu_percent:.0f}%", wording.memory(node.memory_bytes)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}" if size < 99.95e9 else f"{size / 1e9:.0f}"


def _epoch_tile(state: ClusterState, total: wording.Progress) -> Tile:
    if total.epoch is None:
        return Tile("epoch", "Epoch", "", 0, "idle")
    of = f" of {total.epochs}" if total.epochs else ""
    percent = _percent(total.share)
    value = f"{percent} %" if percent is not None else f"step {total.step}" if total.step is not None else ""
    return Tile("epoch", f"Epoch {total.epoch}{of}", value, percent, wording.tone(state))


def _feed_tiles(state: ClusterState) -> list[Tile]:
    feed = state.feed
    if feed is None:
        return []
    percent = _percent(feed.partitions_done / feed.partitions) if feed.partitions else None
    passes = f" · {feed.epochs} passes" if feed.epochs > 1 else ""
    done = "" if percent is None else f" · {percent} %"
    return [Tile("feed", f"Feed{passes}{done}", f"{wording.count(feed.rows)} rows", percent, "ok")]


def _percent(share: float | None) -> int | None:
    return None if share is None else round(100 * min(1.0, max(0.0, share)))
