"""Events that change a cluster's membership.

The owner of a :class:`~tfos_nb.driver.membership.machine.Membership` makes them of what it hears from nodes, from Spark
and from the driver's own threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfos_nb.errors import TfosError
from tfos_nb.runtime.control.lifecycle import (
    Refused,
    Reservation,
)
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.node.spark_task import HoldsSlot, SupervisorEnded

__all__ = [
    "Aborted",
    "AllDropped",
    "ContinueWithout",
    "EarlierContinued",
    "Ended",
    "EvaluatorsTimedOut",
    "ExecutorsLeave",
    "HeartbeatReceived",
    "HeartbeatTimedOut",
    "LinkRestored",
    "LinksCut",
    "MessageReceived",
    "PendingRead",
    "Planned",
    "RestartAll",
    "RestartWith",
    "RowsFedAgain",
    "Scaled",
    "SlotAsked",
    "StopSent",
    "StreamEnded",
    "Submitted",
    "SupervisorConnected",
    "TaskReported",
]


@dataclass(frozen=True)
class Planned:
    """The first event: the expected nodes, how often they may be restarted, and whether states are on a disk."""

    plan: ClusterPlan
    restarts: int
    durable: bool = False


@dataclass(frozen=True)
class EarlierContinued:
    """The training of an earlier cluster is continued, whose nodes were started together ``generation`` times."""

    generation: int


@dataclass(frozen=True)
class SupervisorConnected:
    """A supervisor's first message on a stream of this number."""

    stream: int
    message: Reservation | Refused


@dataclass(frozen=True)
class MessageReceived:
    """A later message of a node."""

    node: str
    message: Any


@dataclass(frozen=True)
class HeartbeatReceived:
    """Progress that a node's heartbeat reports; ``waits_for_rows`` is None for a node that is not fed."""

    node: str
    began: bool
    waits_for_rows: bool | None


@dataclass(frozen=True)
class StreamEnded:
    """A stream has ended, for whatever reason."""

    stream: int


@dataclass(frozen=True)
class HeartbeatTimedOut:
    """No message of a node came for so many seconds."""

    node: str
    seconds: float


@dataclass(frozen=True)
class TaskReported:
    """A Spark task reports how its supervisor has ended."""

    message: SupervisorEnded


@dataclass(frozen=True)
class SlotAsked:
    """A Spark task asks what to do with its slot; ``wanted``: rows wait for a slot."""

    question: HoldsSlot
    wanted: bool


@dataclass(frozen=True)
class Submitted:
    """These nodes were submitted to Spark; ``hold``: their tasks keep their slots."""

    nodes: tuple[str, ...]
    hold: bool


@dataclass(frozen=True)
class Scaled:
    """The cluster must change to another plan, as soon as possible."""

    plan: ClusterPlan


@dataclass(frozen=True)
class ExecutorsLeave:
    """These executors are about to end, by their names in Spark: it decommissions them."""

    executors: frozenset[str]


@dataclass(frozen=True)
class RestartAll:
    """Lost nodes must start again: all nodes, or only the lost ones if a coordinator continues with the others.

    ``without``: the others continue without these nodes, which do not reach all of them.
    """

    cause: str
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinksCut:
    """These pairs of nodes do not reach each other, though the driver reaches both."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LinkRestored:
    """A node that was left out because it did not reach all others reaches them now."""

    node: str


@dataclass(frozen=True)
class RestartWith:
    """All nodes must start again, with those that were absent and without those that leave."""

    cause: str


@dataclass(frozen=True)
class ContinueWithout:
    """The nodes that have come must continue without the others."""


@dataclass(frozen=True)
class PendingRead:
    """The owner has read the list of late nodes that were admitted, or of nodes without a task."""

    late: bool = False
    to_resubmit: bool = False


@dataclass(frozen=True)
class RowsFedAgain:
    """The rows of these replacement nodes have been fed again; None: of all of them."""

    nodes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Aborted:
    """An error of the whole cluster."""

    error: TfosError


@dataclass(frozen=True)
class EvaluatorsTimedOut:
    """So many seconds have passed since the training's end: evaluators are waited for no longer."""

    seconds: float


@dataclass(frozen=True)
class StopSent:
    """Every node receives a stop; from now on its end is not a failure."""

    message: Any


@dataclass(frozen=True)
class AllDropped:
    """Every supervisor that has not ended is dropped."""


@dataclass(frozen=True)
class Ended:
    """Nothing of the cluster runs any more."""
