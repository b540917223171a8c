"""Commands that a membership returns for its owner to execute, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "AwaitEvaluators",
    "Begin",
    "DescribeRows",
    "EndStream",
    "FeedsStartAgain",
    "FollowHistory",
    "ForgetProcess",
    "Note",
    "Tell",
    "Warn",
    "WriteLog",
]


@dataclass(frozen=True)
class Tell:
    """Send a message to nodes."""

    nodes: tuple[str, ...]
    message: Any


@dataclass(frozen=True)
class Begin:
    """Start nodes: send ``Start`` with these addresses, and the states from which training can continue."""

    nodes: tuple[str, ...]
    spec: dict[str, list[str]]
    generation: int
    passes: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class EndStream:
    """End a stream after what was sent."""

    stream: int


@dataclass(frozen=True)
class ForgetProcess:
    """Forget a node's previous process: its figures and its result."""

    node: str


@dataclass(frozen=True)
class WriteLog:
    """Write lines into a node's log."""

    node: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Note:
    """Write a line into the driver's log."""

    text: str


@dataclass(frozen=True)
class Warn:
    """Write a warning into the driver's log, after the cluster's name."""

    text: str


@dataclass(frozen=True)
class DescribeRows:
    """Send nodes the rows' schema."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class FeedsStartAgain:
    """Forget the nodes' progress in the feeds: all nodes start again."""


@dataclass(frozen=True)
class AwaitEvaluators:
    """Wait a limited time for the evaluators, since the training has ended; or no more."""

    wanted: bool


@dataclass(frozen=True)
class FollowHistory:
    """Fill the history from a node's reports; None: forget the epochs that are trained again."""

    node: str | None
