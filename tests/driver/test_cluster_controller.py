"""The cluster controller: how it handles reservations, failures, silence and reports of nodes.

The nodes are clients of a real door.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tfos_nb.driver import cluster_controller as controller_module
from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.errors import NodeFailed, PlanError
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import Door, DoorClient, DoorStream
from tfos_nb.runtime.control.lifecycle import (
    Coordinating,
    EndNode,
    FeedPlace,
    MainRaised,
    MainReturned,
    MainStarted,
    NodeEnded,
    NodeUp,
    Refused,
    Reservation,
    Saving,
    Start,
    Stop,
)
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.control.reports import FeedStatus, Heartbeat, LogLines, StepReport
from tfos_nb.runtime.feed.messages import PassDone, WherePlaces, WorkerThrough
from tfos_nb.runtime.node.spark_task import SupervisorEnded
from tfos_nb.runtime.node.stacks import AskStacks, StacksTaken
from tfos_nb.state.cluster_state import NodeState, NodeStatus

SECONDS = 20.0


class Cluster:
    """A controller behind a real door, a clock that a test sets, and the streams of its nodes."""

    def __init__(self, plan: ClusterPlan, clock: SimpleNamespace) -> None:
        self.controller = ClusterController(plan)
        self.clock = clock
        self.door = Door(self.controller, host="127.0.0.1", bind="127.0.0.1")
        self.client = DoorClient(self.door.open())
        self.streams: dict[str, DoorStream] = {}

    def reserve(self, *nodes: str, port: int = 1000) -> None:
        for number, node in enumerate(nodes):
            stream = self.streams[node] = self.client.attend()
            stream.send(Reservation(node, "10.0.0.1", port + number, str(number), 0, 77, ()))
            self.until(lambda node=node: node not in self.controller.missing)

    def say(self, message: Any, by: str = "") -> None:
        """Send a message as its node, or as ``by``, and wait until the controller has received it."""
        before = self.clock.said
        self.streams[by or message.node].send(message)
        self.until(lambda: self.clock.said > before)

    def bring_up(self, *nodes: str) -> None:
        self.reserve(*nodes)
        for node in nodes:
            self.say(NodeUp(node, 7, "2.21", "3.15", FeedPlace("/s", "h", 1, b""), "a note"))
            self.say(MainStarted(node))

    def until(self, reached: Callable[[], object]) -> None:
        with self.controller.changed:
            assert self.controller.changed.wait_for(reached, SECONDS)

    def state(self, node: str) -> NodeState:
        return next(state for state in self.controller.snapshot() if state.node == node)

    def close(self) -> None:
        self.door.close()
        for stream in self.streams.values():
            stream.end()
        self.client.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the controller's clock, and count the messages that the controller receives."""
    clock = SimpleNamespace(now=1000.0, said=0)
    clock.monotonic = lambda: clock.now
    for module in (controller_module,):
        monkeypatch.setattr(module, "time", clock)
    received = ClusterController.received

    def counted(self: ClusterController, link: Any, message: Any) -> None:
        with self.changed:
            received(self, link, message)
            clock.said += 1
            self.changed.notify_all()

    monkeypatch.setattr(ClusterController, "received", counted)
    return clock


@pytest.fixture
def make(clock: SimpleNamespace) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def build(workers: int = 2, **options: Any) -> Cluster:
        made.append(Cluster(ClusterPlan(workers, **options), clock))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


def beat(node: str, rows: int | None = None, *reports: StepReport, waits_for_rows: bool = False) -> Heartbeat:
    feed = None if rows is None else FeedStatus(rows, rows, 0, waits_for_rows)
    return Heartbeat(node, 50.0, 1 << 30, reports, feed)


def ended(node: str, code: int | None = 1, signal: str | None = None, memory: int | None = None) -> NodeEnded:
    return NodeEnded(node, code, signal, "the last lines", memory)


# --- start ----------------------------------------------------------------------------------------


def test_no_node_starts_before_all_have_reserved(make: Callable[..., Cluster]) -> None:
    cluster = make(2, ps=1)
    cluster.reserve("worker:1", "ps:0", "worker:0")
    assert cluster.controller.missing == ("chief:0",)
    assert cluster.state("worker:1").status is NodeStatus.RESERVED
    cluster.reserve("chief:0", port=2000)
    spec = {"chief": ["10.0.0.1:2000"], "worker": ["10.0.0.1:1002", "10.0.0.1:1000"], "ps": ["10.0.0.1:1001"]}
    assert [next(iter(cluster.streams[node])) for node in ("worker:0", "chief:0", "ps:0")] == [Start(spec)] * 3
    assert {state.status for state in cluster.controller.snapshot()} == {NodeStatus.STARTING}


def test_all_are_up_when_every_main_has_been_called(make: Callable[..., Cluster]) -> None:
    cluster = make(2, input_mode="tensorflow")
    cluster.bring_up("worker:0", "worker:1")
    assert cluster.controller.all_up
    assert cluster.state("worker:0") == NodeState(
        "worker:0", NodeStatus.TRAINING, "10.0.0.1", "0", 7, heartbeat_age=0.0
    )


def test_not_all_are_up_while_one_has_not_called_main(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.reserve("worker:0", "worker:1")
    for node in ("worker:0", "worker:1"):
        cluster.say(NodeUp(node, 7, "2", "3", None))
    cluster.say(MainStarted("worker:0"))
    assert not cluster.controller.all_up
    assert cluster.state("worker:0").status is NodeStatus.TRAINING


def test_a_second_reservation_of_a_node_is_refused(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.reserve("worker:0")
    second = cluster.client.attend()
    second.send(Reservation("worker:0", "10.0.0.2", 9, "9", 1, 78))
    assert list(second) == []
    second.end()
    assert cluster.state("worker:0").host == "10.0.0.1"
    assert cluster.controller.failures == []
    cluster.reserve("worker:1")
    assert next(iter(cluster.streams["worker:0"])).cluster_spec["worker"][0] == "10.0.0.1:1000"


def test_a_node_that_is_not_in_the_plan_is_refused(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    stranger = cluster.client.attend()
    stranger.send(Reservation("worker:7", "10.0.0.2", 9, "9", 0, 78))
    assert list(stranger) == []
    stranger.end()
    assert cluster.controller.missing == ("worker:0",)
    assert cluster.controller.failures == []


@pytest.mark.parametrize(
    "first", [NodeUp("worker:0", 7, "2", "3", None), beat("worker:0"), MainStarted("worker:0")], ids=str
)
def test_a_stream_that_does_not_begin_with_a_reservation_is_ended(make: Callable[..., Cluster], first: Any) -> None:
    cluster = make(1)
    stranger = cluster.client.attend()
    stranger.send(first)
    assert list(stranger) == []
    stranger.end()
    assert cluster.controller.failures == []
    cluster.reserve("worker:0")  # the planned node is still accepted
    assert cluster.state("worker:0").status is NodeStatus.STARTING


@pytest.mark.parametrize(
    "message",
    [
        NodeUp("worker:0", 9, "2", "3", FeedPlace("/elsewhere", "h", 1, b"")),
        NodeUp("worker:9", 9, "2", "3", FeedPlace("/elsewhere", "h", 1, b"")),
        PassDone("worker:0", 1, 1, 5, enough=True),
        WorkerThrough("worker:0", 3),
    ],
    ids=str,
)
def test_a_node_that_sends_a_message_about_another_node_fails(make: Callable[..., Cluster], message: Any) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.controller.feeds.begin(1, False, 1, 1)
    cluster.streams["worker:1"].send(message)
    cluster.until(lambda: cluster.controller.failures)
    assert [failure.node for failure in cluster.controller.failures] == ["worker:1"]
    assert cluster.state("worker:0").status is NodeStatus.TRAINING
    places = cluster.client.ask(WherePlaces(1, ("worker:0", "worker:1"))).places
    assert {place.socket for place in places.values()} == {"/s"}
    assert cluster.controller.feeds.current is not None
    assert cluster.controller.feeds.current.passes_done == {}


def test_a_refusal_is_ignored_if_the_node_has_already_reserved(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.reserve("worker:0")
    second = cluster.client.attend()
    second.send(Refused("worker:0", "10.0.0.2", "tensorflow cannot be imported"))
    assert list(second) == []
    second.end()
    assert cluster.controller.failures == []
    assert cluster.state("worker:0").status is NodeStatus.RESERVED


def test_an_executor_that_cannot_run_a_node_says_why(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    stream = cluster.streams["worker:0"] = cluster.client.attend()
    stream.send(Refused("worker:0", "10.0.0.1", "tensorflow cannot be imported"))
    assert list(stream) == []
    [failure] = cluster.controller.failures
    assert isinstance(failure.error, PlanError)
    assert str(failure.error) == "worker:0 on 10.0.0.1: tensorflow cannot be imported"


def test_a_supervisor_that_ends_before_it_reserves_is_a_failure_with_its_output(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    cluster.client.ask(SupervisorEnded("worker:0", 1, "ImportError: no module\n"))
    [failure] = cluster.controller.failures
    assert "its supervisor ended with code 1 before it had reserved" in str(failure.error)
    assert "ImportError: no module" in str(failure.error)
    assert "ImportError: no module" in cluster.controller.logs("worker:0")


# --- failures -------------------------------------------------------------------------------------


def test_an_exception_is_a_failure_with_its_host_and_traceback(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.say(MainRaised("worker:1", "ValueError: no", "Traceback …\nValueError: no"))
    [failure] = cluster.controller.failures
    assert (failure.node, failure.collateral) == ("worker:1", False)
    assert isinstance(failure.error, NodeFailed)
    assert (failure.error.host, failure.error.executor) == ("10.0.0.1", "1")
    assert str(failure.error) == "worker:1 on 10.0.0.1 (executor 1): ValueError: no\nTraceback …\nValueError: no"
    assert cluster.state("worker:1").status is NodeStatus.FAILED


@pytest.mark.parametrize("first", ["its own", "a peer's"])
def test_a_failure_that_a_peer_caused_is_marked_in_either_order(make: Callable[..., Cluster], first: str) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    messages = [
        MainRaised("worker:1", "ValueError: no", "…"),
        MainRaised("worker:0", "UnavailableError: Socket closed", "…", collateral=True),
    ]
    for message in messages if first == "its own" else reversed(messages):
        cluster.say(message)
    assert [failure.node for failure in cluster.controller.failures if not failure.collateral] == ["worker:1"]
    assert [failure.node for failure in cluster.controller.failures if failure.collateral] == ["worker:0"]
    assert cluster.controller.failures[0].node == ("worker:1" if first == "its own" else "worker:0")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (ended("worker:0", 3), "exited with code 3"),
        (ended("worker:0", None, "SIGSEGV"), "killed by SIGSEGV"),
        (ended("worker:0", None, "SIGKILL", 3 << 29), "killed by SIGKILL at 1.5 GiB; if nobody did.*out of memory"),
        (ended("worker:0", None, "SIGKILL"), "killed by SIGKILL; if nobody did"),
    ],
    ids=str,
)
def test_a_process_that_ends_is_a_failure_with_its_code_or_signal(
    make: Callable[..., Cluster], message: NodeEnded, words: str
) -> None:
    cluster = make(1)
    cluster.bring_up("worker:0")
    cluster.say(message)
    [failure] = cluster.controller.failures
    assert isinstance(failure.error, NodeFailed)
    assert (failure.error.exit_code, failure.error.signal) == (message.exit_code, message.signal)
    with pytest.raises(NodeFailed, match=rf"(?s){words}.*The last lines that worker:0 wrote:\nthe last lines"):
        raise failure.error


def test_a_process_that_ends_after_its_exception_is_one_failure(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    cluster.bring_up("worker:0")
    cluster.say(MainRaised("worker:0", "ValueError: no", "…"))
    cluster.say(ended("worker:0", 1))
    cluster.streams["worker:0"].end()
    cluster.until(lambda: cluster.controller.all_gone)
    assert len(cluster.controller.failures) == 1
    assert cluster.state("worker:0").status is NodeStatus.FAILED


def test_a_process_that_dies_after_main_has_returned_says_so(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    cluster.bring_up("worker:0")
    cluster.say(MainReturned("worker:0", wire.encode(1)))
    cluster.say(ended("worker:0", None, "SIGSEGV"))
    [failure] = cluster.controller.failures
    assert "killed by SIGSEGV after main had returned" in str(failure.error)


@pytest.mark.parametrize("first", ["the return", "the wait"])
def test_a_main_that_returns_without_a_server_fails_if_the_chief_waits_for_one(
    make: Callable[..., Cluster], first: str
) -> None:
    cluster = make(1, ps=1)
    cluster.bring_up("chief:0", "worker:0", "ps:0")
    cluster.say(MainReturned("worker:0", wire.encode(None), serves=True))
    waits, returns = Coordinating("chief:0"), MainReturned("ps:0", wire.encode(None), serves=False)
    for message in (returns, waits) if first == "the return" else (waits, returns):
        assert cluster.controller.failures == []
        cluster.say(message)
    [failure] = cluster.controller.failures
    assert failure.node == "ps:0"
    assert "left no TensorFlow server, for which chief:0 waits: begin main with `if not ctx" in str(failure.error)


def test_a_failure_that_the_driver_finds_names_the_node_and_its_host(make: Callable[..., Cluster]) -> None:
    cluster = make()
    cluster.bring_up("worker:0", "worker:1")
    cluster.controller.fail("worker:1", "waits for ever")
    (failure,) = cluster.controller.failures
    assert str(failure.error) == "worker:1 on 10.0.0.1 (executor 1): waits for ever"
    assert not failure.lost, "with restarts= it would happen again"


def test_a_lost_stream_is_a_lost_node(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.streams["worker:1"].end()
    cluster.until(lambda: cluster.controller.failures)
    assert cluster.state("worker:1").status is NodeStatus.LOST
    assert "worker:1 on 10.0.0.1 (executor 1): its supervisor is gone" in str(cluster.controller.failures[0].error)


def test_a_pause_of_the_driver_does_not_count_as_silence_of_its_nodes(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.clock.now += 100
    cluster.controller.ticked(98.0)
    assert cluster.controller.failures == []
    cluster.clock.now += 14
    cluster.controller.ticked()
    assert len(cluster.controller.failures) == 2, "they have not been heard of since"


def test_a_silent_node_is_lost_and_one_that_sends_heartbeats_is_not(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.clock.now += 14
    cluster.say(beat("worker:0"))
    cluster.controller.ticked()
    assert cluster.controller.failures == []
    assert (cluster.state("worker:0").heartbeat_age, cluster.state("worker:1").heartbeat_age) == (0, 14)
    cluster.clock.now += 2
    cluster.controller.ticked()
    cluster.controller.ticked()
    assert [failure.node for failure in cluster.controller.failures] == ["worker:1"]
    assert "no heartbeat for 15 s" in str(cluster.controller.failures[0].error)
    statuses = [cluster.state(node).status for node in ("worker:0", "worker:1")]
    assert statuses == [NodeStatus.TRAINING, NodeStatus.LOST]


def test_the_end_of_a_node_after_a_stop_is_no_failure(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.say(MainReturned("worker:0", wire.encode({"loss": 0.5})))
    cluster.controller.dismiss(Stop("the user", 1.0))
    heard = iter(cluster.streams["worker:1"])
    assert [type(next(heard)), next(heard)] == [Start, Stop("the user", 1.0)]
    cluster.say(ended("worker:0", 0))
    cluster.say(ended("worker:1", None, "SIGKILL"))
    for stream in cluster.streams.values():
        stream.end()
    cluster.until(lambda: cluster.controller.all_gone)
    assert cluster.controller.failures == []
    assert [state.status for state in cluster.controller.snapshot()] == [NodeStatus.DONE, NodeStatus.STOPPED]


def test_a_stop_does_not_wait_for_a_silent_node_that_was_saving(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.say(Saving("worker:0", True))
    cluster.controller.dismiss(Stop("the user", 1.0))
    cluster.controller.ticked()
    assert cluster.controller.saving
    cluster.clock.now += 100.0
    cluster.controller.ticked()
    assert not cluster.controller.saving
    assert cluster.controller.failures == []


# --- results, progress and logs -------------------------------------------------------------------


def test_results_are_kept_as_they_were_returned(make: Callable[..., Cluster]) -> None:
    cluster = make(2, ps=1)
    cluster.bring_up("chief:0", "worker:0", "worker:1", "ps:0")
    assert not cluster.controller.all_returned
    for node in ("chief:0", "worker:0", "worker:1"):  # a parameter server's main need not return
        cluster.say(MainReturned(node, wire.encode(node)))
    assert cluster.controller.all_returned
    assert {name: wire.decode(data) for name, data in cluster.controller.results().items()} == {
        "chief:0": "chief:0", "worker:0": "worker:0", "worker:1": "worker:1",
    }  # fmt: skip
    assert cluster.controller.feeds.is_through("worker:0", call=1)
    assert not cluster.controller.feeds.is_through("ps:0", call=1)


def test_the_state_has_the_newest_report_and_the_history_has_each_epochs_end(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    end_of_one = StepReport(1, 3, 10, 10, {"loss": 0.5}, epoch_end=True)
    cluster.say(beat("worker:0", 100, end_of_one, StepReport(2, 3, 4, 10, {"loss": 0.4})))
    state = cluster.state("worker:0")
    assert (state.status, state.epoch, state.epochs, state.step, state.loss) == (NodeStatus.TRAINING, 2, 3, 4, 0.4)
    assert (state.rows, state.cpu_percent, state.memory_bytes) == (100, 50.0, 1 << 30)
    assert dict(cluster.controller.history) == {"loss": [0.5]}


def test_a_loss_that_becomes_nan_on_one_worker_is_in_its_log_once(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    for step in (1, 2, 3):
        cluster.say(beat("worker:0", step, StepReport(2, 3, step, 10, {"loss": 0.5})))
        cluster.say(beat("worker:1", step, StepReport(2, 3, step, 10, {"loss": float("nan") if step > 1 else 0.5})))
    assert cluster.controller.logs("worker:1") == ["tfos_nb: the loss became NaN in epoch 2; that of worker:0 is 0.5"]
    assert cluster.controller.logs("worker:0") == []


def test_rows_per_second_are_measured_over_the_last_seconds(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    cluster.bring_up("worker:0")
    rates = []
    for rows in (0, 100, 200, 300, 400, 400, 400, 400, 400):
        cluster.say(beat("worker:0", rows))
        rates.append(cluster.state("worker:0").rows_per_second)
        cluster.clock.now += 1
    assert rates[0] is None
    assert rates[1:5] == [100.0] * 4
    assert rates[5:7] == sorted(rates[5:7], reverse=True)  # the rate falls
    assert rates[-1] == 0.0
    cluster.say(MainReturned("worker:0", wire.encode(None)))
    assert cluster.state("worker:0").rows_per_second is None


def test_a_node_that_reports_a_step_is_training_even_without_rows(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    cluster.bring_up("worker:0")
    cluster.say(beat("worker:0", 0, waits_for_rows=True))
    assert cluster.state("worker:0").status is NodeStatus.FEEDING
    cluster.say(beat("worker:0", 0, StepReport(step=1), waits_for_rows=True))
    assert cluster.state("worker:0").status is NodeStatus.TRAINING
    cluster.say(beat("worker:0", 0, waits_for_rows=True))
    assert cluster.state("worker:0").status is NodeStatus.TRAINING


def test_a_node_is_feeding_only_while_its_main_waits_for_rows(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    cluster.bring_up("worker:0")
    for waits_for_rows, status in (
        (False, NodeStatus.TRAINING),
        (True, NodeStatus.FEEDING),
        (False, NodeStatus.TRAINING),
    ):
        cluster.say(beat("worker:0", 0, waits_for_rows=waits_for_rows))
        assert cluster.state("worker:0").status is status


def test_logs_are_kept_by_node(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.say(LogLines("worker:0", ("one", "two")))
    cluster.say(LogLines("worker:0", ("three",)))
    assert cluster.controller.logs("worker:0") == ["one", "two", "three"]
    assert cluster.controller.logs("worker:1") == []
    with pytest.raises(KeyError):
        cluster.controller.logs("worker:9")


def test_the_log_of_all_nodes_is_in_order_of_arrival(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.say(LogLines("worker:1", ("one", "two")))
    cluster.say(LogLines("worker:0", ("three",)))
    cluster.say(LogLines("worker:1", ("four",)))
    tail = cluster.controller.log_tail(3)
    assert [(line.node, line.text) for line in tail] == [
        ("worker:1", "two"),
        ("worker:0", "three"),
        ("worker:1", "four"),
    ]
    assert [line.time for line in tail] == sorted(line.time for line in tail)
    assert abs(tail[0].time - time.time()) < 3600  # seconds since 1970, not the monotonic clock
    lines = cluster.controller.log_lines("worker:1")
    assert [line.text for line in lines] == cluster.controller.logs("worker:1") == ["one", "two", "four"]
    assert cluster.controller.log_lines("worker:1", limit=1) == lines[-1:]
    assert cluster.controller.log_lines("worker:1", after=lines[0].time, limit=1) == lines[1:2]


def test_a_report_of_step_0_does_not_count_as_training(make: Callable[..., Cluster]) -> None:
    cluster = make(1)
    cluster.bring_up("worker:0")
    cluster.say(beat("worker:0", 0, StepReport(step=0, steps=9, phase="evaluate"), waits_for_rows=True))
    assert cluster.state("worker:0").status is NodeStatus.FEEDING


def test_a_node_with_unread_rows_is_named(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.say(beat("worker:0", 5, waits_for_rows=True))
    cluster.say(beat("worker:1", 5, waits_for_rows=False))
    assert cluster.controller.nodes_with_rows() == ("worker:1",)


@pytest.mark.parametrize("first", ["silent", "done"])
def test_a_node_with_unread_rows_is_named_beside_a_silent_or_finished_one(
    make: Callable[..., Cluster], first: str
) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    if first == "done":
        cluster.say(beat("worker:0", 5, waits_for_rows=False))
        cluster.say(MainReturned("worker:0", wire.encode(None)))
    cluster.say(beat("worker:1", 5, waits_for_rows=False))
    assert cluster.controller.nodes_with_rows() == ("worker:1",)


def test_a_program_that_never_reports_progress_is_not_watched_for_hangs(make: Callable[..., Cluster]) -> None:
    cluster = make(2, input_mode="tensorflow")
    cluster.bring_up("worker:0", "worker:1")
    for node in ("worker:0", "worker:1"):
        cluster.say(beat(node))
    assert cluster.controller.marks() is None
    cluster.say(beat("worker:1", None, StepReport(step=1)))
    assert cluster.controller.marks() == {"worker:0": (0, 0, 1), "worker:1": (1, 0, 1)}


def test_rows_of_a_validation_move_a_node(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    for node in ("worker:0", "worker:1"):
        cluster.say(beat(node, 5))
    before = cluster.controller.progress
    cluster.say(Heartbeat("worker:1", 1.0, 1, (), FeedStatus(5, 5, validated=32)))
    assert cluster.controller.marks() == {"worker:0": (0, 5, 1), "worker:1": (0, 37, 1)}
    assert cluster.controller.progress == (before[0] + 32, before[1])


def test_nodes_are_watched_before_their_first_step_while_rows_are_fed(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    cluster.say(beat("worker:0", 0))
    cluster.say(beat("worker:1", 0, waits_for_rows=True))
    assert cluster.state("worker:1").status is NodeStatus.FEEDING
    assert cluster.controller.marks() is None, "train was not called"
    cluster.controller.feeds.begin(1, False, 1, 1)
    assert cluster.controller.marks() == {"worker:0": (0, 0, 1), "worker:1": (0, 0, 1)}
    assert cluster.controller.starts
    cluster.say(beat("worker:0", 8))
    cluster.say(beat("worker:1", 8))
    assert not cluster.controller.starts


def test_the_start_of_a_coordinators_workers_is_not_watched(make: Callable[..., Cluster]) -> None:
    assert not make(2, ps=1).controller.starts


def test_a_node_is_expected_to_return_once_another_one_has(make: Callable[..., Cluster]) -> None:
    cluster = make(2, input_mode="tensorflow")
    cluster.bring_up("worker:0", "worker:1")
    cluster.say(MainReturned("worker:0", wire.encode(None)))
    assert cluster.controller.marks() == {"worker:1": (0, 0, 1)}


def test_two_who_ask_for_stacks_at_once_both_have_their_answers(make: Callable[..., Cluster]) -> None:
    """The watch for slow workers asks one of them, while a page has asked all."""
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    taken: dict[str, dict[str, StacksTaken]] = {}

    def ask(who: str, nodes: list[str]) -> None:
        taken[who] = cluster.controller.stacks(SECONDS, nodes)

    asked = [
        threading.Thread(target=ask, args=given)
        for given in (("page", ["worker:0", "worker:1"]), ("watch", ["worker:1"]))
    ]
    for number, thread in enumerate(asked, 1):
        thread.start()
        assert next(one for one in cluster.streams["worker:1"] if isinstance(one, AskStacks)) == AskStacks(number)
    cluster.say(StacksTaken("worker:1", 2, "of the watch"))
    cluster.say(StacksTaken("worker:1", 1, "of the page"))
    cluster.say(StacksTaken("worker:0", 1, "of the page"))
    for thread in asked:
        thread.join(SECONDS)
    assert {who: [one.text for one in answers.values()] for who, answers in taken.items()} == {
        "watch": ["of the watch"],
        "page": ["of the page", "of the page"],
    }


def test_the_stacks_of_a_node_that_goes_are_not_waited_for(make: Callable[..., Cluster]) -> None:
    cluster = make(2)
    cluster.bring_up("worker:0", "worker:1")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(cluster.controller.stacks, 3 * SECONDS)
        for node in ("worker:0", "worker:1"):
            assert next(one for one in cluster.streams[node] if isinstance(one, AskStacks)) == AskStacks(1)
        cluster.say(StacksTaken("worker:0", 1, "its stacks"))
        cluster.streams["worker:1"].end()
        assert asked.result(SECONDS).keys() == {"worker:0"}


def test_many_nodes_may_send_at_once(make: Callable[..., Cluster]) -> None:
    names = [f"worker:{index}" for index in range(20)]
    cluster = make(20)
    cluster.reserve(*names)
    threads = [
        threading.Thread(
            target=lambda name=name: [cluster.streams[name].send(LogLines(name, (str(n),))) for n in range(20)]
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    cluster.until(lambda: cluster.clock.said == 400)
    assert all(cluster.controller.logs(name) == [str(number) for number in range(20)] for name in names)
    cluster.controller.send(EndNode())
    for thread in threads:
        thread.join(SECONDS)


def test_an_epoch_reported_before_a_restart_is_in_the_history_once(
    make: Callable[..., Cluster],
) -> None:
    cluster = make(2)
    cluster.controller.membership.restarts_left = 1
    cluster.bring_up("worker:0", "worker:1")
    cluster.say(beat("worker:0", None, end_of(1, 0.9), end_of(2, 0.8)))
    cluster.say(ended("worker:1", None, "SIGKILL"))
    cluster.controller.restart_all("it was killed")
    cluster.say(beat("worker:0", None, end_of(3, 0.7)))  # the supervisor found this report when it ended the process
    assert cluster.controller.history["loss"] == [0.9, 0.8, 0.7]
    for number, node in enumerate(("worker:0", "worker:1")):
        cluster.say(Reservation(node, "h", 5000 + number, "0", 0, 77, (), 2))
    cluster.say(beat("worker:0", None, end_of(3, 0.6)))  # epoch 3 again, from the state saved after epoch 2
    assert cluster.controller.history["loss"] == [0.9, 0.8, 0.6]


def end_of(epoch: int, loss: float) -> StepReport:
    return StepReport(epoch=epoch, metrics={"loss": loss}, epoch_end=True)
