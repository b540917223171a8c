"""Spark jobs whose tasks are a cluster's nodes, and jobs that start lost nodes again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.driver.launching import Launching, NodeTasks
from tfos_nb.driver.local_nodes import HostedNode
from tfos_nb.runtime.control.plan import ClusterPlan, Node
from tfos_nb.runtime.node.spark_task import SUMMARY_SCHEMA
from tfos_nb.spark.contexts import context_of
from tfos_nb.spark.contexts.pending_slots import PendingSlots, expect
from tfos_nb.spark.session import Job, SparkJobs, run_to_the_end

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

__all__ = ["NodeJobs"]


@dataclass(frozen=True)
class _Submitted:
    nodes: tuple[str, ...]
    profile: ResourceProfile | None
    job: Job[Any]
    promised: PendingSlots | None = None  # none of a node of the driver's own


@dataclass
class NodeJobs:
    """Run one Spark job for each resource profile, with one partition for each node, and the driver's own nodes.

    Parameters
    ----------
    spark, jobs
        The session, and the cluster's tagged jobs in it.
    launching : Launching
        The result of preflight.
    tasks : NodeTasks
        Makes the task for some nodes.
    description : str
        Description of the cluster, for people.
    controller : ClusterController
        Knows which nodes have not come. Their slots count as used until none is missing.
    wake : callable
        Called when a job has ended.
    """

    spark: SparkSession
    jobs: SparkJobs
    launching: Launching
    tasks: NodeTasks
    description: str
    controller: ClusterController
    wake: Callable[[], None]
    _submitted: list[_Submitted] = field(default_factory=list)

    def submit(self) -> None:
        """Start them all."""
        for nodes, profile in self.launching.groups:
            self._on_spark(nodes, profile)
        for node in self.launching.here:
            self._here(node)

    def forget(self) -> None:
        """Drop the tasks that the nodes were sent: the cluster has ended."""
        self.tasks = replace(self.tasks, payload=b"")

    def submit_more(self, plan: ClusterPlan, found: Launching) -> None:
        """Start the additional nodes of a wider plan, for which preflight has run."""
        self.tasks = replace(self.tasks, plan=plan, hold=self.tasks.hold and found.hold)
        for nodes, profile in found.groups:
            self._on_spark(nodes, profile)

    def submit_again(self) -> None:
        """Start new jobs for lost nodes that no task watches; a running job restarts its own nodes.

        When a job fails, all its tasks end, so all its nodes get a new one. A task whose node still runs only holds
        the slot for it.
        """
        for one in list(self._submitted):
            ended, failed = one.job.done.is_set(), one.job.error is not None
            lost = self.controller.missing if ended else self.controller.without_supervisor
            nodes = tuple(node for node in one.nodes if failed or node in lost)
            if not nodes:
                continue
            self._submitted.remove(one)
            staying = tuple(node for node in one.nodes if node not in nodes)
            if staying or not ended:  # also of a job that has ended: a node that has left its slot may be lost later
                self._submitted.append(replace(one, nodes=staying))
            if one.promised is None:
                self._here(nodes[0])
            else:
                self._on_spark(nodes, one.profile)

    @property
    def running(self) -> list[Job[Any]]:
        """The jobs, both running and ended."""
        return [one.job for one in self._submitted]

    def without_slot(self) -> int:
        """Count the missing nodes whose tasks wait for a slot; 0 if Spark does not say which tasks run."""
        context = context_of(self.spark)
        stages = context.in_time(context.busy) if context.sees_tasks else None
        if stages is None:
            return 0
        waiting = (one.promised.still(stages) for one in list(self._submitted) if one.promised is not None)
        return sum(one.tasks for one in waiting if one is not None)

    def _on_spark(self, nodes: tuple[str, ...], profile: ResourceProfile | None) -> None:
        self.controller.mark_submitted(nodes, self.tasks.hold)
        extra: dict[str, Any] = {"profile": profile} if profile is not None else {}  # PySpark 3.5 has no such argument
        rows = self.spark.range(0, len(nodes), 1, len(nodes))
        frame = rows.mapInArrow(self.tasks(nodes), SUMMARY_SCHEMA, **extra)
        job = self.jobs.run(run_to_the_end(frame), f"{self.description}: {', '.join(nodes)}", self.wake)
        plan = self.tasks.plan
        gpus = 0 if self.tasks.claim else max(plan.gpus_of(Node.parse(node)) for node in nodes)
        waiting, over = partial(self._missing, nodes), job.done.is_set
        promised = PendingSlots(job.description, len(nodes), plan.cpus, gpus, waiting, partial(self._left, nodes), over)
        expect(promised)
        self._submitted.append(_Submitted(nodes, profile, job, promised))

    def _missing(self, nodes: tuple[str, ...]) -> int:
        return len(set(nodes).intersection(self.controller.missing))

    def _left(self, nodes: tuple[str, ...]) -> int:
        """Count those that have come and hold no slot."""
        return len(set(nodes).intersection(self.controller.left_slots).difference(self.controller.missing))

    def _here(self, node: str) -> None:
        hosted = HostedNode(self.tasks((node,)), node)
        job = self.jobs.run(hosted, f"{self.description}: {node}", self.wake)
        self._submitted.append(_Submitted((node,), None, job))
