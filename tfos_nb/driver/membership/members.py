"""State of one node in a cluster, and the allowed changes of its status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tfos_nb.errors import TfosError
from tfos_nb.runtime.control.lifecycle import (
    MainRaised,
    NodeEnded,
    NodeUp,
    Reservation,
)
from tfos_nb.runtime.control.plan import Node
from tfos_nb.runtime.control.processes import host_and_port
from tfos_nb.state.cluster_state import NodeStatus

__all__ = ["TRANSITIONS", "Failure", "Member", "Replaced"]


TRANSITIONS: Mapping[NodeStatus, Mapping[NodeStatus, str]] = MappingProxyType(
    {
        NodeStatus.PLANNED: {
            NodeStatus.RESERVED: "its supervisor has reserved",
            NodeStatus.FAILED: "its executor cannot run it, or its supervisor ended first",
            NodeStatus.LOST: "it is silent, or the others continue without it",
            NodeStatus.STOPPED: "it was removed, or the cluster ends",
        },
        NodeStatus.RESERVED: {
            NodeStatus.STARTING: "all have reserved",
            NodeStatus.PLANNED: "the nodes restart",
            NodeStatus.FAILED: "its process failed",
            NodeStatus.LOST: "it is silent, or its supervisor is gone",
            NodeStatus.STOPPED: "it was removed, or the cluster ends",
        },
        NodeStatus.STARTING: {
            NodeStatus.TRAINING: "main was called",
            NodeStatus.PLANNED: "the nodes restart",
            NodeStatus.FAILED: "its process failed",
            NodeStatus.LOST: "it is silent, or its supervisor is gone",
            NodeStatus.STOPPED: "it was removed, or the cluster ends",
        },
        NodeStatus.FEEDING: {
            NodeStatus.TRAINING: "it has rows, or does not wait for any",
            NodeStatus.DONE: "main has returned",
            NodeStatus.PLANNED: "the nodes restart",
            NodeStatus.FAILED: "main raised, or its process failed",
            NodeStatus.LOST: "it is silent, or its supervisor is gone",
            NodeStatus.STOPPED: "it was removed, or the cluster ends",
        },
        NodeStatus.TRAINING: {
            NodeStatus.FEEDING: "it waits for its first rows",
            NodeStatus.DONE: "main has returned",
            NodeStatus.PLANNED: "the nodes restart",
            NodeStatus.FAILED: "main raised, or its process failed",
            NodeStatus.LOST: "it is silent, or its supervisor is gone",
            NodeStatus.STOPPED: "it was removed, or the cluster ends",
        },
        NodeStatus.DONE: {
            NodeStatus.PLANNED: "the nodes restart",
            NodeStatus.FAILED: "its process failed while others needed it",
            NodeStatus.LOST: "the others continue without it",
            NodeStatus.STOPPED: "it was removed, or the cluster ends",
        },
        NodeStatus.FAILED: {
            NodeStatus.PLANNED: "the nodes restart",
            NodeStatus.LOST: "the others continue without it",
            NodeStatus.STOPPED: "it was removed, or the cluster ends",
        },
        NodeStatus.LOST: {
            NodeStatus.PLANNED: "the nodes restart",
            NodeStatus.RESERVED: "it is back, and joins the others",
            NodeStatus.STOPPED: "it was removed, or the cluster ends",
        },
        NodeStatus.STOPPED: {NodeStatus.PLANNED: "it is added again"},
    }
)
"""The allowed changes of a node's status, with the cause of each. A message that comes too late changes nothing."""


@dataclass(frozen=True)
class Failure:
    """One node's failure.

    ``collateral`` marks a failure that happened only because a peer was lost. ``lost`` marks a failure of the node's
    process, host or network, not of the program.
    """

    error: TfosError
    node: str
    collateral: bool
    lost: bool = False


@dataclass(frozen=True)
class Replaced:
    """Replacement of a lost node, ``since`` a rendezvous; the lost one had finished ``through`` passes."""

    through: int
    since: int


@dataclass
class Member:
    """State of one node."""

    node: Node
    status: NodeStatus = NodeStatus.PLANNED
    stream: int | None = None  # to its supervisor
    supervisor: tuple[str, int] = ("", 0)  # machine and process id; one supervisor may reserve several times
    reservation: Reservation | None = None
    up: NodeUp | None = None
    began: bool = False  # it has taken a row or reported a step
    returned: bool = False
    unread: bool = False
    serving: bool = False
    saving: bool = False
    following: bool = False  # it coordinates, and continues with workers that come back at other addresses
    through: int = 0  # passes of its rows that a coordinator has finished, in this generation
    started: bool = False  # it has received its peers' addresses
    absent: bool = False  # the others continue without it
    cut_off: bool = False  # absent because it did not reach all others: it joins only when it does
    failed_joins: int = 0  # how often it was lost before it could join them
    pending: bool = False  # it was submitted to Spark, and has not come since
    left_slot: bool = False  # its Spark task has left the slot, and no other task watches it
    moved: bool = False  # it has come back, and its coordinator does not know the new address
    raised: MainRaised | None = None
    ended: NodeEnded | None = None
    told_to_end: bool = False  # so its end is no failure

    @property
    def address(self) -> str:
        """Address of its TensorFlow server."""
        assert self.reservation is not None, "it has reserved"
        return host_and_port(self.reservation.host, self.reservation.port)

    @property
    def needs_no_wait(self) -> bool:
        """Whether its ``main`` has returned, or need not return."""
        return self.returned or self.serving

    @property
    def is_gone(self) -> bool:
        """Whether it has no stream to the driver."""
        return self.stream is None

    @property
    def is_up(self) -> bool:
        """Whether its ``main`` has been called."""
        return self.up is not None and self.status is not NodeStatus.STARTING

    @property
    def is_through(self) -> bool:
        """Whether its ``main`` runs no more, or serves the others."""
        return self.status.ended or self.serving

    @property
    def is_at_rest(self) -> bool:
        """Whether it is writing no model."""
        return not self.saving or self.stream is None

    def become(self, status: NodeStatus) -> None:
        """Change the status, where :data:`TRANSITIONS` has that change."""
        if status in TRANSITIONS[self.status]:
            self.status = status

    def begin_anew(self) -> None:
        """Forget the previous process; another one will take its place."""
        self.become(NodeStatus.PLANNED)
        self.reservation = self.up = self.raised = self.ended = None
        self.began = self.returned = self.unread = self.serving = self.saving = False
        self.following = self.started = self.moved = False
        self.through = 0
