"""Calls over the socket of a detached cluster's process: values, errors, and who may stop it."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import tfos_nb
from tests.waiting import until
from tfos_nb.detached import places
from tfos_nb.detached.attached import AttachedCluster, packed_reader
from tfos_nb.detached.messages import (
    Answer,
    AnswerWanted,
    Call,
    CallBegun,
    HistoryParts,
    Raised,
    error_of,
    raised,
    reports_of,
)
from tfos_nb.detached.on_executor import NotReached, RemoteCalls, door_in_place, door_of
from tfos_nb.detached.places import DetachedPlace
from tfos_nb.detached.server import CallDesk, CallServer, StopRequests
from tfos_nb.errors import ClusterClosed, FeedFailed, NodeFailed, PlanError, RendezvousTimeout
from tfos_nb.records.run import this_process
from tfos_nb.runtime.code.payload import unpack
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import Door, DoorClient
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.control.reports import StepReport
from tfos_nb.state.cluster_state import (
    ClusterState,
    ClusterStatus,
    FeedProgress,
    GpuUse,
    LogLine,
    NodeState,
    NodeStatus,
)
from tfos_nb.state.history import History
from tfos_nb.state.training_curve import Point
from tfos_nb.widgets.cluster_display import cluster_bundle

STATE = ClusterState(
    "mnist",
    "abcdef000001",
    status=ClusterStatus.RUNNING,
    nodes=(
        NodeState("worker:0", NodeStatus.TRAINING, gpu_use=(GpuUse("A", 3.0),), curves={"loss": (1.0, 2)}, epoch=2),
        NodeState("worker:1"),
    ),
    feed=FeedProgress(1, 2, 30),
    log=(LogLine(1.5, "worker:0", "x"),),
    points=(Point(1, 2, {"loss": 0.5}),),
)


ALREADY = "mnist is stopping already; ask again to end it at once"


@pytest.mark.parametrize("value", [STATE, {"worker:0": np.arange(3)}])
def test_states_and_results_travel_whole(value: Any) -> None:
    np.testing.assert_equal(wire.decode(wire.encode(value)), value)


def test_a_status_that_does_not_exist_is_refused() -> None:
    data = wire.encode(NodeState("worker:0")).replace(b"PLANNED", b"PLANNEX")
    with pytest.raises(ValueError, match="PLANNEX"):
        wire.decode(data)


def test_a_history_travels_whole() -> None:
    made = History("worker:0", 2)
    for step in range(1, 4):
        made.record("worker:0", StepReport(epoch=1, step=step, metrics={"loss": 1 / step}, epoch_end=step == 3))
        made.record("worker:1", StepReport(epoch=1, step=step, metrics={"loss": 2 / step}))
    made.begin_anew()
    parts = wire.expect(HistoryParts, wire.encode(HistoryParts.of(made)))
    again = parts.history(lambda node: wire.decode(wire.encode(reports_of(made, node))))
    assert again.epochs == made.epochs
    assert again.points() == made.points()
    assert again.points("worker:1") == made.points("worker:1")
    assert again.steps() == made.steps()


@pytest.mark.parametrize(
    "error",
    [
        NodeFailed(
            "died", node="worker:1", host="h", executor="3", exit_code=1, signal="SIGKILL", log_tail="x", others=2
        ),
        NodeFailed("ValueError: no", node="worker:0", remote_traceback="Traceback …\nValueError: no"),
        RendezvousTimeout("1 of 2 nodes", ("worker:1",)),
        FeedFailed("column 'x' has a null"),
        PlanError("no"),
        ClusterClosed("over"),
        TimeoutError("still runs"),
        ValueError("no node"),
    ],
)
def test_an_error_is_raised_as_it_was(error: Exception) -> None:
    again = error_of(wire.decode(wire.encode(raised(error))))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_an_unknown_error_keeps_its_name() -> None:
    again = error_of(raised(ZeroDivisionError("by zero")))
    assert (type(again), str(again)) == (RuntimeError, "ZeroDivisionError: by zero")


class Stops:
    """A cluster's answers to requests to stop: the second one ends it at once."""

    def __init__(self) -> None:
        self.requests = 0

    def snapshot(self) -> ClusterState:
        return STATE  # the status follows a moment later

    def request_stop(self) -> str:
        before = self.requests
        time.sleep(0.0005)  # another thread may come between
        self.requests = before + 1
        return "stopping" if self.requests == 1 else "ending at once"


def test_only_the_second_request_of_one_kernel_ends_the_cluster_at_once() -> None:
    stops = Stops()
    requests = StopRequests(stops)
    assert [requests.ask("a"), requests.ask("b")] == ["stopping", ALREADY]
    assert stops.requests == 1
    assert requests.ask("b") == "ending at once"


def test_kernels_that_ask_at_the_same_moment_do_not_end_the_cluster_at_once() -> None:
    for _ in range(50):
        stops, together = Stops(), threading.Barrier(4)
        requests = StopRequests(stops)

        def ask(client: str, together: threading.Barrier = together, requests: StopRequests = requests) -> str:
            together.wait(30)
            return requests.ask(client)

        with ThreadPoolExecutor(4) as kernels:
            answers = list(kernels.map(ask, ("a", "b", "c", "")))
        assert sorted(answers) == sorted(["stopping", ALREADY, ALREADY, ALREADY])
        assert stops.requests == 1


def test_presses_on_two_pages_at_the_same_moment_count_as_one() -> None:
    stops = Stops()
    requests = StopRequests(stops)
    assert [requests.ask(""), requests.ask("")] == ["stopping", ALREADY]
    requests._asked[""] -= 2.0  # seconds: a person has read the answer
    assert requests.ask("") == "ending at once"


@pytest.fixture(params=["by a socket", "by a door"])
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[AttachedCluster, dict[str, Any], Stops]]:
    """A kernel's view of a cluster whose process is this one; its methods can be set."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    stops, methods = Stops(), dict[str, Any]()
    methods.update(plan=lambda: {"workers": 3, "input_mode": "tensorflow"}, snapshot=lambda: STATE)
    history = History("worker:0")
    history.record("worker:0", StepReport(epoch=1, step=1, metrics={"loss": 0.5}))
    history.record("worker:1", StepReport(epoch=1, step=1, metrics={"loss": 0.7}))
    methods["history"] = lambda: HistoryParts.of(history)
    methods["reports"] = lambda node: reports_of(history, node)
    server = CallServer(str(tmp_path / "calls"), methods, StopRequests(stops))
    server.start()
    place = DetachedPlace(STATE.id, "mnist", this_process(), tfos_nb.__version__, str(tmp_path / "calls"), time.time())
    door = Door(CallDesk(server), host="127.0.0.1", bind="127.0.0.1")
    if request.param == "by a door":
        place = replace(place, socket="/nowhere", door=door_in_place(door.open()))
    places.publish(place)
    methods["place"] = lambda: asdict(place)
    methods |= {"close_door": door.close, "forward": door.forward}
    yield tfos_nb.attach("mnist"), methods, stops
    door.close()
    server.shutdown()
    server.server_close()


def test_a_call_returns_or_raises_what_the_method_does(served: Any, tmp_path: Path) -> None:
    cluster, methods, stops = served
    assert stat.S_IMODE((tmp_path / "calls").stat().st_mode) == 0o600
    assert cluster.snapshot() == STATE
    assert cluster.plan == ClusterPlan(workers=3, input_mode="tensorflow")
    methods["logs"] = lambda node: {"": "chief", "worker:1": "one"}[node]
    assert (cluster.logs(), cluster.logs("worker:1")) == ("chief", "one")
    with pytest.raises(KeyError):
        cluster.logs("worker:7")
    methods["results"] = lambda: {"worker:0": {"loss": [0.5], "weights": np.ones(2)}}
    np.testing.assert_equal(cluster.results(), {"worker:0": {"loss": [0.5], "weights": np.ones(2)}})
    other = tfos_nb.attach()
    assert [cluster.request_stop(), other.request_stop(), other.request_stop()] == [
        "stopping",
        ALREADY,
        "ending at once",
    ]
    assert stops.requests == 2


def test_a_result_that_cannot_be_sent_is_an_error_of_its_own(served: Any) -> None:
    cluster, methods, _ = served
    methods["result"] = object
    with pytest.raises(RuntimeError, match="object cannot be sent as data"):
        cluster.result()


def test_a_long_call_delays_no_other(served: Any) -> None:
    cluster, methods, _ = served
    begun, may_end = threading.Event(), threading.Event()

    def wait(timeout: float | None) -> None:
        begun.set()
        may_end.wait(30)

    methods["wait"] = wait
    waiting = threading.Thread(target=cluster.wait, daemon=True)
    waiting.start()
    assert begun.wait(30)
    assert cluster.snapshot() == STATE
    may_end.set()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_door_takes_no_functions_and_no_strangers(served: Any) -> None:
    cluster, methods, _ = served
    methods["train"] = lambda **given: None
    address = cluster._place.door
    if not address:
        cluster.train(lambda spark: spark.range(3))
        return
    with pytest.raises(PlanError, match="takes its rows with its launch"):
        cluster.train(lambda spark: spark.range(3))
    assert address["token"] not in repr(cluster._place)
    for question in (Call("snapshot"), AnswerWanted("1")):
        with DoorClient(replace(door_of(cluster._place), token="guessed")) as stranger, pytest.raises(grpc.RpcError):
            stranger.ask(question)
    with DoorClient(door_of(cluster._place)) as known:
        assert known.ask(AnswerWanted("1000")) == Raised("ValueError", "no such call is known")


@pytest.mark.parametrize("served", ["by a door"], indirect=True)
def test_a_door_leads_to_tensorboard_while_the_cluster_runs(served: Any, tmp_path: Path) -> None:
    cluster, methods, _ = served
    with socket.socket(socket.AF_UNIX) as board, socket.socket(socket.AF_UNIX) as page:
        board.bind(str(tmp_path / "board"))
        board.listen()
        methods["forward"](lambda: str(tmp_path / "board"))
        entry = cluster.tensorboard_socket
        assert stat.S_IMODE(os.stat(entry).st_mode) == 0o600
        page.connect(entry)
        page.sendall(b"GET")
        connection, _ = board.accept()
        with connection:
            assert connection.recv(10) == b"GET"
            connection.sendall(b"page")
            assert page.recv(10) == b"page"
    assert cluster.tensorboard_socket == entry
    methods["snapshot"] = lambda: replace(STATE, status=ClusterStatus.DONE)
    assert cluster.state is ClusterStatus.DONE
    assert (cluster.tensorboard_socket, os.path.exists(entry)) == ("", False)


@pytest.mark.parametrize("served", ["by a door"], indirect=True)
def test_tasks_do_not_carry_tensorboard(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteCalls, "by_tasks", True)
    with pytest.raises(NotReached, match=r"mnist: this kernel does not reach 127\.0\.0\.1:\d+, where the"):
        _ = served[0].tensorboard_socket


@pytest.mark.parametrize("served", ["by a door"], indirect=True)
def test_an_end_on_an_executor_is_noted_where_the_kernel_runs(served: Any) -> None:
    cluster, methods, _ = served
    methods["snapshot"] = lambda: replace(STATE, status=ClusterStatus.DONE)
    assert [one.status for one in tfos_nb.clusters()] == ["RUNNING"]
    assert cluster.state is ClusterStatus.DONE
    assert [one.status for one in tfos_nb.clusters()] == ["DONE"]
    assert cluster.tensorboard_socket == ""
    methods["close_door"]()
    with pytest.raises(PlanError, match=r"mnist has ended \(DONE\), and its process, which kept its results, has gone"):
        tfos_nb.attach("mnist")


@pytest.mark.parametrize("served", ["by a door"], indirect=True)
def test_a_process_on_an_executor_has_gone_if_its_host_says_so(served: Any) -> None:
    cluster, methods, _ = served
    methods["close_door"]()
    with pytest.raises(ClusterClosed, match="has gone without a result"):
        cluster.logs()
    assert cluster.snapshot().status is ClusterStatus.FAILED
    (place,) = tfos_nb.clusters()
    assert place.status == "LOST"
    with pytest.raises(PlanError, match="has gone without a result"):
        tfos_nb.attach("mnist")
    place.forget()
    assert tfos_nb.clusters() == []


class Greeting(socketserver.BaseRequestHandler):
    """A program that does not speak TLS."""

    def handle(self) -> None:
        self.request.sendall(b"220 ready\r\n")


class _Greeter(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # the port's last connections may not be forgotten yet


@pytest.mark.parametrize("served", ["by a door"], indirect=True)
@pytest.mark.parametrize("speaks_tls", [False, True])
def test_a_process_on_an_executor_has_gone_if_another_program_has_its_port(served: Any, speaks_tls: bool) -> None:
    cluster, methods, _ = served
    methods["close_door"]()
    port = cluster._place.door["port"]
    with contextlib.ExitStack() as stack:
        if speaks_tls:
            door = Door(CallDesk(methods), host="127.0.0.1", bind="127.0.0.1", ports=range(port, port + 1))
            door.open()
            stack.callback(door.close)
        else:
            other = stack.enter_context(_Greeter(("127.0.0.1", port), Greeting))
            threading.Thread(target=other.serve_forever, daemon=True).start()
            stack.callback(other.shutdown)
        with pytest.raises(ClusterClosed, match="has gone without a result"):
            cluster.logs()
        with pytest.raises(PlanError, match="has gone without a result"):
            tfos_nb.attach("mnist")


@pytest.mark.parametrize("served", ["by a door"], indirect=True)
def test_a_process_on_an_executor_that_is_not_reached_for_a_while_is_not_given_up(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, methods, _ = served
    methods["close_door"]()
    monkeypatch.setattr("tfos_nb.detached.on_executor.refuses", lambda host, port: False)
    monkeypatch.setattr("tfos_nb.spark.session.active_session", lambda: None)
    assert cluster.snapshot() == STATE, "the last known one"
    assert cluster.log_lines() == list(STATE.log)
    for ask in (cluster.logs, cluster.close):
        with pytest.raises(NotReached, match=r"mnist: its process at 127\.0\.0\.1:\d+ does not answer at the moment"):
            ask()
    assert [one.status for one in tfos_nb.clusters()] == ["RUNNING"], "its address is still known"


def test_a_call_that_comes_twice_is_made_once(tmp_path: Path) -> None:
    stops = Stops()
    server = CallServer(str(tmp_path / "calls"), {}, StopRequests(stops))
    desk = CallDesk(server)
    call = Call("request_stop", client="a", key="1")
    asked = [desk.asked(call), desk.asked(call)]
    assert asked[0] == asked[1]
    assert until(lambda: not isinstance(desk.asked(AnswerWanted("1")), CallBegun))
    answers = [desk.asked(AnswerWanted("1")) for _ in range(2)]
    assert answers == [Answer("stopping")] * 2, "an answer may be lost on its way"
    assert desk.asked(replace(call, key="2")) != asked[0]
    assert until(lambda: stops.requests == 2)
    server.server_close()


def test_the_answer_to_a_long_call_waits_until_it_is_fetched(tmp_path: Path) -> None:
    ends = threading.Event()
    server = CallServer(str(tmp_path / "calls"), {"wait": ends.wait, "snapshot": dict}, StopRequests(Stops()))
    desk = CallDesk(server)

    def begin(method: str, key: str) -> None:
        desk.asked(Call(method, key=key))

    def look(number: int) -> None:
        begin("snapshot", f"look {number}")
        assert until(lambda: not isinstance(desk.asked(AnswerWanted(f"look {number}")), CallBegun))

    begin("wait", "wait")
    for number in range(60):
        look(number)
    ends.set()
    for number in range(60, 120):
        look(number)
    assert desk.asked(AnswerWanted("wait")) == Answer(True)
    assert len(desk._made) < 60, "those that were fetched are dropped"
    server.server_close()


@pytest.mark.parametrize("served", ["by a door"], indirect=True)
def test_without_a_session_a_process_that_cannot_be_reached_is_named_with_its_port(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, _, _ = served
    monkeypatch.setattr("tfos_nb.spark.session.active_session", lambda: None)
    monkeypatch.setattr("tfos_nb.detached.on_executor.refuses", lambda host, port: False)
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        far = replace(cluster._place.process, host="far", system="another boot")
        places.publish(replace(cluster._place, door=cluster._place.door | {"port": port}, process=far))
        with pytest.raises(
            PlanError, match=rf"its process is on an executor \(127\.0\.0\.1:{port}\), which this kernel"
        ):
            tfos_nb.attach("mnist")


def test_the_steps_of_another_node_come_when_they_are_asked_for(served: Any) -> None:
    cluster, methods, _ = served
    history = cluster.history
    assert [one.metrics for one in history.steps()] == [{"loss": 0.5}]
    assert [one.metrics for one in history.points("worker:1")] == [{"loss": 0.7}]
    assert history.steps("worker:7") == []
    del methods["reports"]
    assert [one.metrics for one in history.steps("worker:1")] == [{"loss": 0.7}], "they were fetched"
    assert pickle.loads(pickle.dumps(history)).steps("worker:1") == history.steps("worker:1")


@pytest.mark.parametrize("served", ["by a socket"], indirect=True)
def test_a_process_that_has_gone_leaves_the_last_state_with_the_reason(served: Any, tmp_path: Path) -> None:
    cluster, _, _ = served
    points = cluster.history.points()
    assert len(points) == 1
    (tmp_path / "calls").unlink()
    state = cluster.snapshot()
    assert cluster.history.points() == points
    assert cluster.log_lines() == list(STATE.log)
    assert cluster.curves()["metric"] == "loss"
    with pytest.raises(ValueError, match="Only the chief's curves are known here"):
        cluster.curves(node="worker:1")
    assert (cluster.plan.workers, cluster.tensorboard_socket) == (3, "")
    assert "has gone without a result" in cluster_bundle(cluster)["text/plain"]
    assert (state.status, state.nodes) == (ClusterStatus.FAILED, STATE.nodes)
    assert "has gone without a result" in state.error
    with pytest.raises(ClusterClosed, match="has gone without a result"):
        cluster.wait()
    places.forget(STATE.id)
    with pytest.raises(ClusterClosed, match="mnist: its process has ended, and keeps its results no longer"):
        cluster.logs()
    cluster.close()


class Frame:
    """A value with a DataFrame's attributes."""

    rdd = None
    isStreaming = False  # noqa: N815 - Spark's name


@pytest.mark.parametrize("value", [Frame(), "rows.parquet", None])
def test_rows_of_the_kernel_are_refused_with_what_to_do(served: Any, value: Any) -> None:
    cluster, _, _ = served
    with pytest.raises(PlanError, match=r"^data: a detached cluster reads its rows itself.*df\.write\.parquet"):
        cluster.train(value)


def test_a_function_that_reads_rows_travels_by_value() -> None:
    path = "hdfs:///rows"
    read, _ = unpack(packed_reader("data", lambda spark: (spark, path)))
    assert read("session") == ("session", "hdfs:///rows")  # type: ignore[call-arg,arg-type]


@pytest.mark.parametrize("served", ["by a socket"], indirect=True)
@pytest.mark.parametrize("error", [None, ValueError])
def test_the_end_of_a_with_block_ends_the_feed_of_a_cluster_that_this_kernel_feeds(
    served: Any, error: type[Exception] | None
) -> None:
    attached, methods, stops = served
    ends: list[str] = []
    methods.update(end_feed=lambda: ends.append("end"), train=lambda **given: None)
    with pytest.raises(error) if error is not None else contextlib.nullcontext(), attached as cluster:
        assert cluster is attached
        if error is not None:
            raise error
    assert ends == [], "another kernel may feed it"
    with AttachedCluster(attached._place, feeds=True):
        pass
    assert ends == ["end"]
    with attached:
        attached.train(lambda spark: spark)
    assert ends == ["end", "end"]
    assert stops.requests == 0


def test_a_frame_within_a_function_is_refused_with_the_advice_to_read_it_there() -> None:
    frame = FrameOfSpark()
    with pytest.raises(PlanError) as caught:
        packed_reader("data", lambda spark: frame)
    assert str(caught.value) == (
        "<lambda> refers to frame, a DataFrame, which cannot be sent to the cluster's process: make it inside the "
        "function, from the session that the function is given, as in lambda spark: spark.read.parquet(path). If it "
        "is not in files yet, write it before, as with frame.write.parquet(path)"
    )
    lock = threading.Lock()
    with pytest.raises(PlanError, match=r"lock, a lock, which cannot be sent to the cluster's process: make it inside"):
        packed_reader("data", lambda spark: lock)


FrameOfSpark = type("DataFrame", (), {"__module__": "pyspark.sql.dataframe"})
