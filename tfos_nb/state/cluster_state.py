"""State of a cluster at one moment: immutable, with all that a rendering needs.

The driver changes its own records (:mod:`tfos_nb.driver.membership`), and makes a new :class:`ClusterState` for each
request. Nothing here depends on Spark, gRPC or a notebook.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = [
    "JOINED",
    "LEAVING",
    "WITHOUT",
    "ClusterState",
    "ClusterStatus",
    "FeedProgress",
    "GpuUse",
    "LogLine",
    "NodeState",
    "NodeStatus",
]

WITHOUT = "; the others go on without "
"""Behind a cluster's error while it recovers, before the names of those that are not waited for."""

JOINED, LEAVING = " joined", " not wanted any more"
"""Behind the names of those for which it gathers, where nobody was lost."""


class NodeStatus(str, enum.Enum):
    """Where a node is in its life."""

    PLANNED = "PLANNED"
    RESERVED = "RESERVED"
    STARTING = "STARTING"
    FEEDING = "FEEDING"  # main runs and waits for its first rows
    TRAINING = "TRAINING"
    DONE = "DONE"
    FAILED = "FAILED"
    LOST = "LOST"
    STOPPED = "STOPPED"

    @property
    def ended(self) -> bool:
        """Whether the node's process has ended finally."""
        return self in (NodeStatus.DONE, NodeStatus.FAILED, NodeStatus.LOST, NodeStatus.STOPPED)


class ClusterStatus(str, enum.Enum):
    """Where a cluster is in its life."""

    PLANNED = "PLANNED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    STOPPING = "STOPPING"
    DONE = "DONE"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def ended(self) -> bool:
        """Whether nothing of the cluster runs any more."""
        return self in (ClusterStatus.DONE, ClusterStatus.FAILED, ClusterStatus.STOPPED)


@dataclass(frozen=True)
class GpuUse:
    """What a node's GPU does: its share of busy time in percent, and its memory in bytes."""

    name: str = ""
    percent: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None


@dataclass(frozen=True)
class LogLine:
    """A line that a node wrote; ``time`` is when the driver got it, in seconds since 1970."""

    time: float
    node: str
    text: str


@dataclass(frozen=True)
class NodeState:
    """One node at one moment.

    ``epoch`` counts from 1 as people do; ``step`` is the step within the epoch; ``rows_per_second`` is what the node's
    dataset handed to TensorFlow of late. ``metrics`` holds the newest loss and metrics by name, ``loss`` first;
    ``curves`` how each of them went since the start, in at most 48 points evenly spread. ``phase`` is what Keras does:
    ``"fit"``, ``"evaluate"``, or empty if it does not say. ``gpus`` are the GPUs' addresses as Spark gives them,
    ``gpu_use`` what they do, where NVML tells. ``seconds_left`` is until the node's last epoch ends, at its pace of
    late.
    """

    node: str
    status: NodeStatus = NodeStatus.PLANNED
    host: str = ""
    executor: str = ""
    pid: int | None = None
    gpus: tuple[str, ...] = ()
    gpu_use: tuple[GpuUse, ...] = ()
    phase: str = ""
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict)
    seconds_left: float | None = None
    rows: int = 0
    rows_per_second: float | None = None
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    heartbeat_age: float | None = None
    detail: str = ""

    @property
    def loss(self) -> float | None:
        """The newest loss, if the program reports one."""
        return self.metrics.get("loss")


@dataclass(frozen=True)
class FeedProgress:
    """How far the feed under way has come: partitions of the DataFrame read, rows delivered, passes asked for."""

    partitions_done: int = 0
    partitions: int = 0
    rows: int = 0
    epochs: int = 1


@dataclass(frozen=True)
class ClusterState:
    """State of a whole cluster at one moment.

    ``id`` identifies it among all clusters of the machine, also in URLs. ``generation`` counts how often its nodes were
    started. ``elapsed`` is the number of seconds since launch. ``error`` is the text of the first failure. ``log`` has
    the newest lines of all nodes, the oldest first. ``log_dir`` is the directory that TensorBoard shows, empty without
    TensorBoard. ``plan`` is the printed plan.
    """

    name: str
    id: str = ""
    generation: int = 1
    status: ClusterStatus = ClusterStatus.PLANNED
    nodes: tuple[NodeState, ...] = ()
    feed: FeedProgress | None = None
    elapsed: float = 0.0
    error: str = ""
    spark_master: str = ""
    log: tuple[LogLine, ...] = ()
    log_dir: str = ""
    plan: str = ""
