"""Measure the driver's own work for up to thousands of nodes, without Spark and TensorFlow.

The driver's components are real, in a separate process. The nodes are simulated, each with its own TLS connection
(:mod:`benchmarks.fleet_nodes`). They send a heartbeat once a second, or as often as the same number of real nodes.
TensorFlowOnSpark's reservation server gets the same number of its own clients, which ask once a second whether all
nodes have registered.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import lineage_venv
from benchmarks.session import ROOT
from benchmarks.table import Ratio, Result
from tfos_nb.runtime.control.reports import tick_among

if TYPE_CHECKING:
    from benchmarks.settings import Settings

__all__ = ["growth", "run"]

NODES = (100, 300, 1000, 3000, 5000)
FORCED = (3000, 5000)
"""Measured once more with a heartbeat a second, where the product has so many nodes speak less often."""

LINEAGE_NODES = (100, 300, 1000, 3000)
GROWING = {
    "rendezvous": "seconds until all have heard Start",
    "rendezvous_cpu": "the driver's CPU seconds for that",
    "cpu": "the driver's share of a core at a heartbeat a second",
    "cpu_a_message": "the driver's CPU seconds a message, the panel's included",
    "memory_grown": "the driver's memory, beyond what it had before",
    "stop": "seconds until all have heard Stop",
    "over": "seconds until all have gone after Stop",
    "start_bytes": "bytes of all Start messages",
}
LINEAR = 1.15
"""An exponent up to here is called linear: it is fitted to a few figures of one run each."""

WHERE_KEPT = ("cpu", "stop", "over")
"""Figures that are fitted only where all heartbeats were handled. Elsewhere the machine is fully loaded."""

OF_A_SECOND = ("cpu", "cpu_a_message")
"""Figures that are fitted only where each node sends a heartbeat a second."""

BY_NATURE = ("start_bytes",)
"""Figures that grow with the square: each node receives all addresses."""

BEATS_KEPT = 0.97
_SECONDS = 600.0


def run(settings: Settings) -> Result:
    """Measure each number of nodes once, alternating with TensorFlowOnSpark, and fit the growth."""
    ours: list[dict[str, Any]] = []
    lineage: list[dict[str, Any]] = []
    for nodes in sorted({*NODES, *LINEAGE_NODES}):
        for every in _paces(nodes):
            ours.append({**_measure(nodes, every), "load": os.getloadavg()[0]})
            settings.say(f"fleet: {ours[-1]}")
        if nodes in LINEAGE_NODES and not settings.without_lineage:
            lineage.append(lineage_venv.run("benchmarks.lineage_fleet", nodes))
            settings.say(f"fleet: {nodes} clients of TensorFlowOnSpark: {lineage[-1]}")
    exponents = {what: growth(_points(ours, what)) for what in GROWING}
    figures = {"ours": ours, "lineage": lineage, "exponents": exponents}
    return Result(
        "fleet", (*_growths(exponents), *_kept(ours), *_compared(ours, lineage)), figures, _notes(ours, lineage)
    )


def _paces(nodes: int) -> tuple[float, ...]:
    """Return the seconds between a node's heartbeats in each run with this number of nodes."""
    if nodes not in NODES:
        return ()
    own = _own_pace(nodes)
    return (own, 1.0) if nodes in FORCED else (own,)


def _own_pace(nodes: int) -> float:
    """Return the default seconds between a node's heartbeats in a cluster with this number of nodes."""
    return max(1.0, tick_among(nodes))


def _points(ours: list[dict[str, Any]], what: str) -> list[tuple[float, float]]:
    fitting = [one for one in ours if one["every"] == (1 if what in OF_A_SECOND else _own_pace(one["nodes"]))]
    kept = [one for one in fitting if what not in WHERE_KEPT or _beats_kept(one)]
    return [(one["nodes"], one[what]) for one in kept if what in one]


def _beats_kept(one: dict[str, Any]) -> bool:
    return bool(one.get("beats", 0.0) >= BEATS_KEPT * one["nodes"] / one["every"])


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Return the exponent of a power law fitted to points: the slope of a line through their logarithms.

    Examples
    --------
    >>> round(growth([(1, 3.0), (10, 30.0), (100, 300.0)]), 3), round(growth([(1, 1.0), (10, 100.0)]), 3)
    (1.0, 2.0)
    """
    slope, _ = statistics.linear_regression(*zip(*((math.log(n), math.log(y)) for n, y in points), strict=True))
    return slope


def _measure(nodes: int, every: float) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.fleet_driver", str(nodes), str(every)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_SECONDS,
        check=True,
    )
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def _growths(exponents: dict[str, float]) -> list[Ratio]:
    return [
        Ratio(f"growth with N: {GROWING[what]}", power, 1.0, "exponent", None if what in BY_NATURE else LINEAR, True)
        for what, power in exponents.items()
    ]


def _kept(ours: list[dict[str, Any]]) -> list[Ratio]:
    """Return the heartbeats a second that the driver received, and those that were due."""
    return [
        Ratio(
            f"{one['nodes']} nodes, a heartbeat in {one['every']:.3g} s: taken / due",
            one["beats"],
            one["nodes"] / one["every"],
            "a second",
            BEATS_KEPT,
        )
        for one in ours
        if "beats" in one
    ]


def _compared(ours: list[dict[str, Any]], lineage: list[dict[str, Any]]) -> list[Ratio]:
    by_nodes = {one["nodes"]: one for one in ours}
    pairs = [
        (by_nodes[one["nodes"]], one) for one in lineage if not one["ended"] and not by_nodes[one["nodes"]]["ended"]
    ]
    return [
        ratio
        for mine, theirs in pairs
        for ratio in (
            Ratio(
                f"{mine['nodes']} nodes: CPU, heartbeats and panel / TensorFlowOnSpark's polls",
                mine["cpu"],
                theirs["cpu"],
                "of a core",
            ),
            Ratio(
                f"{mine['nodes']} nodes: all come and told / TensorFlowOnSpark's registering and telling",
                mine["rendezvous"],
                theirs["registering"] + theirs["telling_all"],
                "s",
                1.0,
                at_most=True,
            ),
        )
    ]


def _notes(ours: list[dict[str, Any]], lineage: list[dict[str, Any]]) -> tuple[str, ...]:
    ended = [f"{one['nodes']} nodes: {one['ended']}" for one in ours if one["ended"]]
    ended += [f"TensorFlowOnSpark with {one['nodes']} clients: {one['ended']}" for one in lineage if one["ended"]]
    return ("one run of each number of nodes; the nodes' processes share the cores with the driver", *ended)
