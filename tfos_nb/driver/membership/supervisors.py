"""The supervisors by node and stream, and those that were given up."""

from __future__ import annotations

from tfos_nb.driver.membership.members import Member
from tfos_nb.runtime.control.lifecycle import Reservation
from tfos_nb.runtime.node.spark_task import HoldsSlot, SupervisorEnded

__all__ = ["Supervisors"]


class Supervisors:
    """The supervisors of a cluster's nodes. One is known by its node, machine and process id."""

    def __init__(self) -> None:
        self._by_stream: dict[int, Member] = {}
        self._reserved: set[tuple[str, str, int]] = set()
        self._given_up: set[tuple[str, str, int]] = set()

    def connect(self, one: Member, stream: int, message: Reservation) -> None:
        """Record the supervisor that speaks for a node from now on, and by which stream."""
        one.stream, one.supervisor = stream, (message.machine, message.pid)
        self._by_stream[stream] = one

    def note_reservation(self, message: Reservation) -> None:
        """Record that a supervisor has reserved."""
        self._reserved.add((message.node, message.machine, message.pid))

    def has_reserved(self, message: SupervisorEnded) -> bool:
        """Return whether a supervisor that has ended had reserved before."""
        return (message.node, message.machine, message.pid) in self._reserved

    def end_stream(self, stream: int) -> Member | None:
        """Record the end of a stream; return the node that has lost its supervisor by it."""
        one = self._by_stream.pop(stream, None)
        if one is None or one.stream != stream:
            return None
        one.stream = None
        return one

    def give_up(self, one: Member) -> int | None:
        """Give up a node's supervisor; return its stream, which must be ended, or None if the node has none.

        If the supervisor was only frozen and wakes up, its task's next question is answered with END, and the task
        kills it.
        """
        if one.stream is None:
            return None
        stream = one.stream
        self._given_up.add((str(one.node), *one.supervisor))
        self._by_stream.pop(stream, None)
        one.stream = None
        return stream

    def is_given_up(self, question: HoldsSlot) -> bool:
        """Return whether the supervisor for which a task asks was given up."""
        return (question.node, question.machine, question.pid) in self._given_up
