"""Receive the nodes' messages, and own all state that the driver has of them.

:class:`ClusterController` applies each message to the :class:`~tfos_nb.driver.membership.machine.Membership`, and
executes the commands that this returns. Its DoorHandler methods are called in the door's thread; everything else may be
called from any thread. There is one lock, and one condition. The condition is notified of each change that a thread may
wait for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tfos_nb.driver.feed_controller import FeedController
from tfos_nb.driver.hangs.explanation import Finding, Situation
from tfos_nb.driver.hangs.links import LinksFound
from tfos_nb.driver.hangs.stragglers import Mark
from tfos_nb.driver.membership.commands import (
    AwaitEvaluators,
    Begin,
    DescribeRows,
    EndStream,
    FeedsStartAgain,
    FollowHistory,
    ForgetProcess,
    Note,
    Tell,
    Warn,
    WriteLog,
)
from tfos_nb.driver.membership.events import (
    Aborted,
    AllDropped,
    ContinueWithout,
    EarlierContinued,
    Ended,
    EvaluatorsTimedOut,
    ExecutorsLeave,
    HeartbeatReceived,
    HeartbeatTimedOut,
    LinkRestored,
    LinksCut,
    MessageReceived,
    PendingRead,
    Planned,
    RestartAll,
    RestartWith,
    RowsFedAgain,
    Scaled,
    SlotAsked,
    StopSent,
    StreamEnded,
    Submitted,
    SupervisorConnected,
    TaskReported,
)
from tfos_nb.driver.membership.journal import ClusterEvent, Journal
from tfos_nb.driver.membership.machine import Membership
from tfos_nb.driver.membership.members import Failure, Member, Replaced
from tfos_nb.driver.node_figures import NodeFigures
from tfos_nb.driver.placements import Answering
from tfos_nb.errors import TfosError
from tfos_nb.runtime.control.door import Link, broadcast
from tfos_nb.runtime.control.lifecycle import MainReturned, ModelSaved, Refused, Reservation, Start, StateHeld
from tfos_nb.runtime.control.placement import QUESTIONS
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.control.reports import PAST, Heartbeat, LogLines
from tfos_nb.runtime.feed.messages import FeedFrom, PassDone, WorkerThrough
from tfos_nb.runtime.feed.positions import PositionHeld
from tfos_nb.runtime.node.links import PROBE_SECONDS, AskLinks, LinksSeen, Pair
from tfos_nb.runtime.node.spark_task import HoldsSlot, NodeThere, NodeWanted, SlotUse, SupervisorEnded
from tfos_nb.runtime.node.stacks import AskStacks, StacksTaken
from tfos_nb.state.cluster_state import LogLine, NodeState, NodeStatus
from tfos_nb.state.history import History
from tfos_nb.state.log_buffer import LogBook

__all__ = ["ClusterController"]

logger = logging.getLogger(__name__)

_STOOD_STILL = 1.0  # seconds: this process was stopped, or another thread held its lock
_NEWS = (Heartbeat, LogLines)  # they are frequent: threads that wait for their figures check once a second instead
_ASKED_WITHIN = 6.0  # seconds within which at least one task asks what its slot is for
_PROBED_WITHIN = PROBE_SECONDS + 1.5  # seconds for the answers of the nodes that are asked about their links
_EVENTS_KEPT, _EVENTS_OF_A_NODE = 2_000, 20


class ClusterController:
    """State of one cluster's nodes in the driver.

    Parameters
    ----------
    plan : ClusterPlan
        The expected nodes.
    restarts : int
        How often lost members may be started again.
    heartbeat_timeout : float
        Seconds without a heartbeat after which a node counts as lost.
    grace : float
        Seconds that an evaluator has between the training's end and its own.
    durable : bool
        Whether a state with which nodes join or leave is written to the ``model_dir``, beside the nodes' memory.

    Attributes
    ----------
    changed : threading.Condition
        Its lock guards all state here. It is notified of every change that a thread may wait for.
    membership : Membership
        The membership. Read it only while the lock is held.
    feeds : FeedController
        Answers questions about rows.
    history : History
        The metrics of each epoch.
    saved_model : ModelSaved or None
        The model that ``ctx.save`` has written last.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        restarts: int = 0,
        heartbeat_timeout: float = 15.0,
        grace: float = 30.0,
        durable: bool = False,
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.heartbeat_timeout = heartbeat_timeout
        self._grace = grace
        self._evaluators_until = math.inf  # the time until which they are awaited
        self.membership = Membership(plan, restarts, durable)
        self.history = History(str(plan.chief_node), len(plan.nodes))
        self.feeds = FeedController(self.changed, self.membership, self.send)
        self.answering = Answering(self.membership, self.feeds)
        self._figures = {name: NodeFigures() for name in self.membership.members}
        self._log = LogBook(self._figures)
        self._results: dict[str, bytes] = {}
        self.saved_model: ModelSaved | None = None
        self._rows = self._reports = 0
        self._slot_wanted_until = -math.inf
        self._links: dict[int, Link] = {}  # by the streams' numbers
        self._count = 0
        self._asked = 0
        self._answers: dict[int, dict[str, Any]] = {}  # to the open questions
        self._planned_at = time.monotonic()
        self._journal = Journal(max(_EVENTS_KEPT, _EVENTS_OF_A_NODE * len(plan.nodes)))
        self._note_event(Planned(plan, restarts, durable))
        self._commands: dict[type, Callable[[Any], object]] = {
            Tell: lambda command: self.send(command.message, command.nodes),
            Begin: self._begin,
            EndStream: self._end_stream,
            ForgetProcess: self._begin_anew,
            WriteLog: lambda command: self._log.add(command.node, command.lines),
            Note: lambda command: logger.info("%s", command.text),
            Warn: lambda command: logger.warning("cluster %s: %s", plan.name, command.text),
            AwaitEvaluators: self._await_evaluators,
            DescribeRows: lambda command: self.feeds.describe_again(command.nodes),
            FeedsStartAgain: lambda command: self.feeds.start_again(),
            FollowHistory: self._follow_history,
        }
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            Heartbeat: self._heartbeat,
            LogLines: lambda node, message: self._log.add(node, message.lines),
            PassDone: lambda node, message: self.feeds.pass_done(message),
            FeedFrom: lambda node, message: self.feeds.wants_from(message),
            PositionHeld: self._position_held,
            MainReturned: self._main_returned,
            ModelSaved: self._model_saved,
            StacksTaken: self._take_answer,
            LinksSeen: self._take_answer,
        }

    # --- the DoorHandler: called in the door's thread ---

    def arrived(self, link: Link, message: Reservation | Refused) -> None:
        """Take a supervisor's reservation, or its message that its executor cannot run a node."""
        if not isinstance(message, (Reservation, Refused)):
            raise ValueError(f"a node's first message must be Reservation or Refused, got {type(message).__name__}")
        with self.changed:
            if message.node not in self.membership.members:
                raise ValueError(f"{message.node} is not in the plan")
            number = self._count = self._count + 1
            self._links[number], link.stream = link, number
            self._apply(SupervisorConnected(number, message))
            if number in self._links:
                link.node = message.node
                self._figures[message.node].hear(time.monotonic())
            self.changed.notify_all()

    def received(self, link: Link, message: Any) -> None:
        """Take any later message of a node."""
        with self.changed:
            if link.stream in self._links:  # else the node was dropped while it was frozen, and has just woken up
                self._hear(link.node or "", message)

    def left(self, link: Link) -> None:
        """Take the end of a node's stream: without its last message, the node is lost."""
        with self.changed:
            if link.stream is not None and self._links.pop(link.stream, None) is not None:
                self._apply(StreamEnded(link.stream))
            self.changed.notify_all()

    def asked(self, message: Any) -> Any:
        """Answer a task."""
        with self.changed:
            if isinstance(message, SupervisorEnded):
                self._apply(TaskReported(message))
                self.changed.notify_all()
                return None
            if isinstance(message, NodeThere):
                return self.membership.is_there(message.node)
            if isinstance(message, NodeWanted):
                return self.membership.is_wanted(message.node, message.executor)
            if isinstance(message, HoldsSlot):
                return self._slot_use(message).value
            if isinstance(message, QUESTIONS):
                return self.answering.asked(message)
            return self.feeds.asked(message)

    def ticked(self, late: float = 0.0) -> None:
        """Find nodes that have been silent for too long; ignore silence while this process itself was stopped."""
        now = time.monotonic()
        with self.changed:
            for name, figures in self._figures.items():
                member = self.membership.members[name]
                silent = figures.silent_for(now, late if late > _STOOD_STILL else 0.0) > self.heartbeat_timeout
                if silent and member.stream is not None and not member.status.ended:
                    self._apply(HeartbeatTimedOut(name, self.heartbeat_timeout))
            if now >= self._evaluators_until:
                self._evaluators_until = math.inf
                self._apply(EvaluatorsTimedOut(self._grace))
            self.changed.notify_all()

    # --- what a node says; the lock is held ---

    def _hear(self, node: str, message: Any) -> None:
        member = self.membership.members[node]
        self._check_sender(node, message)
        self._figures[node].hear(time.monotonic())
        if member.reservation is not None or isinstance(message, (Reservation, LogLines)):
            self._take(node, message)  # any other message is of the generation before
        elif isinstance(message, Heartbeat):
            for report in message.reports:
                self.history.record_late(node, report)
        if not isinstance(message, _NEWS):
            self.changed.notify_all()

    def _check_sender(self, node: str, message: Any) -> None:
        """Refuse a node's message about another node; only a coordinator may report its workers' progress."""
        spoken_of = getattr(message, "node", node)
        coordinates = isinstance(message, WorkerThrough) and node == str(self.membership.plan.chief_node)
        if spoken_of != node and not (coordinates and spoken_of in self.membership.members):
            raise ValueError(f"{node} sent a {type(message).__name__} of {spoken_of!r}")

    def _take(self, node: str, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(node, message)
        elif self.membership.hears(message):
            self._apply(MessageReceived(node, message))
        else:
            raise ValueError(f"{node} sent a {type(message).__name__}, which nodes must not send")

    def _main_returned(self, node: str, message: MainReturned) -> None:
        self._results[node] = message.result
        self._apply(MessageReceived(node, replace(message, result=b"")))

    def _model_saved(self, node: str, message: ModelSaved) -> None:
        if node == self.first:
            self.saved_model = message

    def _take_answer(self, node: str, message: StacksTaken | LinksSeen) -> None:
        if message.number in self._answers:
            self._answers[message.number][node] = message

    def _position_held(self, node: str, message: PositionHeld) -> None:
        """Record a node's part of a state; if all nodes have theirs now, absent nodes may join."""
        if self.feeds.position_held(message) and message.waits and self.membership.awaits_state:
            first = str(self.membership.present.first.node)
            self._apply(MessageReceived(first, StateHeld(first, waits=True)))

    def _heartbeat(self, node: str, message: Heartbeat) -> None:
        now, figures = time.monotonic(), self._figures[node]
        member = self.membership.members[node]
        figures.beat(message, now)
        for report in message.reports:
            if report.phase == PAST:
                self.history.record_past(node, report)
                continue
            figures.take(report)
            self._look_at_loss(node, figures)
            self.history.record(node, report)
        self._reports += len(message.reports) if not member.node.role.evaluates else 0
        if message.feed is not None:
            self._rows -= figures.rows + figures.validated
            figures.count_rows(message.feed.rows_out, now)
            figures.validated = message.feed.validated
            self._rows += figures.rows + figures.validated
        began = figures.rows > 0 or any(report.step != 0 for report in message.reports)  # step 0 announces it
        self._apply(HeartbeatReceived(node, began, message.feed.waits_for_rows if message.feed is not None else None))

    def _look_at_loss(self, node: str, figures: NodeFigures) -> None:
        """Write into a node's log, once, that its loss became NaN, and another node's loss to compare."""
        if not figures.loss_became_nan():
            return
        report = figures.report
        at = f" in epoch {report.epoch}" if report.epoch else f" at step {report.step}" if report.step else ""
        others = [
            f"; that of {name} is {other.metrics['loss']:g}"
            for name, other in self._figures.items()
            if not math.isnan(other.metrics.get("loss", math.nan))
        ]
        self._log.add(node, (f"tfos_nb: the loss became NaN{at}{''.join(others[:1])}",))

    def _slot_use(self, question: HoldsSlot) -> SlotUse:
        use: SlotUse = self._apply(SlotAsked(question, time.monotonic() <= self._slot_wanted_until))
        if use is SlotUse.LEAVE:
            self._slot_wanted_until = -math.inf
        return use

    # --- events and commands; the lock is held ---

    def _apply(self, event: Any) -> Any:
        """Pass an event to the membership, execute the commands that it returns, and return its answer."""
        before = self._of_beat(event)
        answer, commands = self.membership.apply(event)
        if before is None or before != self._of_beat(event):
            self._note_event(event)
        for command in commands:
            self._commands[type(command)](command)
        return answer

    def _of_beat(self, event: Any) -> Any:
        """Return the state that a frequent event may change; None for other events.

        Heartbeats come twice a second. One after which this state is the same is not kept as an event.
        """
        if isinstance(event, SlotAsked):
            return self.membership.members[event.question.node].left_slot
        if not isinstance(event, HeartbeatReceived):
            return None
        member = self.membership.members[event.node]
        return member.status, member.began

    def _note_event(self, event: Any) -> None:
        self._journal.note(time.monotonic() - self._planned_at, event)

    def _begin(self, command: Begin) -> None:
        held = self.feeds.held.states
        self.send(Start(command.spec, command.generation, command.passes, command.workers, held), command.nodes)

    def _end_stream(self, command: EndStream) -> None:
        link = self._links.pop(command.stream, None)
        if link is not None:
            link.end()

    def _begin_anew(self, command: ForgetProcess) -> None:
        self._figures[command.node].begin_anew()
        self._results.pop(command.node, None)

    def _await_evaluators(self, command: AwaitEvaluators) -> None:
        self._evaluators_until = time.monotonic() + self._grace if command.wanted else math.inf

    def _follow_history(self, command: FollowHistory) -> None:
        if command.node is None:
            self.history.begin_anew()
        else:
            self.history.follow(command.node)

    def _change(self, event: Any) -> Any:
        """Apply an event of the driver's own, and notify all waiting threads."""
        with self.changed:
            answer = self._apply(event)
            self.changed.notify_all()
            return answer

    # --- for the driver's threads: what happens ---

    def send(self, message: Any, nodes: Iterable[str] | None = None) -> None:
        """Send a message to the named nodes, or to all."""
        with self.changed:
            members = self.membership.members
            named = [members[name] for name in (members if nodes is None else nodes)]
            broadcast([self._links[one.stream] for one in named if one.stream in self._links], message)

    def send_to(self, node: str, message: Any) -> bool:
        """Send a message to one node; return whether it has a stream."""
        with self.changed:
            link = self._links.get(self.membership.members[node].stream or 0)
            if link is not None:
                link.send(message)
            return link is not None

    def dismiss(self, message: Any) -> None:
        """Tell every node to end. From now on its end is not a failure; a node that comes later is refused."""
        with self.changed:
            self._change(StopSent(message))

    def mark_stopped(self) -> None:
        """Give the nodes that were not done a final state."""
        self._change(Ended())

    def give_up_all(self) -> None:
        """Drop every supervisor that has not ended."""
        self._change(AllDropped())

    def abort(self, error: TfosError) -> None:
        """Add an error of the whole cluster to its failures."""
        self._change(Aborted(error))

    def write_log(self, node: str, lines: Iterable[str]) -> None:
        """Write lines into a node's log."""
        with self.changed:
            self._log.add(node, tuple(lines))

    def want_slot(self) -> None:
        """Have one node's task leave its slot: the first task that asks within :data:`_ASKED_WITHIN` seconds."""
        with self.changed:
            self._slot_wanted_until = time.monotonic() + _ASKED_WITHIN

    def stacks(self, timeout: float, nodes: Collection[str] | None = None) -> dict[str, StacksTaken]:
        """Ask the nodes that run for their stacks, all nodes or these; return what has come within ``timeout`` s."""
        with self.changed:
            members = self.membership.members
            wanted = members.keys() if nodes is None else nodes
            asked = {name for name in wanted if members[name].up and members[name].stream in self._links}
            return self._ask(AskStacks, asked, timeout)

    def look_at_links(self) -> LinksFound:
        """Ask all nodes that train which others they reach.

        Both nodes of a pair must have answered: one that the driver does not reach either is found by its silence.
        """
        with self.changed:
            seen = self._ask_links([str(one.node) for one in self.membership.present.training])
            order = list(self.membership.members)
            found = ((name, other) for name, one in seen.items() for other in one.unreached if other in seen)
            cut = {(one, other) if order.index(one) < order.index(other) else (other, one) for one, other in found}
            used = {(one, other) for one, other in cut if seen[one].serves or seen[other].serves}
            return LinksFound(frozenset(cut), frozenset(used))

    def _ask_links(self, nodes: Iterable[str]) -> dict[str, LinksSeen]:
        """Ask nodes which nodes that train they reach; return the answers that have come in time."""
        members = self.membership.members
        asked = {name for name in nodes if members[name].stream in self._links and members[name].reservation}
        places = {
            str(one.node): (one.reservation.host, one.reservation.port)
            for one in self.membership.present.training
            if one.reservation is not None
        }
        return self._ask(partial(AskLinks, places=places), asked, _PROBED_WITHIN)

    def _ask(self, question: Callable[[int], Any], nodes: set[str], timeout: float) -> dict[str, Any]:
        """Ask nodes; return the answers that have come in time. The lock is held, but for the wait.

        A node whose stream ends is not waited for.
        """
        number = self._asked = self._asked + 1
        answers = self._answers[number] = {}
        streams = {name: self.membership.members[name].stream for name in nodes}
        try:
            self.send(question(number), nodes)
            self.changed.wait_for(
                lambda: all(name in answers or stream not in self._links for name, stream in streams.items()), timeout
            )
        finally:
            del self._answers[number]
        return answers

    def report_cut(self, pairs: Collection[Pair]) -> None:
        """Fail by links that are cut, unless the nodes already fail or end."""
        with self.changed:
            if not self.membership.failures and not self.membership.dismissed:
                self._change(LinksCut(tuple(sorted(pairs))))

    def blame_links(self) -> None:
        """Look whether the nodes reach each other, as they only failed because of others; if not, fail by that."""
        if not self.plan.ps and (pairs := self.look_at_links().cut):
            self._change(LinksCut(tuple(sorted(pairs))))

    def restore_links(self) -> None:
        """Let nodes join that were left out and reach all others now."""
        with self.changed:
            away = [name for name, one in self.membership.members.items() if one.cut_off and one.absent]
            if not away:
                return
            for name, one in self._ask_links(away).items():
                if not one.unreached and self.membership.members[name].cut_off:
                    self._change(LinkRestored(name))

    def describe_cut(self, pairs: Collection[Pair]) -> str:
        """Return a sentence about nodes that do not reach each other."""
        with self.changed:
            return self.membership.describe_cut(pairs)

    @property
    def has_cut_links(self) -> bool:
        """Whether the nodes must start again because some do not reach each other."""
        with self.changed:
            return bool(self.membership.cut_links.pairs)

    def to_leave_out(self, least: int) -> tuple[str, ...]:
        """Return the workers without which the others reach each other, of which ``least`` are left; else empty."""
        with self.changed:
            return self.membership.to_leave_out(least)

    def mark_submitted(self, nodes: Iterable[str], hold: bool) -> None:
        """Record that these nodes were submitted to Spark, and whether their tasks hold slots."""
        self._change(Submitted(tuple(nodes), hold))

    def take_to_resubmit(self) -> list[str]:
        """Return the absent nodes that have neither a task nor a supervisor any more, and clear that list."""
        with self.changed:
            return list(self._apply(PendingRead(to_resubmit=True))) if self.membership.to_resubmit else []

    def take_late(self) -> list[str]:
        """Return the late nodes that a coordinator has admitted, and clear that list."""
        with self.changed:
            return list(self._apply(PendingRead(late=True))) if self.membership.admitted else []

    def continue_without_missing(self) -> tuple[str, ...]:
        """Continue with the nodes that have come; return the names of the others."""
        return tuple(self._change(ContinueWithout()))

    def scale(self, plan: ClusterPlan) -> None:
        """Change the cluster to another plan, as soon as possible."""
        with self.changed:
            new = [str(node) for node in plan.nodes if str(node) not in self._figures]
            self._figures.update((name, NodeFigures()) for name in new)
            self._log.expect(self._figures)
            self._change(Scaled(plan))

    def continue_earlier(self, generation: int) -> None:
        """Begin after the last ``generation`` of an earlier cluster, whose training is continued."""
        self._change(EarlierContinued(generation))

    def executors(self) -> frozenset[str]:
        """Return Spark's names of the executors on which nodes are."""
        with self.changed:
            members = self.membership.members.values()
            return frozenset(one.reservation.executor for one in members if one.reservation is not None)

    def executors_leave(self, executors: frozenset[str]) -> None:
        """Have the nodes on executors that are about to end leave them, as soon as a state was saved."""
        self._change(ExecutorsLeave(executors))

    def restart_with(self, cause: str) -> None:
        """Start all nodes again, with those that were absent and without those that leave."""
        self._change(RestartWith(cause))

    def restart_all(self, cause: str, without: Sequence[str] = ()) -> bool:
        """Start lost nodes again: all nodes but those ``without``, or only the lost ones; return whether it is all."""
        return bool(self._change(RestartAll(cause, tuple(without))))

    def fed_again(self, node: str | None = None) -> None:
        """Record that the rows of a replacement node have been fed again; without a name, those of all of them."""
        self._change(RowsFedAgain(None if node is None else (node,)))

    # --- for the driver's threads: what can be seen ---

    @property
    def plan(self) -> ClusterPlan:
        """The expected nodes."""
        return self.membership.plan

    @property
    def generation(self) -> int:
        """Number of times that all nodes were started together, from 1; an earlier cluster's times are counted too."""
        return self.membership.generation

    @property
    def was_restarted(self) -> bool:
        """Whether all nodes were started together more than once in this cluster."""
        return self.membership.generation > self.membership.first_generation

    @property
    def rendezvous(self) -> int:
        """Number of times that any nodes were started together, from 1."""
        return self.membership.rendezvous

    @property
    def restarts_left(self) -> int:
        """Number of restarts that are left."""
        return self.membership.restarts_left

    @property
    def failures(self) -> list[Failure]:
        """The failures since the last rendezvous, the first one first."""
        with self.changed:
            return list(self.membership.failures)

    @property
    def replaced(self) -> dict[str, Replaced]:
        """The replacements of lost nodes whose rows have not been fed again yet."""
        with self.changed:
            return dict(self.membership.replaced)

    @property
    def first(self) -> str:
        """The node that saves, and whose result is the cluster's: the chief, or the node in its place."""
        with self.changed:
            return str(self.membership.present.first.node)

    @property
    def missing(self) -> tuple[str, ...]:
        """The nodes that have not reserved."""
        with self.changed:
            return self.membership.missing

    @property
    def left_slots(self) -> tuple[str, ...]:
        """The nodes whose tasks have left their slots."""
        with self.changed:
            return self.membership.left_slots

    @property
    def without_supervisor(self) -> tuple[str, ...]:
        """The nodes without a slot that must start again, and have no supervisor left that would start them."""
        with self.changed:
            return self.membership.without_supervisor

    @property
    def all_take_rows(self) -> bool:
        """Whether every node that is fed has said where it takes rows."""
        with self.changed:
            return self.membership.present.all_take_rows

    @property
    def all_reserved(self) -> bool:
        """Whether every node has reserved."""
        with self.changed:
            return self.membership.present.all_reserved

    @property
    def all_up(self) -> bool:
        """Whether ``main`` has been called on every node."""
        with self.changed:
            return self.membership.present.all_up

    @property
    def all_returned(self) -> bool:
        """Whether ``main`` has returned on every node that has to."""
        with self.changed:
            return self.membership.present.all_returned

    @property
    def all_through(self) -> bool:
        """Whether ``main`` has ended on every node, or only serves other nodes."""
        with self.changed:
            return self.membership.present.all_through

    @property
    def saving(self) -> bool:
        """Whether a node is writing a model."""
        with self.changed:
            return self.membership.present.saving

    @property
    def all_gone(self) -> bool:
        """Whether no node has a stream any more."""
        with self.changed:
            return self.membership.all_gone

    @property
    def some_are_coming(self) -> bool:
        """Whether a node that has not reserved again still has a supervisor, which starts its next process at once."""
        with self.changed:
            return self.membership.present.some_are_coming

    def are_enough(self, least: int) -> bool:
        """Return whether all nodes have come, or all but some workers, of which at least ``least`` have."""
        with self.changed:
            return self.membership.present.are_enough(least)

    def lacking(self, plan: ClusterPlan) -> tuple[str, ...]:
        """Return the nodes of a plan that would have to be started."""
        with self.changed:
            return self.membership.lacking(plan)

    @property
    def changing(self) -> str:
        """The nodes that join or leave, once a saved state exists from which the others can continue; else empty."""
        with self.changed:
            return self.membership.changing

    @property
    def has_late_pending(self) -> bool:
        """Whether nodes can join or leave, or have been admitted."""
        with self.changed:
            return bool(self.membership.admitted or self.membership.changing)

    @property
    def has_pending(self) -> bool:
        """Whether nodes can join or leave, have been admitted, or must be requested from Spark."""
        with self.changed:
            return bool(self.membership.admitted or self.membership.changing or self.membership.to_resubmit)

    @property
    def unread(self) -> bool:
        """Whether ``main`` has returned on every node that is fed, and never asked for rows on any of them."""
        with self.changed:
            return self.membership.present.unread

    @property
    def progress(self) -> tuple[int, int]:
        """Number of rows that all nodes have taken, also to validate, and of reports of the training nodes."""
        with self.changed:
            return self._rows, self._reports

    def marks(self) -> dict[str, Any] | None:
        """Return by node what changes when it moves; None while nothing can be expected of the nodes.

        That is until ``main`` runs on all nodes that train, and while none has rows. Before the first step it is enough
        that rows are fed: a node may get none while another one does not take its own. A program that takes no rows and
        has never reported a step does not say whether it moves, so it is expected only to return on all nodes.
        """
        with self.changed:
            training = self._still_training()
            if not training or self.membership.failures:  # with failures, the nodes will start again or end
                return None
            figures = {str(one.node): self._figures[str(one.node)] for one in training}
            are_up = all(one.status in (NodeStatus.FEEDING, NodeStatus.TRAINING) for one in training)
            is_fed_first_rows = are_up and self.starts and self.feeds.has_rows_left
            if not is_fed_first_rows and not self._have_something_to_do(training, list(figures.values())):
                return None
            now = self.membership.rendezvous
            return {name: (one.taken, one.rows + one.validated, now) for name, one in figures.items()}

    def _have_something_to_do(self, training: Sequence[Member], figures: Sequence[NodeFigures]) -> bool:
        """Whether all nodes have begun, and have rows, report steps, or should return as others have."""
        if not all(one.status is NodeStatus.TRAINING for one in training):
            return False
        if all(one.waits_for_rows for one in figures):
            return False
        speaks = any(one.taken or one.has_rows for one in figures)
        return speaks or any(one.returned for one in self.membership.present.training)

    @property
    def starts(self) -> bool:
        """Whether a node that is fed has neither taken a row nor reported a step yet.

        With parameter servers it is not known: a coordinator's workers serve, and do nothing of their own.
        """
        with self.changed:
            fed = self.membership.present.fed
            return not self.plan.ps and any(not one.began and not one.status.ended for one in fed)

    def start_marks(self) -> dict[str, Any] | None:
        """Return by node what changes when it moves, from its start on; None if no node needs a link to another.

        With parameter servers, workers need no links to each other.
        """
        with self.changed:
            training = self._still_training()
            ready = len(training) > 1 and all(one.started for one in training)
            if not ready or self.plan.ps or self.membership.failures or self.membership.dismissed:
                return None
            figures = [(one, self._figures[str(one.node)]) for one in training]
            now = self.membership.rendezvous
            return {str(one.node): (one.status, seen.taken, seen.rows, now) for one, seen in figures}

    @property
    def some_are_stopped(self) -> bool:
        """Whether a signal has stopped the process of a node that trains."""
        with self.changed:
            beats = (self._figures[str(one.node)].heartbeat for one in self._still_training())
            return any(beat is not None and beat.stopped for beat in beats)

    def situations(self, stacks: Mapping[str, StacksTaken]) -> list[Situation]:
        """Return what is known of each node that trains, with its stacks."""
        with self.changed:
            return [
                self._figures[str(one.node)].situation(one, stacks.get(str(one.node))) for one in self._still_training()
            ]

    def _still_training(self) -> list[Member]:
        return [one for one in self.membership.present.training if not one.status.ended]

    @property
    def has_rows_left(self) -> bool:
        """Whether a node that trains has rows to take: from Spark, or from a source of its own."""
        with self.changed:
            return not self.feeds.nodes or self.feeds.has_rows_left

    @property
    def returned(self) -> list[str]:
        """The nodes that trained and whose main has returned."""
        with self.changed:
            return [str(one.node) for one in self.membership.present.training if one.returned]

    def step_marks(self) -> dict[str, Mark]:
        """Return how far each node that trains has come; empty unless all of them wait for each other in each step."""
        with self.changed:
            marks = {str(one.node): self._figures[str(one.node)].mark for one in self._still_training()}
            known = {name: mark for name, mark in marks.items() if mark is not None}
            return known if 1 < len(known) == len(marks) else {}

    def show_slow(self, texts: Mapping[str, str]) -> None:
        """Show why the others wait for these nodes in each step, and write it into their logs; for others, no more."""
        with self.changed:
            for name, figures in self._figures.items():
                if figures.show_slow(texts.get(name, "")):
                    self._log.add(name, (f"tfos_nb: this node {figures.slow}",))
            self.changed.notify_all()

    def write_findings(self, findings: Sequence[Finding]) -> None:
        """Write into each node's log what it does while nothing moves, and show it with those that are behind.

        If none is behind, it is shown with all. Without findings, nothing is shown any more.
        """
        shown = [one for one in findings if not one.waits] or findings
        with self.changed:
            for figures in self._figures.values():
                figures.show_finding("")
            for one in shown:
                self._figures[one.node].show_finding(one.text)
            for one in findings:
                self._log.add(one.node, (f"tfos_nb: nothing moves: this node {one.text}",))
            self.changed.notify_all()

    def fail(self, node: str, cause: str) -> None:
        """Add a node's failure that is the program's fault, so that the cluster is not restarted."""
        with self.changed:
            self.abort(self.membership.error_of(self.membership.members[node], cause))

    def worked(self) -> dict[str, float]:
        """Return the CPU time in seconds that each training node has used so far."""
        with self.changed:
            return {str(one.node): self._figures[str(one.node)].worked for one in self.membership.present.training}

    def nodes_with_rows(self) -> tuple[str, ...]:
        """Return the fed nodes for which rows wait."""
        with self.changed:
            return tuple(str(one.node) for one in self.membership.present.fed if self._has_rows(one))

    def nodes_without_rows(self) -> tuple[str, ...]:
        """Return the fed nodes that wait for rows."""
        with self.changed:
            fed = self.membership.present.fed
            return tuple(str(one.node) for one in fed if not self._has_rows(one) and not one.status.ended)

    def _has_rows(self, member: Member) -> bool:
        return self._figures[str(member.node)].has_rows and not member.status.ended

    def results(self) -> dict[str, bytes]:
        """Return what came back from each node, still encoded."""
        with self.changed:
            return {name: self._results[name] for name in self.membership.members if name in self._results}

    def events(self) -> list[ClusterEvent]:
        """Return the changes of the members, the oldest first; the oldest of many are condensed into their state."""
        with self.changed:
            return self._journal.events()

    def logs(self, node: str) -> list[str]:
        """Return the last lines that a node wrote."""
        with self.changed:
            return self._log.texts(node)

    def log_lines(self, node: str, after: float | None = None, limit: int | None = None) -> list[LogLine]:
        """Return a node's kept lines: the newest ones, or the first ones after the time of a line."""
        with self.changed:
            return self._log.lines(node, after, limit)

    @property
    def log_bytes(self) -> int:
        """Approximate size in bytes of the kept lines."""
        with self.changed:
            return self._log.size

    def shorten_logs(self, most: int | None = None) -> None:
        """Keep only the last lines of each node, at most ``most`` bytes for all nodes together."""
        with self.changed:
            self._log.shorten(most)

    def log_tail(self, count: int) -> list[LogLine]:
        """Return the newest lines of all nodes, the oldest first."""
        with self.changed:
            return self._log.tail(count)

    def snapshot(self) -> tuple[NodeState, ...]:
        """Return every node's state now."""
        now = time.monotonic()
        with self.changed:
            return tuple(self._figures[name].state(one, now) for name, one in self.membership.members.items())
