"""Executors that Spark is about to end, and the nodes that leave them before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfos_nb.driver.membership.members import Member
from tfos_nb.driver.membership.present import PresentMembers

__all__ = ["EndingExecutors"]


class EndingExecutors:
    """The executors that are about to end, and the nodes that have left one.

    Parameters
    ----------
    durable : bool
        Whether the state with which nodes leave is on a disk. Otherwise it is in the memory of the nodes.
    """

    def __init__(self, durable: bool = False) -> None:
        self._durable = durable
        self._ending: set[str] = set()
        self._left: set[tuple[str, str]] = set()  # a node, and the executor that it has left

    def add(self, executors: Iterable[str]) -> None:
        """Record that these executors are about to end."""
        self._ending.update(executors)

    def has(self, one: Member) -> bool:
        """Return whether a node is on an executor that is about to end."""
        return one.reservation is not None and one.reservation.executor in self._ending

    def among(self, members: Iterable[Member]) -> list[Member]:
        """Return the nodes that run on executors that are about to end."""
        return [one for one in members if not one.status.ended and self.has(one)] if self._ending else []

    def leaving(self, present: PresentMembers) -> Sequence[Member]:
        """Return the nodes that can leave their executors: not all that train, if one must keep the state in memory."""
        ending = [one for one in self.among(present.members) if not one.told_to_end]
        if ending and not self._durable and all(one in ending for one in present.training):
            ending.remove(present.training[0])
        return ending

    def leave(self, one: Member) -> None:
        """Record that a node leaves its executor."""
        assert one.reservation is not None, "its executor is known"
        self._left.add((str(one.node), one.reservation.executor))

    def has_left(self, node: str, executor: str) -> bool:
        """Return whether a node has left an executor."""
        return (node, executor) in self._left
