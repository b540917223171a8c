"""State of a cluster at one moment: immutable, with everything that a view needs.

The driver changes its own records (:mod:`tfos_nb.driver.membership`), and makes a new :class:`ClusterState` for each
request. Nothing in this module depends on Spark, gRPC or a notebook.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tfos_nb.state.training_curve import Point

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

WITHOUT = "; the others continue without "
"""Text after a cluster's error while it recovers, before the names of the nodes without which it continues."""

JOINED, LEAVING = " joined", " not wanted any more"
"""Texts after the names of nodes that join or leave, if a cluster starts again and no node was lost."""


class NodeStatus(str, enum.Enum):
    """Status of a node."""

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
        """Whether the node's process has ended and will not be started again."""
        return self in (NodeStatus.DONE, NodeStatus.FAILED, NodeStatus.LOST, NodeStatus.STOPPED)


class ClusterStatus(str, enum.Enum):
    """Status of a cluster."""

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
        """Whether no part of the cluster runs any more."""
        return self in (ClusterStatus.DONE, ClusterStatus.FAILED, ClusterStatus.STOPPED)


@dataclass(frozen=True)
class GpuUse:
    """Use of a node's GPU: its busy time in percent, and its memory in bytes."""

    name: str = ""
    percent: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None


@dataclass(frozen=True)
class LogLine:
    """A line of a node's output. ``time`` is when the driver received it, in seconds since 1970."""

    time: float
    node: str
    text: str


@dataclass(frozen=True)
class NodeState:
    """One node at one moment.

    ``epoch`` counts from 1. ``step`` is the step within the epoch. ``rows_per_second`` is the recent rate at which the
    node's dataset gives rows to TensorFlow. ``metrics`` has the newest loss and metrics by name, ``loss`` first.
    ``curves`` has the values of each of them since the start, in at most 48 evenly spaced points. ``phase`` is what
    Keras does: ``"fit"``, ``"evaluate"``, or empty if it is not known. ``gpus`` are the GPUs' addresses from Spark, and
    ``gpu_use`` is their use, if NVML reports it. ``seconds_left`` is the time until the node's last epoch ends, at its
    recent pace. ``stuck`` says that nothing moves, and that the others wait for this node; ``slow``, that they wait for
    it in each step. ``detail`` is then what it does.
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
    stuck: bool = False
    slow: bool = False

    @property
    def loss(self) -> float | None:
        """The newest loss, if the program reports one."""
        return self.metrics.get("loss")


@dataclass(frozen=True)
class FeedProgress:
    """Progress of the current feed: partitions of the DataFrame read, rows delivered, and passes requested."""

    partitions_done: int = 0
    partitions: int = 0
    rows: int = 0
    epochs: int = 1


@dataclass(frozen=True)
class ClusterState:
    """State of a whole cluster at one moment.

    ``id`` identifies it among all clusters of the machine, also in URLs. ``generation`` counts how often its nodes were
    started. ``elapsed`` is the number of seconds since launch. ``error`` is the text of the first failure. ``log`` has
    the newest lines of all nodes, the oldest first. ``log_dir`` is the directory that TensorBoard shows; it is empty
    without TensorBoard. ``plan`` is the printed plan. ``spark_ui`` is the address of Spark's UI, if it has one.
    ``points`` is the training curve, once the cluster has ended.
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
    spark_ui: str = ""
    points: tuple[Point, ...] = ()
