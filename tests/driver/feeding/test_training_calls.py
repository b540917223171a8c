"""Order in which the calls of ``train`` are delivered when nodes are lost meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.driver.test_cluster_controller import Cluster, clock, ended, make
from tfos_nb.driver.feed_controller import Feed, FeedController
from tfos_nb.driver.feeding.training import Call, NodesRestarted, Training
from tfos_nb.driver.feeding.training_calls import TrainingCalls
from tfos_nb.driver.outcome import ClusterOutcome
from tfos_nb.errors import ClusterClosed, FeedFailed
from tfos_nb.runtime.control.door import DoorAddress
from tfos_nb.runtime.control.lifecycle import EndNode, FeedPlace, Following, MainStarted, NodeUp, Reservation, Serving
from tfos_nb.runtime.feed.feed_task import ELSEWHERE
from tfos_nb.runtime.feed.messages import ClaimRows, FeedFrom, StillFed
from tfos_nb.spark.session import SparkJobs

__all__ = ["clock", "make"]

NODES = ("chief:0", "worker:0", "worker:1", "ps:0")


@dataclass
class Told:
    """A call of ``train`` that notes its method calls; those in ``upset`` run a function and are interrupted."""

    epochs: int = 2
    before: int = 0
    number: int = 0
    made: int = 0
    upset: dict[str, Callable[[], object]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)

    def _note(self, what: str, *details: Any) -> None:
        self.asked.append(" ".join(map(str, (what, *details))))
        if what in self.upset:
            self.upset.pop(what)()
            raise NodesRestarted

    def begin_anew(self) -> None:
        self._note("begin anew")

    def make_room(self) -> None:
        self._note("room")

    def keep_validation(self) -> None:
        self._note("validation")

    def go_on(self, rendezvous: int) -> None:
        self._note("go on", rendezvous)

    def describe(self) -> None:
        self._note("describe")

    def follow(self, before: int, number: int) -> None:
        self.before, self.number = before, number

    def continue_from(self, made: int, held: Any = None, state: str = "") -> None:
        self.made = made

    def refill(self, node: str, through: int, since: int) -> None:
        self._note("refill", node, through, since)

    def deliver(self) -> None:
        self._note("deliver from", self.made)
        self.made = self.epochs


@pytest.fixture
def coordinated(make: Callable[..., Cluster]) -> Cluster:
    """A chief that coordinates two workers and a parameter server."""
    cluster = make(workers=2, ps=1, chief=True)
    cluster.controller.membership.restarts_left = 2
    come_up(cluster)
    return cluster


def come_up(cluster: Cluster) -> None:
    cluster.bring_up(*NODES)
    for node in NODES[1:]:
        cluster.say(Serving(node))
    cluster.say(Following("chief:0"))


def come_again(cluster: Cluster, *nodes: str) -> None:
    generation = cluster.controller.generation
    for number, node in enumerate(nodes):
        cluster.say(Reservation(node, "10.0.0.9", 3000 + number, "7", 0, 77, (), generation))
    for node in nodes:
        cluster.say(NodeUp(node, 7, "2.21", "3.15", FeedPlace("/s", "h", 1, b""), "a note"))
        cluster.say(MainStarted(node))
        if node != "chief:0":
            cluster.say(Serving(node))


def lose(cluster: Cluster, node: str) -> bool:
    cluster.say(ended(node, None, "SIGKILL"))
    return cluster.controller.restart_all(f"{node} was killed")


def training_of(cluster: Cluster, *results: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> Training:
    """Return a training whose Spark jobs end at once, with these results one after another."""
    waiting = iter(results)

    def run(*given: Any) -> Any:
        done = threading.Event()
        done.set()
        return SimpleNamespace(done=done, error=None, result=next(waiting), cancel=lambda: None, partitions=lambda: 2)

    monkeypatch.setattr("tfos_nb.driver.feeding.training.feed_job", lambda *given: None)
    jobs, address = cast(SparkJobs, SimpleNamespace(run=run)), DoorAddress("127.0.0.1", 1, b"", "")
    return Training(ClusterOutcome("c", cluster.controller), cluster.controller, jobs, 5.0, address)


def test_partitions_that_a_host_could_not_send_are_sent_by_another_job(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make(workers=2)
    cluster.bring_up("worker:0", "worker:1")
    training = training_of(cluster, [(0, 4), (1, ELSEWHERE)], [(0, 4), (1, 3)], monkeypatch=monkeypatch)
    feed = cluster.controller.feeds.begin(1, False, 1, 2)
    feed.ledger.finish(0, 4)
    feed.ledger.finish(1, 3)
    assert training.feed_once(None, feed) == 1


def test_a_feed_fails_if_spark_runs_its_tasks_only_where_a_node_is_not_reached(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make(workers=2)
    cluster.bring_up("worker:0", "worker:1")
    training = training_of(cluster, [(0, ELSEWHERE)], monkeypatch=monkeypatch)
    feed = cluster.controller.feeds.begin(1, False, 1, 1)
    over = threading.Timer(0.5, training.outcome.over.set)  # nobody decides here whether nodes start again
    over.start()
    with pytest.raises(ClusterClosed), training._job(None, feed, "feed") as job:
        training._check(feed, job)
    (failure,) = cluster.controller.failures
    assert "only on hosts that do not reach all nodes" in str(failure.error)


def deliver(cluster: Cluster, call: Told) -> None:
    TrainingCalls(ClusterOutcome("c", cluster.controller), cluster.controller).train(cast(Call, call))


def test_a_worker_replaced_during_a_restart_is_fed_with_the_new_generation(coordinated: Cluster) -> None:
    def lose_the_ps() -> None:
        assert lose(coordinated, "ps:0")
        come_again(coordinated, *NODES)
        coordinated.say(Following("chief:0"))
        coordinated.say(FeedFrom("chief:0", 1))

    def lose_a_worker() -> None:
        assert not lose(coordinated, "worker:1")
        come_again(coordinated, "worker:1")

    call = Told(upset={"deliver from": lose_the_ps, "validation": lose_a_worker})
    deliver(coordinated, call)
    meeting = ["begin anew", "room", "validation"]
    assert call.asked == ["deliver from 0", *meeting, *meeting, "deliver from 1"]
    assert coordinated.controller.replaced == {}


def test_feeds_continue_once_the_replacement_takes_rows(coordinated: Cluster) -> None:
    """Before that, a cancelled task that still runs must be told that the feed is over."""
    taken: list[bool] = []

    class Watched(Told):
        def go_on(self, rendezvous: int) -> None:
            taken.append(coordinated.controller.all_take_rows)

    def lose_a_worker() -> None:
        assert not lose(coordinated, "worker:1")
        later.start()

    later = threading.Timer(0.2, come_again, (coordinated, "worker:1"))
    deliver(coordinated, Watched(upset={"deliver from": lose_a_worker}))
    later.join()
    assert taken == [True]


def test_only_the_replaced_worker_is_fed_again(coordinated: Cluster) -> None:
    def lose_a_worker() -> None:
        assert not lose(coordinated, "worker:1")
        come_again(coordinated, "worker:1")

    call = Told(upset={"deliver from": lose_a_worker})
    deliver(coordinated, call)
    assert call.asked == ["deliver from 0", "go on 2", "refill worker:1 0 2", "deliver from 0"]


@pytest.mark.parametrize(("restarts", "kept"), [(0, 0), (2, 4)])
def test_ledgers_are_closed_once_no_restart_can_need_them(coordinated: Cluster, restarts: int, kept: int) -> None:
    """With restarts left, the ledgers of the last calls stay open: a node may continue from an older state."""
    coordinated.controller.membership.restarts_left = restarts
    training_calls = TrainingCalls(ClusterOutcome("c", coordinated.controller), coordinated.controller)
    controller: FeedController = coordinated.controller.feeds
    feeds = []
    for _ in range(6):
        feed = controller.begin(1, False, 1, 1)
        feed.ledger.claim(ClaimRows(feed.number, 0, 0, 10))
        feed.ledger.finish(0, 10)
        feeds.append(feed)
        training_calls.train(cast(Call, Told(feeds=[feed])))
    assert [feed.ledger.closed for feed in feeds] == [True] * (6 - kept) + [False] * kept
    assert [feed.progress.rows for feed in feeds] == [10] * 6
    for feed in feeds[:-1]:
        controller.end(feed, 0)
    broken_off = feeds[-1]
    training_calls.forget()
    assert all(feed.ledger.closed for feed in feeds[:-1])
    assert broken_off.ledger.closed == (not kept)
    assert controller.current is broken_off
    assert broken_off.progress.rows == 10
    coordinated.controller.dismiss(EndNode())
    for feed in feeds:
        assert controller.asked(StillFed(feed.number)) is False, "a task that asks late hears that it is over"
    if kept:
        assert controller.asked(ClaimRows(broken_off.number, 0, 0, 10)).ends, "and one that is under way has its answer"


def test_rows_are_kept_for_a_restart_at_the_end_of_the_last_pass(coordinated: Cluster) -> None:
    """It is the last restart, and the call has delivered its rows before it notices the restart."""
    coordinated.controller.membership.restarts_left = 1
    call = Told()
    training_calls = TrainingCalls(ClusterOutcome("c", coordinated.controller), coordinated.controller)
    deliver_once, call.deliver = call.deliver, lambda: (deliver_once(), lose(coordinated, "ps:0"))  # type: ignore[assignment, return-value]
    training_calls.train(cast(Call, call))
    come_again(coordinated, *NODES)
    coordinated.say(FeedFrom("chief:0", 1))
    call.deliver = deliver_once  # type: ignore[method-assign]
    training_calls._catch_up()
    assert call.asked == ["deliver from 0", "begin anew", "room", "validation", "deliver from 1"]


def test_calls_of_which_no_more_rows_are_wanted_are_left_out(coordinated: Cluster) -> None:
    def lose_the_ps() -> None:
        assert lose(coordinated, "ps:0")
        come_again(coordinated, *NODES)
        coordinated.say(FeedFrom("chief:0", 1, refused=1))

    ended_early, second = Told(epochs=5), Told(epochs=3, upset={"deliver from": lose_the_ps})
    training_calls = TrainingCalls(ClusterOutcome("c", coordinated.controller), coordinated.controller)
    for call in (ended_early, second):
        training_calls.train(cast(Call, call))
    assert ended_early.asked == ["deliver from 0", "begin anew"]
    assert second.asked == ["deliver from 0", "begin anew", "room", "validation", "deliver from 1"]


@pytest.mark.parametrize(
    ("wanted", "delivered"),
    [
        (FeedFrom("chief:0", 3), [[], ["deliver from 1"], ["deliver from 0"]]),
        (FeedFrom("chief:0", 1, refused=1), [[], ["deliver from 1"], ["deliver from 0"]]),
        (FeedFrom("chief:0", 0, refused=2), [[], [], ["deliver from 0"]]),
        (FeedFrom("chief:0", 6), [[], [], []]),
    ],
)
def test_calls_that_an_earlier_cluster_has_made_are_made_again_and_left_out(
    coordinated: Cluster, wanted: FeedFrom, delivered: list[list[str]]
) -> None:
    coordinated.say(wanted)
    training_calls = TrainingCalls(ClusterOutcome("c", coordinated.controller), coordinated.controller)
    training_calls.resume()
    found = []
    for number in range(3):
        call = Told()
        training_calls.train(cast(Call, call))
        found.append([one for one in call.asked if one.startswith("deliver")])
        assert ("describe" in call.asked) == (number == 0)
    assert found == delivered


def test_an_earlier_training_of_which_nothing_was_restored_is_refused(coordinated: Cluster) -> None:
    coordinated.say(FeedFrom("chief:0", 0))
    training_calls = TrainingCalls(ClusterOutcome("c", coordinated.controller), coordinated.controller)
    training_calls.resume()
    call = Told()
    with pytest.raises(FeedFailed, match="main has restored no state"):
        training_calls.train(cast(Call, call))
    assert not any(one.startswith("deliver") for one in call.asked)


@pytest.mark.parametrize("other", [FeedFrom("worker:0", 0), FeedFrom("worker:0", 1, "00000001-0001-000003")])
def test_nodes_that_continue_from_different_states_are_fed_nothing(coordinated: Cluster, other: FeedFrom) -> None:
    def lose_the_ps() -> None:
        assert lose(coordinated, "ps:0")
        come_again(coordinated, *NODES)
        coordinated.say(FeedFrom("chief:0", 1))
        coordinated.say(other)

    call = Told(upset={"deliver from": lose_the_ps})
    with pytest.raises(FeedFailed, match="different states: chief:0 after 1 epochs and worker:0 after . epochs"):
        deliver(coordinated, call)
    assert call.asked == ["deliver from 0", "begin anew", "room", "validation"]


def test_a_late_report_of_a_different_state_ends_the_feed(coordinated: Cluster) -> None:
    feeds = coordinated.controller.feeds
    feed = feeds.begin(1, False, 1, 1)
    feeds.wants_from(FeedFrom("worker:0", 1))
    feeds.wants_from(FeedFrom("worker:1", 1))
    assert feed.error is None
    feeds.wants_from(FeedFrom("chief:0", 2))
    assert "chief:0 after 2 epochs" in str(feed.error)
    feeds.start_again()
    assert feeds.disagreement is None
