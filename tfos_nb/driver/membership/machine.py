"""Membership of a cluster: a state machine that takes events and returns commands.

::

    reserved, lost, returned, stop asked, scaled, …  ──▶  Membership.apply  ──▶  tell nodes, share rows, end a stream, …

It has no lock, no clock, no thread and no stream, so the same events always make the same state.
:class:`tfos_nb.driver.cluster_controller.ClusterController` is its one owner. It receives the nodes' messages, applies
them as events, and executes the commands.

Nodes on an executor that is about to end leave it before: when all nodes have saved a state and wait, those start
elsewhere, and the others start again. One of them always stays, because the states are in the nodes' memory.

After a loss all nodes start new processes, which is a new generation. Where a coordinator gives out the steps, only the
lost workers are replaced and all others continue. With ``min_workers`` the others may continue without nodes that do
not come back. Those join later, when a state has been saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

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
from tfos_nb.driver.membership.cut_links import CutLinks, describe_cut, left_out
from tfos_nb.driver.membership.ending_executors import EndingExecutors
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
from tfos_nb.driver.membership.members import Failure, Member, Replaced
from tfos_nb.driver.membership.present import CheckAll, PresentMembers
from tfos_nb.driver.membership.supervisors import Supervisors
from tfos_nb.errors import NodeFailed, PlanError, TfosError
from tfos_nb.runtime.control.lifecycle import (
    Coordinating,
    FeedPlace,
    Following,
    MainRaised,
    MainReturned,
    MainStarted,
    Moved,
    NodeEnded,
    NodeUp,
    Refused,
    Reservation,
    Saving,
    Serving,
    StartAgain,
    StateHeld,
    StateWanted,
    Stop,
)
from tfos_nb.runtime.control.plan import ClusterPlan, Node, Role
from tfos_nb.runtime.control.processes import signal_name
from tfos_nb.runtime.feed.messages import NoMoreFeeds, WorkerThrough
from tfos_nb.runtime.node.spark_task import SlotUse, SupervisorEnded
from tfos_nb.runtime.storage.shared_directory import PlaceSeen, PlacesSeen
from tfos_nb.state.cluster_state import JOINED, LEAVING, NodeStatus

__all__ = ["JOINS", "Membership"]

JOINS = 3
"""An absent node that was lost so often before it could join is given up."""


class Membership:
    """The members of one cluster, as the events so far have made them.

    Parameters
    ----------
    plan : ClusterPlan
        The expected nodes.
    restarts : int
        How often they may be started again.

    Attributes
    ----------
    members : dict of str to Member
        By their names.
    generation : int
        How often all of them were started together, from 1. ``main`` receives this number.
    first_generation : int
        The number with which it has begun: above 1 if it continues an earlier cluster's training.
    rendezvous : int
        How often any of them were started. A thread that waits for nodes checks whether it has changed.
    failures : list of Failure
        Since the last rendezvous, the first one first.
    replaced : dict of str to Replaced
        Replacements of lost nodes whose rows have not been fed again yet.
    admitted : list of str
        Late nodes that a coordinator has admitted since this was last read.
    present : PresentMembers
        The nodes that the cluster counts on.
    cut_links : CutLinks
        The nodes and hosts that do not reach each other, though the driver reaches them.
    to_resubmit : list of str
        Absent nodes that have neither a task nor a supervisor any more.
    """

    def __init__(self, plan: ClusterPlan, restarts: int = 0, durable: bool = False) -> None:
        self.plan = plan
        self.members = {str(node): Member(node) for node in plan.nodes}
        self.generation = self.first_generation = self.rendezvous = 1
        self.restarts_left = restarts
        self.failures: list[Failure] = []
        self.replaced: dict[str, Replaced] = {}
        self.admitted: list[str] = []
        self.to_resubmit: list[str] = []
        self.feed_places: dict[str, FeedPlace] = {}
        self.dismissed = False
        self._commands: list[Any] = []
        self._can_join = False  # a state was saved after the absent nodes had come
        self._asked = False  # the nodes know that one is wanted
        self._evaluators_told = False  # they know that the training has ended
        self._leaving: set[str] = set()
        self._lasts = restarts > 0  # its supervisors start processes again
        self._executors = EndingExecutors(durable)
        self.cut_links = CutLinks()
        self._supervisors = Supervisors()
        self._coordinators: dict[str, Member] = {}  # they need the servers of the others
        self._leavers: dict[str, Member] = {}  # main has returned, and there is no server
        self._places_seen = PlacesSeen()
        self._fed = frozenset(plan.fed_nodes)
        self._gone = CheckAll(list(self.members.values()), attrgetter("is_gone"))
        self.present = PresentMembers(self.members.values(), self._fed)
        self._events: dict[type, Callable[[Any], object]] = {
            EarlierContinued: self._earlier_continued,
            SupervisorConnected: self._supervisor_connected,
            MessageReceived: self._message_received,
            HeartbeatReceived: self._heartbeat_received,
            StreamEnded: self._stream_ended,
            HeartbeatTimedOut: self._heartbeat_timed_out,
            LinksCut: self._links_cut,
            LinkRestored: self._link_restored,
            TaskReported: self._supervisor_ended,
            SlotAsked: self._slot_asked,
            Submitted: self._submitted,
            Scaled: self._scaled,
            ExecutorsLeave: self._executors_leave,
            RestartAll: self._restart_all,
            RestartWith: self._restart_with,
            ContinueWithout: self._continue_without,
            PendingRead: self._pending_read,
            RowsFedAgain: self._rows_fed_again,
            Aborted: self._aborted,
            EvaluatorsTimedOut: self._evaluators_timed_out,
            StopSent: self._stop_sent,
            AllDropped: self._all_dropped,
            Ended: self._ended,
        }
        self._messages = self._message_handlers()

    def _message_handlers(self) -> dict[type, Callable[[Member, Any], None]]:
        return {
            NodeUp: self._node_up,
            MainStarted: self._main_started,
            Serving: self._serving,
            Coordinating: self._coordinates,
            Following: self._follows,
            Saving: self._saving,
            StateHeld: self._state_held,
            MainReturned: self._main_returned,
            MainRaised: self._main_raised,
            NodeEnded: self._node_ended,
            PlaceSeen: self._place_seen,
            WorkerThrough: self._worker_through,
            Reservation: self._reserved_anew,
        }

    def apply(self, event: Any) -> tuple[Any, list[Any]]:
        """Take an event; return its answer, if it is a question, and the commands to execute, in order."""
        answer = self._events[type(event)](event)
        if not isinstance(event, (HeartbeatReceived, SlotAsked)):  # they are frequent, and change nothing of this
            self._ask_for_state()
            self._tell_evaluators()
        commands, self._commands = self._commands, []
        return answer, commands

    def hears(self, message: Any) -> bool:
        """Return whether the membership handles a node's message."""
        return type(message) in self._messages

    # --- what can be seen ---

    @property
    def awaits_state(self) -> bool:
        """Whether nodes wait for a saved state, to join the others or to leave them."""
        return bool(self._joining() or self._leaving or self._moving())

    def is_fed(self, node: Node) -> bool:
        """Return whether the plan feeds rows to a node."""
        return node in self._fed

    @property
    def missing(self) -> tuple[str, ...]:
        """The nodes that have not reserved."""
        return tuple(name for name, one in self.members.items() if one.reservation is None and not one.told_to_end)

    @property
    def all_gone(self) -> bool:
        """Whether no node has a stream any more."""
        return self._gone()

    @property
    def left_slots(self) -> tuple[str, ...]:
        """The nodes whose tasks have left their slots."""
        return tuple(name for name, one in self.members.items() if one.left_slot)

    @property
    def without_supervisor(self) -> tuple[str, ...]:
        """The nodes without a slot that must start again, and have no supervisor left that would start them."""
        missing = [self.members[name] for name in self.missing]
        return tuple(str(one.node) for one in missing if one.left_slot and not one.pending and one.stream is None)

    def lacking(self, plan: ClusterPlan) -> tuple[str, ...]:
        """Return the nodes of a plan that would have to be started."""
        found = {str(node): self.members.get(str(node)) for node in plan.nodes}
        return tuple(name for name, one in found.items() if one is None or one.told_to_end)

    @property
    def changing(self) -> str:
        """The nodes that join or leave, once a saved state exists from which the others can continue; else empty."""
        joining = [str(one.node) for one in self._joining()]
        if not self._can_join or len(self._leaving) == len(self.present):
            return ""
        said = [", ".join(joining) + JOINED if joining else ""]
        said += [", ".join(sorted(self._leaving)) + LEAVING if self._leaving else ""]
        said += [f"the executor of {one.node} is about to end" for one in self._moving()]
        return "; ".join(filter(None, said))

    def is_there(self, node: str) -> bool:
        """Return whether another attempt of a node's task has already brought it into the cluster."""
        one = self.members[node]
        return one.stream is not None and (one.ended is None or self.restarts_left > 0)

    def is_wanted(self, node: str, executor: str = "") -> bool | None:
        """Return whether a task whose supervisor has ended must start another; None: not decided yet."""
        one = self.members[node]
        if self.dismissed or one.stream is not None or one.told_to_end or self._executors.has_left(node, executor):
            return False
        if one.reservation is None and (self.rendezvous > 1 or one.absent):
            return one.failed_joins < JOINS
        return None if self.restarts_left > 0 else False

    def describe_cut(self, pairs: Iterable[tuple[str, str]]) -> str:
        """Return a sentence about nodes that do not reach each other."""
        places = {name: one.reservation for name, one in self.members.items()}
        return describe_cut(list(pairs), {name: place.host if place else "" for name, place in places.items()})

    def to_leave_out(self, least: int) -> tuple[str, ...]:
        """Return the workers without which the others reach each other, of which ``least`` are left; else empty."""
        workers = [str(one.node) for one in self.present.members if one.node.role is Role.WORKER]
        return left_out(self.cut_links.pairs, workers, str(self.present.first.node), least)

    # --- whom the cluster counts on ---

    def _count_on(self, members: Iterable[Member]) -> None:
        """Make these nodes the cluster: all nodes, or those that are left."""
        self.present = PresentMembers(members, self._fed)

    def _count_on_late(self, late: Sequence[Member]) -> None:
        for one in late:
            one.absent = False
        self._count_on([one for one in self.members.values() if not one.absent])

    def _do(self, command: Any) -> None:
        self._commands.append(command)

    def _tell(self, nodes: Iterable[str], message: Any) -> None:
        self._do(Tell(tuple(nodes), message))

    # --- a node comes ---

    def _earlier_continued(self, event: EarlierContinued) -> None:
        assert self.rendezvous == 1, "no node has come"
        self.generation = self.first_generation = event.generation + 1

    def _supervisor_connected(self, event: SupervisorConnected) -> None:
        message = event.message
        one = self.members[message.node]
        if one.reservation is not None:
            self._do(Note(f"a second {message.node} came from {message.host} and was refused"))
            self._do(EndStream(event.stream))
        elif isinstance(message, Refused):
            self._fail(one, PlanError(f"{message.node} on {message.host}: {message.reason}"))
            self._do(EndStream(event.stream))
        elif self.dismissed or one.told_to_end:  # it was dismissed before it came: its main must not be called
            self._do(EndStream(event.stream))
        else:
            self._drop_supervisor(one)  # drop the attempt that this one replaces
            self._supervisors.connect(one, event.stream, message)
            self._reserve(one, message)

    def _reserve(self, one: Member, message: Reservation) -> None:
        one.reservation = message
        one.pending = False
        self._supervisors.note_reservation(message)
        one.become(NodeStatus.RESERVED)
        if not one.absent:
            self._start_if_complete()
        self._start_late()

    def _reserved_anew(self, one: Member, message: Reservation) -> None:
        if message.generation == self.generation and one.reservation is None and not one.told_to_end:
            self._reserve(one, message)

    def _start_if_complete(self) -> None:
        if not self.present.all_reserved:
            return
        spec = self.present.addresses()
        starting = [one for one in self.present.members if not one.started]
        if self.rendezvous > 1:  # main may need the schema as soon as it is called
            self._do(DescribeRows(tuple(str(one.node) for one in starting if one.node in self._fed)))
        behind: dict[int, list[str]] = {}
        for one in starting:
            one.become(NodeStatus.STARTING)
            one.started = True
            behind.setdefault(one.through, []).append(str(one.node))
        for passes, nodes in behind.items():  # usually one group: a thousand addresses are encoded once
            self._do(Begin(tuple(nodes), spec, self.generation, passes, self._workers_left()))

    def _workers_left(self) -> tuple[int, ...]:
        """Return the present workers' indices, if some nodes are absent; a node's rank is its place among them."""
        if len(self.present) == len(self.members):
            return ()
        return tuple(one.node.index for one in self.present.members if one.node.role is Role.WORKER)

    def _start_late(self) -> None:
        """Start workers that came after the others began, where a coordinator can admit them.

        The coordinator numbers its workers without gaps. It receives a worker's address once that worker's server
        runs. The worker counts as a member once the coordinator reports that it gives it steps.
        """
        if not self.members[str(self.plan.chief_node)].following or not self.present.all_reserved:
            return  # the address of a node that is coming back is not known yet
        spec = self.present.addresses()
        for one in self.members.values():
            if not one.absent or one.told_to_end:
                continue
            if one.reservation is None:
                return
            spec[one.node.role.value].append(one.address)
            if not one.started:
                one.become(NodeStatus.STARTING)
                one.started = one.moved = True
                addresses = {role: list(at) for role, at in spec.items()}
                self._do(Begin((str(one.node),), addresses, self.generation, 0, ()))

    # --- messages of a node ---

    def _message_received(self, event: MessageReceived) -> None:
        self._messages[type(event.message)](self.members[event.node], event.message)

    def _node_up(self, one: Member, message: NodeUp) -> None:
        one.up = message
        if message.feed is not None:
            self.feed_places[message.node] = message.feed

    def _main_started(self, one: Member, message: MainStarted) -> None:
        one.become(NodeStatus.TRAINING)  # its heartbeats say whether it waits for rows

    def _serving(self, one: Member, message: Serving) -> None:
        one.serving = True
        one.become(NodeStatus.TRAINING)
        if one.moved:  # a worker that has come back: tell its coordinator the new address
            one.moved = False
            self._tell([str(self.plan.chief_node)], Moved(str(one.node), one.address))

    def _saving(self, one: Member, message: Saving) -> None:
        one.saving = message.going_on

    def _state_held(self, one: Member, message: StateHeld) -> None:
        self._can_join |= one is self.present.first and message.waits and self.awaits_state

    def _main_returned(self, one: Member, message: MainReturned) -> None:
        one.returned, one.unread = True, not message.read
        one.become(NodeStatus.DONE)
        if not message.serves and not one.node.role.evaluates:
            self._leavers[message.node] = one
            self._check_servers()

    def _coordinates(self, one: Member, message: Coordinating) -> None:
        self._coordinators[message.node] = one
        self._check_servers()

    def _follows(self, one: Member, message: Following) -> None:
        one.following = True
        self._start_late()

    def _check_servers(self) -> None:
        """Fail a node that left no server while the coordinator waits for one: TensorFlow would wait without end."""
        waiting = next((one for one in self._coordinators.values() if not one.status.ended), None)
        if waiting is not None and self._leavers:
            left = next(iter(self._leavers.values()))
            cause = f"its main has returned and left no TensorFlow server, for which {waiting.node} waits: begin main "
            self._fail(left, self.error_of(left, cause + "with `if not ctx.is_chief: return ctx.serve()`"))

    def _main_raised(self, one: Member, message: MainRaised) -> None:
        one.raised = message
        self._fail(one, self.error_of(one, message.summary), message.collateral)

    def _node_ended(self, one: Member, message: NodeEnded) -> None:
        one.ended = message
        if one.told_to_end:
            if not one.status.ended:
                one.become(NodeStatus.STOPPED)
        elif one.raised is None:
            self._fail(one, self.error_of(one, _how_ended(one, message)), lost=True)

    def _place_seen(self, one: Member, message: PlaceSeen) -> None:
        if told := self._places_seen.unlike(message):
            self._fail(one, PlanError(told))

    def _worker_through(self, one: Member, message: WorkerThrough) -> None:
        worker = self.members[message.node]
        worker.through = message.passes
        if worker.absent:
            self._admit(worker)

    def _admit(self, worker: Member) -> None:
        """Admit a worker that joined late, to which the coordinator gives steps; later feeds give it a share."""
        name = str(worker.node)
        self.rendezvous += 1
        self._count_on_late([worker])
        self._do(DescribeRows((name,)))  # a coordinator asks for rows as soon as it has admitted a worker
        self.replaced[name] = Replaced(worker.through, self.rendezvous)
        self.admitted.append(name)

    def _heartbeat_received(self, event: HeartbeatReceived) -> None:
        one = self.members[event.node]
        one.began |= event.began
        if one.status in (NodeStatus.FEEDING, NodeStatus.TRAINING):
            waits = event.waits_for_rows and one.node in self._fed and not one.began and not one.serving
            one.become(NodeStatus.FEEDING if waits else NodeStatus.TRAINING)

    # --- a node is lost, or fails ---

    def _stream_ended(self, event: StreamEnded) -> None:
        """Record the end of a node's stream: without its last message, the node is lost."""
        one = self._supervisors.end_stream(event.stream)
        if one is not None and one.ended is None:
            self._lose(one, "its supervisor is gone: it was killed, or its host or its container has ended")

    def _heartbeat_timed_out(self, event: HeartbeatTimedOut) -> None:
        one = self.members[event.node]
        if one.stream is not None and not one.status.ended:
            cause = f"no heartbeat for {event.seconds:g} s: its host or network is gone, or it is stopped"
            self._lose(one, cause)

    def _links_cut(self, event: LinksCut) -> None:
        """Fail by nodes that do not reach each other. The failure is that of a node that may be left out."""
        self.cut_links.cut(event.pairs, self.members)
        name = (self.to_leave_out(0) or event.pairs[0])[0]
        cause = (
            f"{self.describe_cut(event.pairs)}: their packets are lost on the way. Check the network and the firewalls "
            "between these hosts"
        )
        self._fail(self.members[name], self.error_of(self.members[name], cause), lost=True)

    def _link_restored(self, event: LinkRestored) -> None:
        one = self.members[event.node]
        one.cut_off = False
        self.cut_links.restore(one)
        self._do(Note(f"{one.node} reaches all other nodes again"))

    def _supervisor_ended(self, event: TaskReported) -> None:
        message = event.message
        one = self.members[message.node]
        said = message.text.splitlines()
        self._do(WriteLog(message.node, (f"[its supervisor ended with code {message.code}]", *said)))
        if one.status is NodeStatus.LOST and message.code != 0:
            self._explain_loss(one, message)
        had_reserved = self._supervisors.has_reserved(message)
        counts = one.absent and not one.told_to_end  # an absent node that never comes must be given up at some time
        if one.reservation is None and not had_reserved and (counts or not one.status.ended):
            cause = f"its supervisor ended with code {message.code} before it had reserved"
            error = NodeFailed(cause, node=message.node, log_tail=message.text)
            self._fail(one, error, lost=self.rendezvous > 1)

    def _explain_loss(self, one: Member, message: SupervisorEnded) -> None:
        """Add to a failure how the supervisor ended: its stream broke first, and its task reports only now."""
        how = signal_name(message.code) or f"code {message.code}"
        for index, failure in enumerate(self.failures):
            if failure.node == str(one.node):
                error = self.error_of(one, f"its supervisor ended with {how}", message.text)
                self.failures[index] = replace(failure, error=error)

    def _lose(self, one: Member, cause: str) -> None:
        if one.told_to_end or one.status.ended:
            if not one.status.ended:
                one.become(NodeStatus.STOPPED)
            one.saving = False  # do not wait for a model that it was writing
        else:
            self._fail(one, self.error_of(one, cause), lost=True, status=NodeStatus.LOST)

    def _fail(
        self,
        one: Member,
        error: TfosError,
        collateral: bool = False,
        lost: bool = False,
        status: NodeStatus = NodeStatus.FAILED,
    ) -> None:
        if one.absent:
            self._do(Note(f"{one.node} could not join: {error}"))
            self._drop_absent(one)
            return
        one.become(status)
        if self._may_fail(one):
            self._warn(one, f"failed, and the training continues: {error}")
            self._wait_no_more(one)
            return
        self.failures.append(Failure(error, str(one.node), collateral, lost))

    def error_of(self, one: Member, cause: str, log_tail: str = "") -> NodeFailed:
        """Return a node's failure, with the known facts about the node."""
        place, ended, raised = one.reservation, one.ended, one.raised
        return NodeFailed(
            cause,
            node=str(one.node),
            host=place.host if place else "",
            executor=place.executor if place else "",
            exit_code=ended.exit_code if ended else None,
            signal=ended.signal if ended else None,
            remote_traceback=raised.traceback if raised else "",
            log_tail=log_tail or (ended.log_tail if ended else ""),
        )

    def _aborted(self, event: Aborted) -> None:
        self.failures.append(Failure(event.error, "", collateral=False))

    # --- evaluators: the cluster is done only when their main has returned, too ---

    def _may_fail(self, one: Member) -> bool:
        """Return whether a node's failure is not the cluster's. If it never started, other nodes would wait for it."""
        return self.plan.evaluator_may_fail and one.node.role.evaluates and one.up is not None

    def _tell_evaluators(self) -> None:
        """Tell the evaluators, once, that the training has ended: this ends ``ctx.checkpoints()``."""
        if self._evaluators_told or not self.present.evaluators or not self.present.have_trained:
            return
        if late := self.present.late_evaluators:
            self._evaluators_told = True
            self._tell([str(one.node) for one in late], NoMoreFeeds())
            self._do(AwaitEvaluators(True))

    def _evaluators_timed_out(self, event: EvaluatorsTimedOut) -> None:
        for one in self.present.late_evaluators:
            self._warn(one, f"had not ended {event.seconds:g} s after the training; the cluster ends without it")
            self._wait_no_more(one)

    def _wait_no_more(self, one: Member) -> None:
        """Do not wait for an evaluator's ``main`` to return."""
        one.serving = True

    def _warn(self, one: Member, text: str) -> None:
        self._do(Warn(f"{one.node} {text}"))
        self._do(WriteLog(str(one.node), tuple(f"{one.node} {text}".splitlines())))

    # --- restart of the nodes ---

    def _restart_all(self, event: RestartAll) -> bool:
        """Start lost nodes again; return whether all nodes start again."""
        lost = self._replaceable()
        self.rendezvous += 1
        self.restarts_left -= 1
        self._can_join = self._asked = False
        self.failures.clear()
        if lost:
            self._replace(lost, event.cause)
        else:
            self._start_again(event.cause, event.without)
        self.cut_links.restart(event.without)
        return not lost

    def _restart_with(self, event: RestartWith) -> None:
        self.rendezvous += 1
        self._can_join = self._asked = False
        self._start_again(event.cause)

    def _replaceable(self) -> list[Member]:
        """Return the lost nodes if only they must be replaced: workers of a coordinator that follows them."""
        chief = self.members[str(self.plan.chief_node)]
        failed = [self.members[name] for name in dict.fromkeys(failure.node for failure in self.failures) if name]
        if not chief.following or chief.status.ended or not all(failure.node for failure in self.failures):
            return []
        workers = all(one.node.role is Role.WORKER and one.serving for one in failed)
        # The process of a silent node may still live, and TensorFlow would wait for its answer for ever.
        gone = all(one.stream is None or one.ended is not None for one in failed)
        return failed if workers and gone else []

    def _replace(self, lost: list[Member], cause: str) -> None:
        for one in lost:
            name, through = str(one.node), one.through
            self._begin_anew(one)
            one.through, one.moved = through, True
            self.replaced[name] = Replaced(through, self.rendezvous)
            self._tell([name], StartAgain(self.generation, cause))

    def _start_again(self, cause: str, without: Sequence[str] = ()) -> None:
        self.generation += 1
        self._evaluators_told = False
        self._do(AwaitEvaluators(False))
        self.replaced.clear()
        self.to_resubmit.clear()  # all missing nodes are submitted to Spark now
        self._do(FeedsStartAgain())
        self._do(FollowHistory(None))
        if late := [one for one in self.members.values() if one.absent and one.started]:
            self._count_on_late(late)  # they must not wait for the coordinator of the old generation
        moving = self._moving()
        for one in self.present.members:
            if one.status is NodeStatus.LOST or one in moving or str(one.node) in without:
                self._drop_supervisor(one)
        for one in moving:
            self._executors.leave(one)
            one.left_slot = True  # its task ends, and another one must be submitted
        for one in self.present.members:
            self._begin_anew(one)
        for name in self._leaving:
            self._remove(self.members[name])
        staying = [str(one.node) for one in self.present.members if not one.told_to_end and one not in moving]
        staying = [name for name in staying if name not in without]
        joining = [str(one.node) for one in self._joining()]  # they have just reserved, and were never started
        self._tell(staying, StartAgain(self.generation, cause))
        for name in without:
            self.members[name].cut_off = True
        if self._leaving or joining or without:
            self._leaving = set()
            names = {*staying, *joining, *(str(one.node) for one in moving if str(one.node) not in without)}
            self._share_out([one for name, one in self.members.items() if name in names])

    def _begin_anew(self, one: Member) -> None:
        one.begin_anew()
        self._do(ForgetProcess(str(one.node)))
        for known in (self.feed_places, self._coordinators, self._leavers):
            known.pop(str(one.node), None)

    def _drop_supervisor(self, one: Member) -> None:
        """Give up a node's supervisor, if it has one."""
        if (stream := self._supervisors.give_up(one)) is not None:
            self._do(EndStream(stream))

    # --- fewer nodes than the plan has, or another plan ---

    def _scaled(self, event: Scaled) -> None:
        plan = event.plan
        self._widen(plan)
        wanted = {str(node) for node in plan.nodes}
        self._leaving = {str(one.node) for one in self.present.members} - wanted
        for one in [one for one in self.members.values() if one.absent]:
            if str(one.node) not in wanted:
                self._remove(one)
            elif one.told_to_end:
                self._drop_supervisor(one)  # it was told to end: another one comes
                one.told_to_end, one.failed_joins = False, 0
                one.become(NodeStatus.PLANNED)

    def _widen(self, plan: ClusterPlan) -> None:
        """Add the nodes of another plan; the new ones are absent until they join."""
        self.plan = plan
        known = dict(self.members)
        self.members.clear()  # change the same dict: others hold a reference to it
        for name in map(str, plan.nodes):
            self.members[name] = known.pop(name) if name in known else Member(Node.parse(name), absent=True)
        self.members.update(known)
        self._fed = frozenset(plan.fed_nodes)
        self._gone = CheckAll(list(self.members.values()), attrgetter("is_gone"))

    def _continue_without(self, event: ContinueWithout) -> tuple[str, ...]:
        """Continue with the nodes that have come; return the names of the others."""
        gone = tuple(str(one.node) for one in self.present.not_reserved)
        if gone:
            self._share_out([one for one in self.present.members if one.reservation is not None])
            self._start_if_complete()
        return gone

    def _joining(self) -> list[Member]:
        if len(self.present) == len(self.members):  # the usual case, in which a thousand nodes need not be looked at
            return []
        came = [one for one in self.members.values() if one.absent and one.reservation and not one.started]
        return [one for one in came if not one.cut_off and not self._executors.has(one)]

    # --- executors that are about to end ---

    def _executors_leave(self, event: ExecutorsLeave) -> None:
        self._executors.add(event.executors)
        there = self._executors.among(self.members.values())
        for one in there:
            self._do(WriteLog(str(one.node), ("tfos_nb: Spark decommissions this executor",)))
        moving = [str(one.node) for one in self._moving()]
        if there:
            staying = ", ".join(str(one.node) for one in there if str(one.node) not in moving)
            said = [f"{', '.join(moving)} leave executors that end, with the next saved state" if moving else ""]
            said += [f"{staying} will be lost with its executor" if staying else ""]
            self._do(Note("; ".join(filter(None, said))))

    def _moving(self) -> Sequence[Member]:
        """Return the nodes that leave their executors with the next saved state.

        If a coordinator gives out the steps, a lost worker is replaced while all others continue, so none moves before.
        """
        return self._executors.leaving(self.present) if self._lasts and not self.plan.ps else ()

    def _ask_for_state(self) -> None:
        """Tell the nodes whether others wait for a state: they wait after it, so that no step is done twice."""
        wanted = self.awaits_state and not self.dismissed
        if wanted is not self._asked:
            self._asked = wanted
            self._can_join &= wanted
            self._tell([str(one.node) for one in self.present.members], StateWanted(wanted))

    def _share_out(self, present: list[Member]) -> None:
        """Make these nodes the cluster, and share the rows among them."""
        names = {str(one.node) for one in present}
        for name, one in self.members.items():
            stays_away = one.absent and one.cut_off  # its supervisor waits until it reaches the others
            one.absent, one.failed_joins = name not in names, 0
            if one.told_to_end or stays_away:  # it was already asked to end
                continue
            if one.absent:
                one.become(NodeStatus.LOST)
                self._drop_supervisor(one)
                self._bring_back(one)
        self._count_on(present)
        self._do(FollowHistory(str(self.present.first.node)))

    def _bring_back(self, one: Member) -> None:
        """Have an absent node submitted to Spark again, if its task has left the slot and would not restart it."""
        if one.left_slot and not one.pending and one.failed_joins < JOINS:
            self.to_resubmit.append(str(one.node))

    def _remove(self, one: Member) -> None:
        """Tell a node to end: it is not in the plan any more."""
        self._begin_anew(one)
        one.told_to_end = True
        one.become(NodeStatus.STOPPED)
        self._tell([str(one.node)], Stop("the cluster has fewer workers now", 0.0))

    def _drop_absent(self, one: Member) -> None:
        """Drop an absent node that was lost before it could join."""
        self._drop_supervisor(one)
        one.pending = False
        one.failed_joins += 1
        self._bring_back(one)
        self._begin_anew(one)
        one.become(NodeStatus.LOST)

    # --- slots, and the end ---

    def _slot_asked(self, event: SlotAsked) -> SlotUse:
        question = event.question
        one = self.members[question.node]
        if self._supervisors.is_given_up(question):
            return SlotUse.END
        if self._executors.has_left(question.node, question.executor):
            return SlotUse.LEAVE
        if one.node in self.plan.driver_nodes:  # it holds no Spark slot
            return SlotUse.HOLD
        # A slot that is left frees its GPU, and Spark would give that to a node that waits for one.
        lends = bool(self.plan.gpus_of(one.node)) and bool(self.missing)
        if lends or one.stream is None or not event.wanted:
            return SlotUse.HOLD
        one.left_slot = True
        self._do(Note(f"{one.node} leaves its slot, so that the rows have one"))
        return SlotUse.LEAVE

    def _submitted(self, event: Submitted) -> None:
        for name in event.nodes:
            one = self.members[name]
            one.left_slot, one.pending = not event.hold, True

    def _pending_read(self, event: PendingRead) -> list[str]:
        """Return the names that were asked for, and clear those lists."""
        taken = (self.admitted if event.late else []) + (self.to_resubmit if event.to_resubmit else [])
        if event.late:
            self.admitted = []
        if event.to_resubmit:
            self.to_resubmit = []
        return taken

    def _rows_fed_again(self, event: RowsFedAgain) -> None:
        for name in list(self.replaced) if event.nodes is None else event.nodes:
            self.replaced.pop(name, None)

    def _stop_sent(self, event: StopSent) -> None:
        self.dismissed = True
        for one in self.members.values():
            one.told_to_end = True
            if one.reservation is None and not one.status.ended:
                one.become(NodeStatus.STOPPED)
        self._tell(self.members, event.message)

    def _all_dropped(self, event: AllDropped) -> None:
        for one in self.members.values():
            self._drop_supervisor(one)

    def _ended(self, event: Ended) -> None:
        """Give the nodes that were not done a final state."""
        for one in self.members.values():
            if not one.status.ended:
                one.become(NodeStatus.STOPPED)


def _how_ended(one: Member, message: NodeEnded) -> str:
    how = message.note or (f"killed by {message.signal}" if message.signal else f"exited with code {message.exit_code}")
    killed = message.signal == "SIGKILL"
    memory = f"{message.memory_bytes / 2**30:.1f} GiB" if message.memory_bytes and killed else ""
    memory = memory and (f"; the process had {memory}" if message.note else f" at {memory}")
    when = " after main had returned" if one.returned else ""
    hint = "; if nobody did, the host was out of memory" if killed and not message.note else ""
    return f"{how}{memory}{when}{hint}"
