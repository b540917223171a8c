"""Display of a plan."""

from __future__ import annotations

from html import escape

from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.state.cluster_state import ClusterState, NodeState
from tfos_nb.widgets.html import render_html, render_section

__all__ = ["plan_bundle", "planned_state"]


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
