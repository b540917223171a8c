"""Questions of inference's tasks to the driver: where nodes take rows, and which one answers a partition.

:mod:`tfos_nb.driver.placements` answers them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.wire import message

__all__ = ["COMPUTED_LATE", "QUESTIONS", "AskPlaces", "ClaimNode", "InferencePlaces", "ReleaseNode"]


COMPUTED_LATE = (
    "its main has returned, or wait() or stop() was called. inference() is computed only when its rows are used: use "
    "them before wait(), let main answer until its feed ends, and launch the cluster again"
)
"""Why the rows of a result are not answered any more, and what to do."""


@message
@dataclass(frozen=True)
class AskPlaces:
    """Question of a task of a stage of Spark's that has a partition's first row. Answer: :class:`InferencePlaces`."""

    queue: str
    stage: int = -1


@message
@dataclass(frozen=True)
class InferencePlaces:
    """Addresses where nodes take rows; ``refused`` says why no node does."""

    places: dict[str, FeedPlace] = field(default_factory=dict)
    refused: str = ""


@message
@dataclass(frozen=True)
class ClaimNode:
    """Question: which node answers this attempt at a partition? ``local``: those on the task's host. Answer: a name."""

    inference: str
    partition: int
    attempt: int
    local: tuple[str, ...]
    stage: int = -1


@message
@dataclass(frozen=True)
class ReleaseNode:
    """Statement: the attempt that claimed this node has ended."""

    inference: str
    partition: int
    attempt: int


QUESTIONS = (AskPlaces, ClaimNode, ReleaseNode)
