"""Spark jobs that start nodes again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tfos_nb.driver.node_jobs import NodeJobs


@dataclass
class Job:
    """A job that ends when the test says so."""

    description: str
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class Jobs:
    """Accepts jobs without running them."""

    def __init__(self) -> None:
        self.taken: list[Job] = []

    def run(self, action: Any, description: str, wake: Any) -> Job:
        self.taken.append(Job(description.removeprefix("nodes: ")))
        return self.taken[-1]

    def of(self) -> list[str]:
        return [job.description for job in self.taken]


class Tasks(SimpleNamespace):
    """Makes a task that Spark could run."""

    def __call__(self, nodes: tuple[str, ...]) -> Any:
        return lambda batches: batches


@pytest.fixture
def made(spark: SparkSession) -> tuple[NodeJobs, Jobs, Any]:
    jobs = Jobs()
    controller: Any = SimpleNamespace(
        missing=(), without_supervisor=(), left_slots=(), mark_submitted=lambda nodes, hold: None
    )
    plan = SimpleNamespace(gpus_of=lambda node: 0, cpus=1)
    launching: Any = SimpleNamespace(groups=[(("worker:0", "worker:1", "worker:2"), None)], here=())
    tasks: Any = Tasks(hold=True, claim=False, plan=plan)
    made = NodeJobs(spark, jobs, launching, tasks, "nodes", controller, lambda: None)  # type: ignore[arg-type]
    made.submit()
    return made, jobs, controller


def test_a_node_is_submitted_again_whichever_others_were_submitted_before(made: tuple[NodeJobs, Jobs, Any]) -> None:
    """Its job has ended, because all nodes have left their slots. Another node was submitted again meanwhile."""
    nodes, jobs, controller = made
    jobs.taken[0].done.set()
    controller.missing = ("worker:0",)
    nodes.submit_again()
    jobs.taken[1].done.set()
    controller.missing = ("worker:1",)
    nodes.submit_again()
    controller.missing = ("worker:2", "worker:0")
    nodes.submit_again()
    assert jobs.of() == ["worker:0, worker:1, worker:2", "worker:0", "worker:1", "worker:0", "worker:2"]
    controller.missing = ()
    nodes.submit_again()
    assert len(jobs.taken) == 5


def test_while_a_job_runs_only_nodes_whose_task_is_gone_are_submitted_again(made: tuple[NodeJobs, Jobs, Any]) -> None:
    nodes, jobs, controller = made
    controller.missing, controller.without_supervisor = ("worker:0", "worker:1"), ("worker:1",)
    nodes.submit_again()
    assert jobs.of()[1:] == ["worker:1"]
    assert jobs.taken[0] in nodes.running
    jobs.taken[0].error = RuntimeError("its stage was cancelled")
    jobs.taken[0].done.set()
    controller.missing = controller.without_supervisor = ()
    nodes.submit_again()
    assert jobs.of()[2:] == ["worker:0, worker:2"]
