"""Whatever happens to a cluster's nodes, in whatever order: each counts once, and the cluster trains or ends."""

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
    """Everything that is known, to be compared."""
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
    )


class Lives(RuleBasedStateMachine):
    """Nodes that come, work, fall silent and die at any moment, several at once, and say things twice."""

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
        self.streams: dict[int, str] = {}  # that are open, and whose they are
        self.ended_streams: set[int] = set()
        self.count = 0
        self.dismissed = self.over = self.wanted = False
        self.awaited = False  # evaluators, since the training has ended
        self.silent: dict[str, int] = {}  # nodes that fell silent, and their streams then

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
            self.do(command)
        assert self.membership.present.fed_names == [str(one.node) for one in self.membership.present.fed]
        return answer

    def do(self, command: Any) -> None:
        if isinstance(command, EndStream):
            assert command.stream not in self.ended_streams, "it was ended before"
            self.ended_streams.add(command.stream)
            self.streams.pop(command.stream, None)
        elif isinstance(command, Begin):
            self.check_addressed(command.nodes)
            addresses = [address for role in command.spec.values() for address in role]
            assert len(set(addresses)) == len(addresses), "a node is counted twice"
        elif isinstance(command, Tell):
            self.check_addressed(command.nodes)
            if isinstance(command.message, (StateWanted, StartAgain)):  # the next process knows of nothing
                self.wanted = getattr(command.message, "wanted", False)
        elif isinstance(command, AwaitEvaluators):
            self.awaited = command.wanted

    def check_addressed(self, nodes: Sequence[str]) -> None:
        """No command goes to a node twice, to one that is not there, or to a supervisor that was given up."""
        assert len(set(nodes)) == len(nodes)
        for name in nodes:
            one = self.membership.members[name]
            assert one.stream is None or one.stream not in self.ended_streams

    def node(self, place: int) -> Member:
        members = list(self.membership.members.values())
        return members[place % len(members)]

    def is_heard(self, one: Member) -> bool:
        return one.stream in self.streams and one.reservation is not None

    def say(self, one: Member, message: Any) -> None:
        if self.is_heard(one):
            self.silent.pop(str(one.node), None)
            self.apply(MessageReceived(str(one.node), message))

    # --- what happens ---

    @rule(place=NODES, refused=st.integers(0, 9))
    def a_supervisor_comes(self, place: int, refused: int) -> None:
        one, self.count = self.node(place), self.count + 1
        name = str(one.node)
        message: Any = Refused(name, "h", "no TensorFlow")
        if refused:
            executor = str(self.count % 4)
            message = Reservation(name, "10.0.0.1", 1000 + self.count, executor, 0, self.count)
        self.streams[self.count] = name
        goes = self.dismissed or one.told_to_end or one.reservation is not None
        self.apply(SupervisorConnected(self.count, message))
        assert (self.count in self.ended_streams) is (goes or not refused or one.stream != self.count)

    @rule(place=NODES, generation=st.integers(0, 1))
    def a_supervisor_reserves_for_its_next_process(self, place: int, generation: int) -> None:
        one, self.count = self.node(place), self.count + 1
        if one.stream in self.streams:
            message = Reservation(
                str(one.node), "10.0.0.2", 5000 + self.count, str(self.count % 4), 0, one.supervisor[1],
                generation=self.membership.generation - generation,
            )  # fmt: skip
            before = one.reservation
            self.silent.pop(str(one.node), None)
            self.apply(MessageReceived(str(one.node), message))
            assert one.reservation is before or (before is None and generation == 0), "it is of the generation before"

    @precondition(lambda self: not self.dismissed)
    @rule()
    def all_come_that_are_missing(self) -> None:
        for name in self.membership.missing:
            place = list(self.membership.members).index(name)
            if self.membership.members[name].stream is None:
                self.a_supervisor_comes(place, 1)
            else:
                self.a_supervisor_reserves_for_its_next_process(place, 0)
            self.a_process_is_up(place)

    @rule()
    def a_coordinator_follows_workers_that_serve(self) -> None:
        chief = str(self.membership.plan.chief_node)
        for place, name in enumerate(self.membership.members):
            self.main_says_what_it_does(place, Following if name == chief else Serving)

    @rule(place=NODES)
    def a_process_is_up(self, place: int) -> None:
        one = self.node(place)
        self.say(one, NodeUp(str(one.node), 7, "2.21", "3.15", PLACE))
        self.say(one, MainStarted(str(one.node)))

    @rule(place=NODES, kind=st.sampled_from([Serving, Coordinating, Following]))
    def main_says_what_it_does(self, place: int, kind: Any) -> None:
        one = self.node(place)
        if one.started:
            self.say(one, kind(str(one.node)))

    @rule(place=NODES, waits=st.booleans())
    def main_has_saved_a_state(self, place: int, waits: bool) -> None:
        one, before = self.node(place), self.membership.changing
        if one.started:
            self.say(one, StateHeld(str(one.node), waits))
            assert waits or self.membership.changing == before, "steps would be done twice"

    @rule(place=NODES, going_on=st.booleans())
    def main_saves(self, place: int, going_on: bool) -> None:
        self.say(self.node(place), Saving(str(self.node(place).node), going_on))

    @rule(place=NODES, serves=st.booleans())
    def main_returns(self, place: int, serves: bool) -> None:
        one = self.node(place)
        if one.started:
            self.say(one, MainReturned(str(one.node), b"", serves))

    @rule(place=NODES, collateral=st.booleans())
    def main_raises(self, place: int, collateral: bool) -> None:
        one = self.node(place)
        if one.started:
            self.say(one, MainRaised(str(one.node), "ValueError", "Traceback", collateral))

    @rule(place=NODES)
    def a_process_is_killed(self, place: int) -> None:
        one = self.node(place)
        self.say(one, NodeEnded(str(one.node), None, "SIGKILL", ""))

    @rule(place=NODES, of=NODES, passes=st.integers(0, 3))
    def a_coordinator_tells_how_far_a_worker_is(self, place: int, of: int, passes: int) -> None:
        chief = self.membership.members[str(self.membership.plan.chief_node)]
        worker = self.node(of)
        if worker.started:
            self.say(chief, WorkerThrough(str(worker.node), passes))

    @rule(place=NODES, began=st.booleans(), waits_for_rows=st.sampled_from([True, False, None]))
    def a_heart_beats(self, place: int, began: bool, waits_for_rows: bool | None) -> None:
        one = self.node(place)
        if self.is_heard(one):
            self.apply(HeartbeatReceived(str(one.node), began, waits_for_rows))

    @rule(pick=NODES)
    def a_stream_breaks(self, pick: int) -> None:
        if self.streams:
            number = sorted(self.streams)[pick % len(self.streams)]
            del self.streams[number]
            self.apply(StreamEnded(number))

    @rule(place=NODES)
    def a_node_falls_silent(self, place: int) -> None:
        one = self.node(place)
        if one.stream is not None and not one.status.ended and not one.absent:
            self.silent[str(one.node)] = one.stream
        self.apply(HeartbeatTimedOut(str(one.node), 15.0))

    @rule(place=NODES, code=st.sampled_from([0, 1, -9]), known=st.booleans())
    def a_task_tells_that_its_supervisor_has_ended(self, place: int, code: int, known: bool) -> None:
        one = self.node(place)
        pid = one.supervisor[1] if known else 1_000_000
        self.apply(TaskReported(SupervisorEnded(str(one.node), code, "killed", pid)))

    @rule(place=NODES, wanted=st.booleans())
    def a_task_asks_what_its_slot_is_for(self, place: int, wanted: bool) -> None:
        one = self.node(place)
        use = self.apply(SlotAsked(HoldsSlot(str(one.node), one.supervisor[1]), wanted))
        assert use is not SlotUse.LEAVE or wanted
        assert use is not SlotUse.END or one.stream is None or one.stream not in self.streams

    @rule()
    def evaluators_take_too_long(self) -> None:
        if self.awaited:
            self.apply(EvaluatorsTimedOut(30.0))
            waited = [one for one in self.membership.present.members if one.node.role is Role.EVALUATOR]
            assert all(one.returned or one.serving for one in waited), "the cluster would wait for ever"

    @rule(executors=st.frozensets(st.sampled_from("0123"), min_size=1, max_size=2))
    def executors_are_about_to_end(self, executors: frozenset[str]) -> None:
        self.apply(ExecutorsLeave(executors))

    @rule(place=NODES, hold=st.booleans())
    def spark_is_asked_for_a_node(self, place: int, hold: bool) -> None:
        self.apply(Submitted((str(self.node(place).node),), hold))

    # --- what the driver decides ---

    @precondition(lambda self: self.membership.failures and self.membership.restarts_left > 0 and not self.dismissed)
    @rule()
    def they_come_again(self) -> None:
        generation, left = self.membership.generation, self.membership.restarts_left
        all_anew = self.apply(RestartAll("it was killed"))
        assert self.membership.restarts_left == left - 1
        assert self.membership.generation == generation + all_anew
        assert not self.membership.failures
        if all_anew:
            for name, stream in self.silent.items():
                assert self.membership.members[name].stream != stream, "its task would wait for it for ever"
            self.silent.clear()

    @precondition(lambda self: self.membership.changing and not self.dismissed and not self.membership.failures)
    @rule()
    def they_come_with_others(self) -> None:
        before = {str(one.node): one.stream for one in self.membership.present.training}
        self.apply(RestartWith(self.membership.changing))
        kept = [name for name, stream in before.items() if self.membership.members[name].stream == stream]
        assert kept or not any(before.values()), "a state is in the memory of nodes, of which one must stay"

    @precondition(lambda self: not self.dismissed and self.membership.rendezvous > 1)
    @precondition(lambda self: self.membership.present.are_enough(1))
    @rule()
    def they_go_on_without(self) -> None:
        gone = self.apply(ContinueWithout())
        assert not {str(one.node) for one in self.membership.present.members} & set(gone)

    @precondition(lambda self: not self.dismissed and self.membership.restarts_left > 0)
    @rule(workers=st.integers(1, 4))
    def it_is_scaled(self, workers: int) -> None:
        self.apply(Scaled(replace(self.membership.plan, workers=workers)))

    @rule(late=st.booleans(), to_resubmit=st.booleans())
    def the_news_are_taken_up(self, late: bool, to_resubmit: bool) -> None:
        self.apply(PendingRead(late, to_resubmit))

    @precondition(lambda self: len(self.events) > 20)
    @rule()
    def all_are_dismissed(self) -> None:
        self.dismissed = True
        self.apply(StopSent(EndNode()))

    # --- what holds ---

    @invariant()
    def each_node_counts_once(self) -> None:
        present = [str(one.node) for one in self.membership.present.members]
        assert len(set(present)) == len(present)
        assert all(self.membership.members[name].absent is False for name in present)
        assert all(name == str(one.node) for name, one in self.membership.members.items())

    @invariant()
    def the_nodes_know_whether_a_state_is_wanted(self) -> None:
        assert self.wanted is (self.membership.awaits_state and not self.dismissed)

    @invariant()
    def nobody_speaks_on_a_stream_that_has_ended(self) -> None:
        streams = [one.stream for one in self.membership.members.values() if one.stream is not None]
        assert len(set(streams)) == len(streams)
        assert not set(streams) & self.ended_streams
        assert set(streams) == self.streams.keys(), "whom nobody counts on is sent away"

    @invariant()
    def when_all_have_come_all_are_started(self) -> None:
        if self.membership.present.all_reserved:
            assert all(one.started for one in self.membership.present.members)

    @invariant()
    def a_node_that_was_started_has_reserved(self) -> None:
        assert all(one.reservation for one in self.membership.members.values() if one.started)

    def settle(self) -> None:
        """Let nothing more happen to the nodes: the cluster then trains, or knows why it does not."""
        if self.membership.failures and self.membership.restarts_left > 0:
            self.they_come_again()
        self.all_come_that_are_missing()
        for place, one in enumerate(self.membership.members.values()):
            if one.status is NodeStatus.STARTING:
                self.a_process_is_up(place)
        at_work = [one for one in self.membership.present.members if not one.status.ended]
        waiting = [one for one in at_work if not one.is_up or one.ended is not None or one.stream is None]
        assert not waiting or self.membership.failures, f"{waiting} would be waited for without end"

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
        assert self.membership.all_gone, "every supervisor was done without"
        self.apply(Ended())
        assert all(one.status.ended for one in self.membership.members.values())


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


def test_every_status_can_be_reached_and_left_but_for_a_stop_that_is_final_until_it_is_wanted_again() -> None:
    assert set(TRANSITIONS) == set(NodeStatus)
    reached = {NodeStatus.PLANNED} | {status for after in TRANSITIONS.values() for status in after}
    assert reached == set(NodeStatus)
    assert all(NodeStatus.PLANNED in after for status, after in TRANSITIONS.items() if status is not NodeStatus.PLANNED)


@pytest.mark.parametrize("status", list(NodeStatus))
def test_a_status_changes_as_the_table_says_and_not_otherwise(status: NodeStatus) -> None:
    for after in NodeStatus:
        one = Member(Node.parse("worker:0"), status)
        one.become(after)
        assert one.status is (after if after in TRANSITIONS[status] else status)


def test_events_of_which_the_first_are_forgotten_are_not_replayed() -> None:
    with pytest.raises(ValueError, match="the first event must be Planned"):
        replay([Ended()])
    with pytest.raises(ValueError, match="there are no events to replay"):
        replay([])
