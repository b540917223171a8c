"""Calls of a kernel to the process of a detached cluster, and their answers: both ends of that wire.

::

    kernel: AttachedCluster ── Call ──▶ unix socket, 0600 ──▶ CallServer: the process of the cluster
                            ◀── Answer, or Raised ──

Each call has a connection of its own, so a long one (``wait``) delays no other. Nothing is unpickled but the function
that reads the rows of a ``train``: the socket admits this user alone, as :func:`check_peer` makes sure on both sides.

A process on an executor (:mod:`tfos_nb.detached.on_executor`) answers at a door, where the answer to a call is asked
for until it is there. No function is taken there.
"""

from __future__ import annotations

import builtins
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from tfos_nb import errors
from tfos_nb.errors import NodeFailed, RendezvousTimeout, TfosError
from tfos_nb.runtime.control.processes import peer_of
from tfos_nb.runtime.control.reports import StepReport
from tfos_nb.runtime.control.wire import message
from tfos_nb.state.cluster_state import ClusterState, FeedProgress, GpuUse, LogLine, NodeState
from tfos_nb.state.history import History
from tfos_nb.state.training_curve import Point

__all__ = [
    "Answer",
    "AnswerWanted",
    "Call",
    "CallBegun",
    "HistoryParts",
    "Raised",
    "check_peer",
    "error_of",
    "raised",
    "reports_of",
]

for _kind in (ClusterState, FeedProgress, GpuUse, LogLine, NodeState, Point):
    message(_kind)

_BUILTIN = ("KeyError", "RuntimeError", "TimeoutError", "TypeError", "ValueError")


@message
@dataclass(frozen=True)
class Call:
    """Call of a method of the cluster. ``client`` identifies the kernel's object that calls.

    ``key`` identifies the call where it may come twice: Spark may repeat a task that carries it.
    """

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    client: str = ""
    key: str = ""


@message
@dataclass(frozen=True)
class Answer:
    """Value that the method has returned."""

    value: Any = None


@message
@dataclass(frozen=True)
class Raised:
    """Error that the method has raised: the name of its class, its text, and its other attributes."""

    kind: str
    text: str
    attributes: dict[str, Any] = field(default_factory=dict)


@message
@dataclass(frozen=True)
class CallBegun:
    """To a kernel that calls through the door: the call goes on, and :class:`AnswerWanted` gets its answer."""

    key: str


@message
@dataclass(frozen=True)
class AnswerWanted:
    """Question for the answer to an earlier call. Answer: the call's, or :class:`CallBegun` if there is none yet."""

    key: str


@message
@dataclass(frozen=True)
class HistoryParts:
    """A :class:`~tfos_nb.state.history.History`: the epochs' reports, all of the chief, and its newest ones.

    A report is a list: the generation of the cluster that made it, and the fields of :class:`StepReport`. A cluster of
    64 nodes has half a million reports, which would take five seconds. So those of another node come when they are
    asked for: :func:`reports_of`.

    Examples
    --------
    >>> history = History("worker:0")
    >>> history.record("worker:0", StepReport(epoch=1, metrics={"loss": 0.5}, epoch_end=True))
    >>> HistoryParts.of(history).history(lambda node: reports_of(history, node))["loss"]
    [0.5]
    """

    chief: str
    epochs: list[list[Any]]
    chiefs: list[list[Any]]
    newest: list[list[Any]]
    others: tuple[str, ...]

    @classmethod
    def of(cls, history: History) -> HistoryParts:
        """Return the message for a history."""
        chief, epochs, chiefs, steps = history.parts()
        epochs_listed, chiefs_listed = [_listed(0, report) for report in epochs], [_listed(*one) for one in chiefs]
        others = tuple(node for node in steps if node != chief)
        return cls(chief, epochs_listed, chiefs_listed, reports_of(history, chief), others)

    def history(self, fetch: Callable[[str], list[list[Any]]]) -> History:
        """Return the history; ``fetch`` returns what :func:`reports_of` does."""
        epochs, chiefs = [StepReport(*fields) for _, *fields in self.epochs], list(map(_report, self.chiefs))
        steps = {self.chief: list(map(_report, self.newest))}
        history = History.of_parts(self.chief, epochs, chiefs, steps)
        history.fetch_from(lambda node: [_report(listed) for listed in fetch(node)], self.others)
        return history


def reports_of(history: History, node: str) -> list[list[Any]]:
    """Return a node's newest reports as lists."""
    return [_listed(*one) for one in history.reports(node)]


_fields_of = attrgetter(*(one.name for one in fields(StepReport)))


def _listed(generation: int, report: StepReport) -> list[Any]:
    return [generation, *_fields_of(report)]


def _report(listed: list[Any]) -> tuple[int, StepReport]:
    return listed[0], StepReport(*listed[1:])


def check_peer(connection: socket.socket) -> None:
    """Refuse a peer of another user, in addition to the socket's mode.

    Raises
    ------
    PermissionError
        If the process at the other end is not this user's.
    """
    peer = peer_of(connection)
    if peer is not None and peer.user != os.getuid():
        raise PermissionError(f"the process at the other end belongs to user {peer.user}")


def raised(error: BaseException) -> Raised:
    """Return an error as a message."""
    kind = type(error).__name__
    if isinstance(error, NodeFailed):
        return Raised(kind, error.cause, error.details)
    if isinstance(error, RendezvousTimeout):
        return Raised(kind, str(error), {"missing": tuple(error.missing)})
    if isinstance(error, TfosError) or kind in _BUILTIN:
        return Raised(kind, str(error))
    return Raised("RuntimeError", f"{kind}: {error}")


def error_of(message: Raised) -> Exception:
    """Return the error of a message."""
    kind = getattr(errors, message.kind, None)
    if kind is NodeFailed:
        return NodeFailed(message.text, **message.attributes)
    if kind is RendezvousTimeout:
        return RendezvousTimeout(message.text, **message.attributes)
    if isinstance(kind, type) and issubclass(kind, TfosError):
        return kind(message.text)
    if message.kind in _BUILTIN:
        return getattr(builtins, message.kind)(message.text)  # type: ignore[no-any-return]
    return TfosError(message.text)
