"""How the members of a cluster come together: once, and again after a loss.

After a loss all of them start new processes, which is a new generation; or, where a coordinator gives out the steps,
the lost workers alone are replaced and all others go on. Where that is allowed the others go on without those of
whom nothing is heard, which join them later, when a state has been saved.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfos_nb.driver.feed_desk import FeedDesk
from tfos_nb.driver.members import Members
from tfos_nb.driver.node_record import Record
from tfos_nb.errors import TfosError
from tfos_nb.runtime.control.lifecycle import FeedPlace, Moved, Regather, Start, Stop
from tfos_nb.runtime.control.plan import ClusterPlan, Role
from tfos_nb.runtime.control.reports import History
from tfos_nb.runtime.node.spark_task import HoldsSlot, SlotUse
from tfos_nb.state.cluster_state import JOINED, LEAVING, NodeStatus

__all__ = ["Failure", "Gathering", "Replaced"]

logger = logging.getLogger(__name__)

JOINS = 3  # an absent node that was lost so often is wanted no more
_ASKED_WITHIN = 6.0  # seconds, in which some task asks what its slot is for


@dataclass(frozen=True)
class Failure:
    """One node's failure.

    ``collateral`` marks one that only happened because a peer had gone; ``lost`` one of the node itself, its process,
    its host or its network, and not of the program.
    """

    error: TfosError
    node: str
    collateral: bool
    lost: bool = False


@dataclass(frozen=True)
class Replaced:
    """A node in a lost one's place, ``since`` a gathering: the lost one had been ``through`` so many passes."""

    through: int
    since: int


class Gathering(Members):
    """The records of a cluster's nodes, as far as they come and come again.

    Parameters
    ----------
    plan : ClusterPlan
        Who should come.
    restarts : int
        How often they may be gathered again.

    Attributes
    ----------
    generation : int
        How often all of them were gathered, from 1: what their ``main`` is told.
    gatherings : int
        How often any of them were: whoever waits for something of theirs looks whether it has changed.
    replaced : dict of str to Replaced
        Nodes in lost ones' places, whose rows have not been fed again yet.
    """

    feeds: FeedDesk
    history: History

    def __init__(self, plan: ClusterPlan, restarts: int) -> None:
        super().__init__(plan)
        self.generation = self.gatherings = 1
        self.restarts_left = restarts
        self.failures: list[Failure] = []
        self.replaced: dict[str, Replaced] = {}
        self.taken_in: list[str] = []  # late ones that a coordinator has taken in of late
        self.alone: list[str] = []  # absent ones of which no task and no supervisor is left
        self._can_join = False  # a state was saved since those that are absent have come
        self._leaving: set[str] = set()
        self._given_up: set[tuple[str, str, int]] = set()
        self._slot_wanted_until = -math.inf
        self._feed_places: dict[str, FeedPlace] = {}
        self._coordinators: dict[str, Record] = {}  # they need the servers of the others
        self._leavers: dict[str, Record] = {}  # main has returned, and there is no server

    # --- the lock is held ---

    def _start_if_complete(self) -> None:
        if not self._reserved():
            return
        spec = self._spec()
        starting = [record for record in self._present if not record.started]
        if self.gatherings > 1:  # before main is called, which may want to know at once
            self.feeds.describe_again([str(record.node) for record in starting if record.node in self._fed])
        behind: dict[int, list[str]] = {}
        for record in starting:
            record.status, record.started = NodeStatus.STARTING, True
            behind.setdefault(record.through, []).append(str(record.node))
        for passes, nodes in behind.items():  # as a rule all at once: a thousand addresses are encoded once
            self.send(Start(spec, self.generation, passes, self._workers_left(), self.feeds.held.states), nodes)

    def _spec(self) -> dict[str, list[str]]:
        spec: dict[str, list[str]] = {}
        for record in self._present:
            spec.setdefault(record.node.role.value, []).append(record.address)
        return spec

    def _workers_left(self) -> tuple[int, ...]:
        """The workers' indices, if some are absent: each node has its rank by its place among them."""
        if len(self._present) == len(self._records):
            return ()
        return tuple(record.node.index for record in self._present if record.node.role is Role.WORKER)

    def _tell_where(self, record: Record) -> None:
        """Tell the coordinator where a worker is that has come back."""
        if record.moved:
            record.moved = False
            self.send_to(str(self.plan.chief_node), Moved(str(record.node), record.address))

    def _start_late(self) -> None:
        """Start workers that come after the others have begun, where a coordinator can take them in.

        It knows them by their numbers, which have no gaps. It is told where one is when that serves, and the others
        count on it when it has said that it gives it steps.
        """
        if not self._records[str(self.plan.chief_node)].following:
            return
        spec = self._spec()
        for record in self._records.values():
            if not record.absent or record.parting:
                continue
            if record.reservation is None:
                return
            spec[record.node.role.value].append(record.address)
            if not record.started:
                record.status, record.started, record.moved = NodeStatus.STARTING, True, True
                addresses = {role: list(at) for role, at in spec.items()}
                self.send(Start(addresses, self.generation, 0, (), self.feeds.held.states), [str(record.node)])

    def _take_in(self, record: Record) -> None:
        """Count on a late worker, to which the coordinator gives steps; it has a share in the rows of later feeds."""
        self.gatherings += 1
        self._count_on_late([record])
        self.feeds.go_on(self.gatherings)
        self.feeds.describe_again([str(record.node)])  # a coordinator asks for rows as soon as it has taken one in
        self.replaced[str(record.node)] = Replaced(record.through, self.gatherings)
        self.taken_in.append(str(record.node))

    def _count_on_late(self, late: Sequence[Record]) -> None:
        for record in late:
            record.absent = False
        self._count_on_and_feed([one for one in self._records.values() if not one.absent])

    def _count_on_and_feed(self, present: list[Record]) -> None:
        self._count_on(present)
        self.feeds.feed(str(record.node) for record in self._fed_records)

    def _let_go(self, record: Record) -> None:
        """Do without a supervisor, if there is one: should it be frozen and wake, it hears that; its task ends it."""
        if record.link is not None:
            self._given_up.add((str(record.node), *record.supervisor))
            record.link.end()
            record.link = None

    def _slot_use(self, record: Record, question: HoldsSlot) -> SlotUse:
        if (question.node, question.machine, question.pid) in self._given_up:
            return SlotUse.END
        if record.node in self.plan.driver_nodes:  # it has none of Spark's
            return SlotUse.HOLD
        # With the slot goes its GPU, which Spark would give to a node that waits for one.
        lends = bool(self.plan.gpus_of(record.node)) and bool(self.missing)
        if lends or record.link is None or time.monotonic() > self._slot_wanted_until:
            return SlotUse.HOLD
        record.left_slot, self._slot_wanted_until = True, -math.inf
        logger.info("%s leaves its slot, so that the rows have one", record.node)
        return SlotUse.LEAVE

    # --- for the driver's threads ---

    def give_up_all(self) -> None:
        """Do without every supervisor that has not gone."""
        with self.changed:
            for record in self._records.values():
                self._let_go(record)

    def want_slot(self) -> None:
        """Have one node's task leave its slot: the first that asks within some seconds."""
        with self.changed:
            self._slot_wanted_until = time.monotonic() + _ASKED_WITHIN

    @property
    def left_slots(self) -> tuple[str, ...]:
        """The nodes whose tasks have left their slots."""
        with self.changed:
            return tuple(name for name, record in self._records.items() if record.left_slot)

    @property
    def untended(self) -> tuple[str, ...]:
        """Those of them that are to come again, and have no supervisor more that would bring them."""
        with self.changed:
            left = set(self.left_slots)
            return tuple(name for name in self.missing if name in left and self._records[name].link is None)

    def tend(self, nodes: Iterable[str], hold: bool) -> None:
        """Learn that Spark is asked for these nodes, and whether their tasks hold slots."""
        with self.changed:
            for name in nodes:
                self._records[name].left_slot = not hold

    @property
    def has_news(self) -> bool:
        """Whether others can join or leave, have been taken in, or are to be asked for."""
        return bool(self.taken_in or self.changing or self.alone)

    def take_alone(self) -> list[str]:
        """Return the absent nodes of which no task and no supervisor is left, and forget them."""
        with self.changed:
            alone, self.alone = self.alone, []
            return alone

    @property
    def some_are_coming(self) -> bool:
        """Whether a node that has not come again has a supervisor, which starts its next process at once."""
        with self.changed:
            return any(one.reservation is None and one.link is not None for one in self._present)

    def are_enough(self, least: int) -> bool:
        """Whether all nodes have come, or all but workers of which at least so many have."""
        with self.changed:
            gone = [one for one in self._present if one.reservation is None]
            came = sum(one.node.role is Role.WORKER for one in self._present) - len(gone)
            return not gone or (came >= least and all(one.node.role is Role.WORKER for one in gone))

    def go_on_without_missing(self) -> tuple[str, ...]:
        """Go on with the nodes that have come; return the names of the others."""
        with self.changed:
            gone = [str(one.node) for one in self._present if one.reservation is None]
            if gone:
                self._share_out([one for one in self._present if one.reservation is not None])
                self._start_if_complete()
                self.changed.notify_all()
            return tuple(gone)

    def lacking(self, plan: ClusterPlan) -> tuple[str, ...]:
        """Return the nodes of a plan that would have to be started."""
        with self.changed:
            found = {str(node): self._records.get(str(node)) for node in plan.nodes}
            return tuple(name for name, record in found.items() if record is None or record.parting)

    def scale(self, plan: ClusterPlan) -> None:
        """Become what a plan says, as soon as that can be."""
        with self.changed:
            self._widen(plan)
            wanted = {str(node) for node in plan.nodes}
            self._leaving = {str(one.node) for one in self._present} - wanted
            for record in [one for one in self._records.values() if one.absent]:
                self._want(record, str(record.node) in wanted)
            self.changed.notify_all()

    def _want(self, record: Record, wanted: bool) -> None:
        """Send an absent node away, or take one back that was sent away."""
        if not wanted:
            self._send_away(record)
        elif record.parting:
            record.parting, record.failed_joins, record.status = False, 0, NodeStatus.PLANNED

    @property
    def changing(self) -> str:
        """Who joins or leaves, when a state is held from which the others can go on; empty if nobody does."""
        with self.changed:
            joining = [str(record.node) for record in self._joining()]
            if not self._can_join or len(self._leaving) == len(self._present):
                return ""
            said = [", ".join(joining) + JOINED if joining else ""]
            said += [", ".join(sorted(self._leaving)) + LEAVING if self._leaving else ""]
            return "; ".join(filter(None, said))

    def gather_with(self, cause: str) -> None:
        """Have the nodes come again, with those that were absent and without those that leave."""
        with self.changed:
            self.gatherings += 1
            self._can_join = False
            self._regather(cause)
            self.changed.notify_all()

    def gather_again(self, cause: str) -> bool:
        """Have lost nodes come again: all nodes anew, or the lost ones alone; whether it is all."""
        with self.changed:
            lost = self._replaceable()
            self.gatherings += 1
            self.restarts_left -= 1
            self._can_join = False
            self.failures.clear()
            if lost:
                self._replace(lost, cause)
            else:
                self._regather(cause)
            self.changed.notify_all()
            return not lost

    def _replaceable(self) -> list[Record]:
        """The lost nodes, if all others go on without them: workers of a coordinator that follows them."""
        chief = self._records[str(self.plan.chief_node)]
        failed = [self._records[name] for name in dict.fromkeys(failure.node for failure in self.failures) if name]
        if not chief.following or chief.status.ended or not all(failure.node for failure in self.failures):
            return []
        workers = all(record.node.role is Role.WORKER and record.serving for record in failed)
        # Of a peer that is silent, and whose process may live, TensorFlow waits for an answer for ever.
        gone = all(record.link is None or record.ended is not None for record in failed)
        return failed if workers and gone else []

    def _replace(self, lost: list[Record], cause: str) -> None:
        self.feeds.go_on(self.gatherings)
        for record in lost:
            name = str(record.node)
            through = record.through
            record.begin_anew()
            record.through, record.moved = through, True
            self.replaced[name] = Replaced(through, self.gatherings)
            for known in (self._feed_places, self._coordinators, self._leavers):
                known.pop(name, None)
            self.send_to(name, Regather(self.generation, cause))

    def _regather(self, cause: str) -> None:
        self.generation += 1
        self.replaced.clear()
        self.alone.clear()  # Spark is asked for all that are missing
        self.feeds.regathered(self.gatherings)
        self.history.begin_anew()
        if late := [one for one in self._records.values() if one.absent and one.started]:
            self._count_on_late(late)  # they cannot wait any more for the coordinator that was
        for record in self._present:
            if record.status is NodeStatus.LOST:
                self._let_go(record)
            record.begin_anew()
            for known in (self._feed_places, self._coordinators, self._leavers):
                known.pop(str(record.node), None)
        for name in self._leaving:
            self._send_away(self._records[name])
        staying = [str(record.node) for record in self._present if not record.parting]
        joining = [str(record.node) for record in self._joining()]  # they have only just come, and wait to be started
        self.send(Regather(self.generation, cause), staying)
        if self._leaving or joining:
            self._leaving = set()
            names = {*staying, *joining}
            self._share_out([record for name, record in self._records.items() if name in names])

    # --- fewer nodes than the plan has; the lock is held ---

    def _joining(self) -> list[Record]:
        return [one for one in self._records.values() if one.absent and one.reservation and not one.started]

    def _share_out(self, present: list[Record]) -> None:
        """Have these nodes be the cluster, and share the rows."""
        names = {str(record.node) for record in present}
        for name, record in self._records.items():
            record.absent, record.failed_joins = name not in names, 0
            if record.parting:  # it has been told to go
                continue
            if record.absent:
                record.status = NodeStatus.LOST
                self._let_go(record)
                self._bring_back(record)
        self._count_on_and_feed(present)
        self.history.follow(str(self._first.node))

    def _bring_back(self, record: Record) -> None:
        """Have Spark asked for an absent node again, if its task has left it, and would not start it anew."""
        if record.left_slot and record.failed_joins < JOINS:
            self.alone.append(str(record.node))

    def _send_away(self, record: Record) -> None:
        """Have a node end: the plan has it no more."""
        record.begin_anew()
        record.parting, record.status = True, NodeStatus.STOPPED
        self._feed_places.pop(str(record.node), None)
        self.send(Stop("the cluster has fewer workers now", 0.0), [str(record.node)])

    def _do_without(self, record: Record) -> None:
        """Let go of an absent node that was lost before it could join."""
        self._let_go(record)
        record.failed_joins += 1
        self._bring_back(record)
        record.begin_anew()
        record.status = NodeStatus.LOST
        self._feed_places.pop(str(record.node), None)
