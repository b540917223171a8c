"""The membership's state machine: after any sequence of events each node is counted once, and none waits forever."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tfos_nb.driver.membership.commands import AwaitEvaluators, Begin, EndStream, Tell
from tfos_nb.driver.membership.events import (
    AllDropped,
    ContinueWithout,
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
    Scaled,
    SlotAsked,
    StopSent,
    StreamEnded,
    Submitted,
    SupervisorConnected,
    TaskReported,
)
from tfos_nb.driver.membership.journal import Journal, replay
from tfos_nb.driver.membership.machine import Membership
from tfos_nb.driver.membership.members import TRANSITIONS, Member
from tfos_nb.runtime.control.lifecycle import (
    Coordinating,
    EndNode,
    FeedPlace,
    Following,
    MainRaised,
    MainReturned,
    MainStarted,
    NodeEnded,
    NodeUp,
    Refused,
    Reservation,
    Saving,
    Serving,
    StartAgain,
    StateHeld,
    StateWanted,
)
from tfos_nb.runtime.control.plan import ClusterPlan, Node, Role
from tfos_nb.runtime.feed.messages import WorkerThrough
from tfos_nb.runtime.node.spark_task import HoldsSlot, SlotUse, SupervisorEnded
from tfos_nb.state.cluster_state import NodeStatus

PLACE = FeedPlace("/s", "h", 1, b"")
NODES = st.integers(0, 7)


def state_of(membership: Membership) -> Any:
    """Return the whole state, so that two memberships can be compared."""
    return (
        membership.plan,
        membership.members,
        membership.generation,
        membership.rendezvous,
        membership.restarts_left,
        [(str(one.error), one.node, one.collateral, one.lost) for one in membership.failures],
        membership.replaced,
        membership.admitted,
        membership.to_resubmit,
        membership.feed_places,
        [str(one.node) for one in membership.present.members],
        membership.dismissed,
        membership.cut_links.pairs,
    )


class MembershipMachine(RuleBasedStateMachine):
    """Nodes connect, train, fall silent and fail in any order, several at once, and may repeat their messages."""

    @initialize(
        workers=st.integers(1, 3),
        ps=st.integers(0, 1),
        chief=st.booleans(),
        evaluator=st.booleans(),
        may_fail=st.booleans(),
        restarts=st.integers(0, 3),
    )
    def plan(self, workers: int, ps: int, chief: bool, evaluator: bool, may_fail: bool, restarts: int) -> None:
        plan = ClusterPlan(workers, ps, chief or ps > 0, evaluator, evaluator_may_fail=evaluator and may_fail)
        self.membership = Membership(plan, restarts)
        self.events: list[Any] = [Planned(plan, restarts)]
        self.journal = Journal(most=7)
        self.journal.note(0.0, self.events[0])
        self.streams: dict[int, str] = {}  # the open streams, and the name of each one's node
        self.ended_streams: set[int] = set()
        self.count = 0
        self.dismissed = self.over = self.wanted = False
        self.awaited = False  # whether the driver waits for evaluators, because the training has ended
        self.silent: dict[str, int] = {}  # each silent node, and its stream when it fell silent

    def apply(self, event: Any) -> Any:
        before = self.membership.generation, self.membership.rendezvous
        self.events.append(event)
        self.journal.note(float(len(self.events)), event)
        failed = len(self.membership.failures)
        ran = {str(one.node) for one in self.membership.present.members if one.up and one.node.role is Role.EVALUATOR}
        answer, commands = self.membership.apply(event)
        if self.membership.plan.evaluator_may_fail:
            assert not ran.intersection(failure.node for failure in self.membership.failures[failed:])
        assert self.membership.generation >= before[0]
        assert self.membership.rendezvous >= before[1]
        for command in commands:
            self.execute(command)
        assert self.membership.present.fed_names == [str(one.node) for one in self.membership.present.fed]
        return answer

    def execute(self, command: Any) -> None:
        if isinstance(command, EndStream):
            assert command.stream not in self.ended_streams, "the stream has already ended"
            self.ended_streams.add(command.stream)
            self.streams.pop(command.stream, None)
        elif isinstance(command, Begin):
            self.check_recipients(command.nodes)
            addresses = [address for role in command.spec.values() for address in role]
            assert len(set(addresses)) == len(addresses), "two nodes have the same address"
        elif isinstance(command, Tell):
            self.check_recipients(command.nodes)
            if isinstance(command.message, (StateWanted, StartAgain)):  # a new process was not told yet
                self.wanted = getattr(command.message, "wanted", False)
        elif isinstance(command, AwaitEvaluators):
            self.awaited = command.wanted

    def check_recipients(self, nodes: Sequence[str]) -> None:
        """Check that a command has no recipient twice, no unknown node, and no node whose stream has ended."""
        assert len(set(nodes)) == len(nodes)
        for name in nodes:
            one = self.membership.members[name]
            assert one.stream is None or one.stream not in self.ended_streams

    def node(self, place: int) -> Member:
        members = list(self.membership.members.values())
        return members[place % len(members)]

    def can_send(self, one: Member) -> bool:
        return one.stream in self.streams and one.reservation is not None

    def send(self, one: Member, message: Any) -> None:
        if self.can_send(one):
            self.silent.pop(str(one.node), None)
            self.apply(MessageReceived(str(one.node), message))

    # --- events of the nodes, of their tasks and of Spark ---

    @rule(place=NODES, refused=st.integers(0, 9))
    def supervisor_connects(self, place: int, refused: int) -> None:
        one, self.count = self.node(place), self.count + 1
        name = str(one.node)
        message: Any = Refused(name, "h", "no TensorFlow")
        if refused:
            executor = str(self.count % 4)
            message = Reservation(name, "10.0.0.1", 1000 + self.count, executor, 0, self.count)
        self.streams[self.count] = name
        must_end = self.dismissed or one.told_to_end or one.reservation is not None
        self.apply(SupervisorConnected(self.count, message))
        assert (self.count in self.ended_streams) is (must_end or not refused or one.stream != self.count)

    @rule(place=NODES, generation=st.integers(0, 1))
    def supervisor_reserves_for_the_next_process(self, place: int, generation: int) -> None:
        one, self.count = self.node(place), self.count + 1
        if one.stream in self.streams:
            message = Reservation(
                str(one.node), "10.0.0.2", 5000 + self.count, str(self.count % 4), 0, one.supervisor[1],
                generation=self.membership.generation - generation,
            )  # fmt: skip
            before = one.reservation
            self.silent.pop(str(one.node), None)
            self.apply(MessageReceived(str(one.node), message))
            assert one.reservation is before or (before is None and generation == 0), "it is of an older generation"

    @precondition(lambda self: not self.dismissed)
    @rule()
    def missing_nodes_connect(self) -> None:
        for name in self.membership.missing:
            place = list(self.membership.members).index(name)
            if self.membership.members[name].stream is None:
                self.supervisor_connects(place, 1)
            else:
                self.supervisor_reserves_for_the_next_process(place, 0)
            self.process_starts(place)

    @rule()
    def coordinator_follows_serving_workers(self) -> None:
        chief = str(self.membership.plan.chief_node)
        for place, name in enumerate(self.membership.members):
            self.main_reports_its_role(place, Following if name == chief else Serving)

    @rule(place=NODES)
    def process_starts(self, place: int) -> None:
        one = self.node(place)
        self.send(one, NodeUp(str(one.node), 7, "2.21", "3.15", PLACE))
        self.send(one, MainStarted(str(one.node)))

    @rule(place=NODES, kind=st.sampled_from([Serving, Coordinating, Following]))
    def main_reports_its_role(self, place: int, kind: Any) -> None:
        one = self.node(place)
        if one.is_up:
            self.send(one, kind(str(one.node)))

    @rule(place=NODES, waits=st.booleans())
    def main_holds_a_saved_state(self, place: int, waits: bool) -> None:
        one, before = self.node(place), self.membership.changing
        if one.started:
            self.send(one, StateHeld(str(one.node), waits))
            assert waits or self.membership.changing == before, "a node that does not wait would repeat steps"

    @rule(place=NODES, going_on=st.booleans())
    def main_is_saving(self, place: int, going_on: bool) -> None:
        self.send(self.node(place), Saving(str(self.node(place).node), going_on))

    @rule(place=NODES, serves=st.booleans())
    def main_returns(self, place: int, serves: bool) -> None:
        one = self.node(place)
        if one.started:
            self.send(one, MainReturned(str(one.node), b"", serves))

    @rule(place=NODES, collateral=st.booleans())
    def main_raises(self, place: int, collateral: bool) -> None:
        one = self.node(place)
        if one.started:
            self.send(one, MainRaised(str(one.node), "ValueError", "Traceback", collateral))

    @rule(place=NODES)
    def process_is_killed(self, place: int) -> None:
        one = self.node(place)
        self.send(one, NodeEnded(str(one.node), None, "SIGKILL", ""))

    @rule(place=NODES, of=NODES, passes=st.integers(0, 3))
    def coordinator_reports_a_workers_progress(self, place: int, of: int, passes: int) -> None:
        chief = self.membership.members[str(self.membership.plan.chief_node)]
        worker = self.node(of)
        if worker.started:
            self.send(chief, WorkerThrough(str(worker.node), passes))

    @rule(place=NODES, began=st.booleans(), waits_for_rows=st.sampled_from([True, False, None]))
    def heartbeat_arrives(self, place: int, began: bool, waits_for_rows: bool | None) -> None:
        one = self.node(place)
        if self.can_send(one):
            self.apply(HeartbeatReceived(str(one.node), began, waits_for_rows))

    @rule(pick=NODES)
    def stream_breaks(self, pick: int) -> None:
        if self.streams:
            number = sorted(self.streams)[pick % len(self.streams)]
            del self.streams[number]
            self.apply(StreamEnded(number))

    @rule(place=NODES)
    def node_falls_silent(self, place: int) -> None:
        one = self.node(place)
        if one.stream is not None and not one.status.ended and not one.absent:
            self.silent[str(one.node)] = one.stream
        self.apply(HeartbeatTimedOut(str(one.node), 15.0))

    @rule(place=NODES, other=NODES)
    def two_nodes_do_not_reach_each_other(self, place: int, other: int) -> None:
        one, two = self.node(place), self.node(other)
        asked = [str(each.node) for each in self.membership.present.training if self.can_send(each)]
        if one is not two and {str(one.node), str(two.node)} <= set(asked) and not self.dismissed:
            self.apply(LinksCut(((str(one.node), str(two.node)),)))
            assert self.membership.failures

    @rule(place=NODES)
    def node_reaches_all_others_again(self, place: int) -> None:
        one = self.node(place)
        if one.cut_off and one.absent and self.can_send(one):
            self.apply(LinkRestored(str(one.node)))

    @rule(place=NODES, code=st.sampled_from([0, 1, -9]), known=st.booleans())
    def task_reports_that_its_supervisor_ended(self, place: int, code: int, known: bool) -> None:
        one = self.node(place)
        pid = one.supervisor[1] if known else 1_000_000
        self.apply(TaskReported(SupervisorEnded(str(one.node), code, "killed", pid)))

    @rule(place=NODES, wanted=st.booleans())
    def task_asks_whether_to_keep_its_slot(self, place: int, wanted: bool) -> None:
        one = self.node(place)
        use = self.apply(SlotAsked(HoldsSlot(str(one.node), one.supervisor[1]), wanted))
        assert use is not SlotUse.LEAVE or wanted
        assert use is not SlotUse.END or one.stream is None or one.stream not in self.streams

    @rule()
    def evaluators_time_out(self) -> None:
        if self.awaited:
            self.apply(EvaluatorsTimedOut(30.0))
            waited = [one for one in self.membership.present.members if one.node.role is Role.EVALUATOR]
            assert all(one.returned or one.serving for one in waited), "the cluster would wait forever"

    @rule(executors=st.frozensets(st.sampled_from("0123"), min_size=1, max_size=2))
    def executors_are_decommissioned(self, executors: frozenset[str]) -> None:
        self.apply(ExecutorsLeave(executors))

    @rule(place=NODES, hold=st.booleans())
    def node_is_submitted_to_spark(self, place: int, hold: bool) -> None:
        self.apply(Submitted((str(self.node(place).node),), hold))

    # --- decisions of the driver ---

    @precondition(lambda self: self.membership.failures and self.membership.restarts_left > 0 and not self.dismissed)
    @rule()
    def nodes_restart(self) -> None:
        generation, left = self.membership.generation, self.membership.restarts_left
        without = self.membership.to_leave_out(1)
        all_restart = self.apply(RestartAll("it was killed", without))
        assert not all_restart or not {str(one.node) for one in self.membership.present.members} & set(without)
        assert self.membership.restarts_left == left - 1
        assert self.membership.generation == generation + all_restart
        assert not self.membership.failures
        if all_restart:
            for name, stream in self.silent.items():
                assert self.membership.members[name].stream != stream, "the task of a silent node would wait forever"
            self.silent.clear()

    @precondition(lambda self: self.membership.changing and not self.dismissed and not self.membership.failures)
    @rule()
    def nodes_restart_to_join_or_leave(self) -> None:
        before = {str(one.node): one.stream for one in self.membership.present.training}
        self.apply(RestartWith(self.membership.changing))
        kept = [name for name, stream in before.items() if self.membership.members[name].stream == stream]
        assert kept or not any(before.values()), "a saved state is in the nodes' memory, so one of them must stay"

    @precondition(lambda self: not self.dismissed and self.membership.rendezvous > 1)
    @precondition(lambda self: self.membership.present.are_enough(1))
    @rule()
    def nodes_continue_without_missing_nodes(self) -> None:
        gone = self.apply(ContinueWithout())
        assert not {str(one.node) for one in self.membership.present.members} & set(gone)

    @precondition(lambda self: not self.dismissed and self.membership.restarts_left > 0)
    @rule(workers=st.integers(1, 4))
    def cluster_is_scaled(self, workers: int) -> None:
        self.apply(Scaled(replace(self.membership.plan, workers=workers)))

    @rule(late=st.booleans(), to_resubmit=st.booleans())
    def driver_reads_pending_nodes(self, late: bool, to_resubmit: bool) -> None:
        self.apply(PendingRead(late, to_resubmit))

    @precondition(lambda self: len(self.events) > 20)
    @rule()
    def driver_sends_stop(self) -> None:
        self.dismissed = True
        self.apply(StopSent(EndNode()))

    # --- invariants ---

    @invariant()
    def each_node_is_counted_once(self) -> None:
        present = [str(one.node) for one in self.membership.present.members]
        assert len(set(present)) == len(present)
        assert all(self.membership.members[name].absent is False for name in present)
        assert all(name == str(one.node) for name, one in self.membership.members.items())

    @invariant()
    def nodes_were_told_whether_a_state_is_wanted(self) -> None:
        assert self.wanted is (self.membership.awaits_state and not self.dismissed)

    @invariant()
    def no_member_uses_an_ended_stream(self) -> None:
        streams = [one.stream for one in self.membership.members.values() if one.stream is not None]
        assert len(set(streams)) == len(streams)
        assert not set(streams) & self.ended_streams
        assert set(streams) == self.streams.keys(), "the stream of a node that is no member must end"

    @invariant()
    def all_nodes_start_once_all_have_reserved(self) -> None:
        if self.membership.present.all_reserved:
            assert all(one.started for one in self.membership.present.members)

    @invariant()
    def every_started_node_has_reserved(self) -> None:
        assert all(one.reservation for one in self.membership.members.values() if one.started)

    def settle(self) -> None:
        """Check that the cluster trains, or has a failure, once no more faults occur."""
        if self.membership.failures and self.membership.restarts_left > 0:
            self.nodes_restart()
        self.missing_nodes_connect()
        for place, one in enumerate(self.membership.members.values()):
            if one.status is NodeStatus.STARTING:
                self.process_starts(place)
        at_work = [one for one in self.membership.present.members if not one.status.ended]
        waiting = [one for one in at_work if not one.is_up or one.ended is not None or one.stream is None]
        assert not waiting or self.membership.failures, f"the cluster would wait forever for {waiting}"

    def teardown(self) -> None:
        if not hasattr(self, "membership"):
            return
        if not self.dismissed:
            self.settle()
        assert state_of(replay(self.events)) == state_of(self.membership)
        journal = self.journal.events()
        assert len(journal) <= 8
        assert state_of(replay(journal)) == state_of(self.membership)
        assert state_of(replay(pickle.loads(pickle.dumps(journal)))) == state_of(self.membership)
        self.apply(StopSent(EndNode()))
        self.apply(AllDropped())
        assert self.membership.all_gone, "a node still has a stream after all supervisors were dropped"
        self.apply(Ended())
        assert all(one.status.ended for one in self.membership.members.values())


TestMembershipMachine = MembershipMachine.TestCase
TestMembershipMachine.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


@pytest.mark.parametrize("late", [False, True], ids=["before it is wanted again", "afterwards"])
def test_a_message_of_a_node_that_was_told_to_end_does_not_stand_for_the_one_that_replaces_it(late: bool) -> None:
    run = MembershipMachine()
    run.plan(workers=1, ps=0, chief=True, evaluator=False, may_fail=False, restarts=1)
    run.cluster_is_scaled(workers=2)
    run.missing_nodes_connect()
    run.cluster_is_scaled(workers=1)
    place = list(run.membership.members).index("worker:1")
    if not late:
        run.supervisor_reserves_for_the_next_process(place, 0)
    run.cluster_is_scaled(workers=2)
    if late:
        run.supervisor_reserves_for_the_next_process(place, 0)
    assert run.membership.members["worker:1"].reservation is None
    assert "worker:1" in run.membership.missing
    run.missing_nodes_connect()
    assert run.membership.members["worker:1"].reservation is not None
    run.teardown()


def test_every_status_can_be_reached_and_can_return_to_planned() -> None:
    assert set(TRANSITIONS) == set(NodeStatus)
    reached = {NodeStatus.PLANNED} | {status for after in TRANSITIONS.values() for status in after}
    assert reached == set(NodeStatus)
    assert all(NodeStatus.PLANNED in after for status, after in TRANSITIONS.items() if status is not NodeStatus.PLANNED)


@pytest.mark.parametrize("status", list(NodeStatus))
def test_a_status_changes_only_as_the_table_of_transitions_allows(status: NodeStatus) -> None:
    for after in NodeStatus:
        one = Member(Node.parse("worker:0"), status)
        one.become(after)
        assert one.status is (after if after in TRANSITIONS[status] else status)


def test_events_without_the_first_planned_event_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match="the first event must be Planned"):
        replay([Ended()])
    with pytest.raises(ValueError, match="there are no events to replay"):
        replay([])
