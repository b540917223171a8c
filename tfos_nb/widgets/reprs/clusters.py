"""Displays of a cluster and of a plan."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import Any

from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.state.cluster_state import ClusterState, NodeState
from tfos_nb.state.training_curve import thin_points
from tfos_nb.widgets.html import render_html, render_section
from tfos_nb.widgets.reprs.links import links_to
from tfos_nb.widgets.text import WIDTH, render_text

__all__ = ["cluster_bundle", "plan_bundle", "planned_state"]

_POINTS_SHOWN = 400


def cluster_bundle(cluster: Any, *, every_node: bool = False, width: int = WIDTH) -> dict[str, str]:
    """Return a cluster's panel as it is now: static HTML with links to Spark's UI and TensorBoard, and text."""
    state: ClusterState = cluster.snapshot()
    history: Any = getattr(cluster, "history", None)
    if history is not None and not state.points:
        state = replace(state, points=tuple(thin_points(history.points(), _POINTS_SHOWN)))
    return {
        "text/html": render_html(state, every_node=every_node, links=links_to(cluster, state)),
        "text/plain": render_text(state, every_node=every_node, width=width),
    }


def planned_state(plan: ClusterPlan) -> ClusterState:
    """Return a plan as the state of a cluster of which nothing has started."""
    nodes, fed = [], frozenset(plan.fed_nodes)
    on_driver = frozenset(plan.driver_nodes)
    for node in plan.nodes:
        gpus = plan.gpus_of(node)
        slot = f"{plan.cpus} CPU" + (f" and {gpus} GPU" if gpus else "")
        slot = "on the driver, outside Spark" if node in on_driver else slot
        nodes.append(NodeState(str(node), detail=slot + (", fed from Spark" if node in fed else "")))
    return ClusterState(plan.name, nodes=tuple(nodes), plan=str(plan))


def plan_bundle(plan: ClusterPlan, *, note: str = "") -> dict[str, str]:
    """Return a plan as a table of its nodes and slots; ``note`` is a line below it."""
    state = planned_state(plan)
    told = _told(plan)
    foot = "".join(f'<div class="t-foot">{escape(line)}</div>' for line in (told, note) if line)
    text = [str(plan), *filter(None, [note])]
    return {
        "text/html": render_section(state.name, render_html(state, bare=True) + foot),
        "text/plain": "\n".join(text),
    }


def _told(plan: ClusterPlan) -> str:
    """Return where the nodes' data come from, and what the plan has beside nodes."""
    spark = plan.input_mode is not InputMode.TENSORFLOW
    fed = "Rows come from Spark" if spark else "The nodes read files themselves"
    more = [f"TensorFlow's protocol is {plan.protocol}"] if plan.protocol != "grpc" else []
    more += ["the training continues if the evaluator fails"] if plan.evaluator_may_fail else []
    return "; ".join([f"{fed} (input_mode='{InputMode(plan.input_mode).value}')", *more]) + "."
