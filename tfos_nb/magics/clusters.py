"""Find the user's clusters: among the variables, and the one that a line means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tfos_nb.errors import PlanError, counted
from tfos_nb.magics.arguments import find_variable
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.state.active_clusters import active_clusters
from tfos_nb.state.cluster_state import ClusterState
from tfos_nb.widgets.reprs import planned_state

__all__ = ["Launch", "PlannedCluster", "RunningCluster", "check_free", "clusters_of", "pick", "say_stopped"]


class RunningCluster(Protocol):
    """The part of :class:`tfos_nb.Cluster` that the magics use."""

    @property
    def plan(self) -> ClusterPlan: ...  # noqa: D102

    def snapshot(self) -> ClusterState: ...  # noqa: D102

    def wait_until_up(self) -> object: ...  # noqa: D102

    def announce_train(self) -> None: ...  # noqa: D102

    def train(self, data: Any, epochs: int = 1, *, validation: Any = None) -> object: ...  # noqa: D102

    def wait(self, timeout: float | None = None) -> object: ...  # noqa: D102

    def result(self) -> Any: ...  # noqa: D102

    def request_stop(self) -> str: ...  # noqa: D102

    def stop(self, grace: float | None = None) -> object: ...  # noqa: D102

    def logs(self, node: str) -> str: ...  # noqa: D102


Launch = Callable[..., RunningCluster]


class PlannedCluster:
    """A plan with the interface of a cluster, for the display before the cluster exists."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan

    def snapshot(self) -> ClusterState:
        """Return the plan as a state in which nothing has started."""
        return planned_state(self._plan)


def is_cluster(value: object) -> bool:
    """Return whether a value is a Cluster, without importing Spark."""
    return callable(getattr(type(value), "snapshot", None)) and isinstance(getattr(value, "plan", None), ClusterPlan)


def clusters_of(namespace: Mapping[str, Any]) -> dict[str, RunningCluster]:
    """Return the clusters among the user's variables by variable name, and running ones without a variable by name.

    A variable may be deleted, or get another value, while its cluster runs.
    """
    found = {name: value for name, value in list(namespace.items()) if name[:1] != "_" and is_cluster(value)}
    held = {id(value) for value in found.values()}
    for cluster in active_clusters():
        if id(cluster) not in held:
            name = cluster.plan.name
            found[name if name not in found else f"{name}-{cluster.id}"] = cluster
    return found


def pick(magic: str, name: str | None, namespace: Mapping[str, Any]) -> tuple[str, RunningCluster]:
    """Return the name and the cluster that a line means: the named one, the only running one, or else the only one.

    Raises
    ------
    PlanError
        If there is none, or several are possible.
    """
    clusters = clusters_of(namespace)
    if name in clusters:
        return name, clusters[name]
    if name:
        value = find_variable(magic, name, namespace, clusters)
        if not is_cluster(value):
            raise PlanError(f"{magic} {name}: not a cluster but of type {type(value).__name__}")
        return name, value
    running = {key: value for key, value in clusters.items() if not value.snapshot().status.ended}
    meant = running or clusters
    if len({id(value) for value in meant.values()}) > 1:
        first = min(meant)
        raise PlanError(
            f"{magic}: several clusters are possible ({', '.join(sorted(meant))}); name one: {magic} {first}"
        )
    if not meant:
        raise PlanError(f"{magic}: no cluster exists yet; %%tfos_cluster starts one")
    return next(iter(meant.items()))


def check_free(name: str, namespace: Mapping[str, Any]) -> None:
    """Refuse a NAME whose variable has a value of the user's, or a running cluster."""
    value = namespace.get(name)
    if value is None:
        return
    if not is_cluster(value):
        raise PlanError(f"{name}: NAME would overwrite your {type(value).__name__} {name}; take another")
    state = value.snapshot()
    if not state.status.ended:
        nodes = sum(not node.status.ended for node in state.nodes)
        raise PlanError(f"{name}: this cluster still runs ({counted(nodes, 'node')}); {name}.stop() ends it")


def say_stopped(cluster: RunningCluster, how: str) -> str:
    """Return a line about how many nodes have ended, after the text ``how``."""
    nodes = cluster.snapshot().nodes
    ended = sum(node.status.ended for node in nodes)
    if ended == len(nodes):
        return f"{how}: {ended} node{' ended, its slot is' if ended == 1 else 's ended, their slots are'} free"
    return f"{how}: {ended} of {len(nodes)} nodes ended so far"
