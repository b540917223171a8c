"""Invalid messages of a node or a task at the door: only the sender is refused, and the cluster's state stays right.

The door is real, and so is the controller behind it, with its feeds and its places for inference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.inputs import KINDS, any_message, bytes_of_any_kind, examples, messages
from tests.runtime.control.test_door import raw_channel
from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.parallel import _Handler
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import _CARRY, ASK, ATTEND, Door, DoorAddress, DoorClient, DoorStream, Link
from tfos_nb.runtime.control.lifecycle import FeedPlace, MainStarted, NodeUp, Refused, Reservation
from tfos_nb.runtime.control.placement import QUESTIONS, AskPlaces
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.control.reports import EVALUATE, FIT, OVER, FeedStatus, Heartbeat, StepReport
from tfos_nb.runtime.feed import messages as feed_messages
from tfos_nb.runtime.node.single_program import SingleProgramEnded
from tfos_nb.runtime.node.spark_task import HoldsSlot, NodeThere, NodeWanted, SupervisorEnded
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, NodeStatus
from tfos_nb.widgets.html import render_html
from tfos_nb.widgets.model import page_model

SECONDS = 20.0
ROGUE = "worker:2"
HONEST = ("worker:0", "worker:1")
SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.list_(pa.float32()))])
OPEN = feed_messages.OpenPartition(1, 0, SCHEMA.serialize().to_pybytes(), {"x": (3,)}, "10.0.0.1")


class Site:
    """A door that stays open, with one cluster after another behind it."""

    def __init__(self) -> None:
        self.door = Door(ClusterController(ClusterPlan(1)), host="127.0.0.1", bind="127.0.0.1")
        self.address: DoorAddress = self.door.open()
        self.client = DoorClient(self.address)
        self.channel = raw_channel(self.address)
        self.token = (("tfos-token", self.address.token),)

    @contextmanager
    def cluster(self, begun: bool = True) -> Iterator[Cluster]:
        cluster = Cluster(self, begun)
        try:
            yield cluster
        finally:
            cluster.close()

    def attend(self) -> DoorStream:
        """Open a stream as a node does, but with a deadline, so that a door that never closes it is noticed."""
        return DoorStream(partial(self.channel.stream_stream(ATTEND), timeout=SECONDS), self.token)

    def ask(self, question: bytes) -> bytes | grpc.StatusCode:
        """Ask a question of bytes; return the answer, or the status with which the door refused it."""
        try:
            return bytes(self.channel.unary_unary(ASK)(question, timeout=SECONDS, metadata=self.token))
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code

    def close(self) -> None:
        self.channel.close()
        self.client.close()
        self.door.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def ended(stream: DoorStream) -> None:
    """End the stream, and wait until the door has ended it too."""
    stream.end()
    list(stream)
    assert stream._call.code() is grpc.StatusCode.OK


class Cluster:
    """Three workers: two are honest, and the third one is the rogue."""

    def __init__(self, site: Site, begun: bool) -> None:
        self._site = site
        self.controller = ClusterController(ClusterPlan(3))
        site.door._handler = self.controller
        self._streams = [self._reserved(node, 1000 + number) for number, node in enumerate(HONEST)]
        self.rogue = self._reserved(ROGUE, 3000) if begun else site.attend()
        self.places = {node: FeedPlace(f"/{node}", "10.0.0.1", 1, b"c") for node in HONEST}
        for node, stream in zip(HONEST, self._streams, strict=True):
            if begun:
                stream.send(NodeUp(node, 7, "2", "3", self.places[node]))
                stream.send(MainStarted(node))
        self._standing = {NodeStatus.TRAINING} if begun else {NodeStatus.RESERVED}
        self.until(lambda: {state.status for state in self.controller.snapshot()[:2]} == self._standing)
        self.feed = self.controller.feeds.begin(1, False, 1, 1)

    def _reserved(self, node: str, port: int) -> DoorStream:
        stream = self._site.attend()
        stream.send(Reservation(node, "10.0.0.1", port, "0", 0, 77))
        self.until(lambda: node not in self.controller.missing)
        return stream

    def until(self, reached: Callable[[], object]) -> None:
        with self.controller.changed:
            assert self.controller.changed.wait_for(reached, SECONDS)

    def hear(self, speech: Iterable[bytes]) -> None:
        """Let the rogue send all this and end its stream; return once the door has ended it too."""
        for words in speech:
            self.rogue._outbox.put(words)
        ended(self.rogue)

    def check_unharmed(self) -> None:
        """Check that the honest nodes are unchanged, that their messages arrive, and that questions are answered."""
        states = {state.node: state for state in self.controller.snapshot()}
        assert list(states) == [*HONEST, ROGUE]
        if self._standing == {NodeStatus.RESERVED} and ROGUE not in self.controller.missing:
            self._standing = {NodeStatus.STARTING}
        assert {states[node].status for node in HONEST} == self._standing
        assert [states[node].host for node in HONEST] == ["10.0.0.1"] * 2
        assert {failure.node for failure in self.controller.failures} <= {ROGUE}
        for number, node in enumerate(HONEST):
            beat = Heartbeat(node, 5.0, 6, (), FeedStatus(9, 7 + number, 0, False))
            self.controller.received(link_of(self.controller, node), beat)
            assert self.controller._figures[node].rows == 7 + number
        assert self.feed.passes_done.keys() | self.controller.feeds.wanted_from.keys() <= {ROGUE}
        self._check_shown()
        self._check_answers()

    def _check_shown(self) -> None:
        state = ClusterState(
            "c", "id", status=ClusterStatus.RUNNING, nodes=self.controller.snapshot(), feed=self.feed.progress,
            log=tuple(self.controller.log_tail(60)),
        )  # fmt: skip
        json.dumps(page_model(state), allow_nan=False)
        assert "</section>" in render_html(state)

    def _check_answers(self) -> None:
        answer = self._site.client.ask(AskPlaces("input"), SECONDS)
        assert answer.places.keys() <= {*HONEST, ROGUE}
        over = any(not failure.collateral for failure in self.controller.failures)
        assert bool(answer.refused) == (over or not answer.places)
        if self._standing == {NodeStatus.TRAINING}:
            assert self._site.client.ask(feed_messages.WherePlaces(1, HONEST), SECONDS).places == self.places
        claimed = self._site.client.ask(feed_messages.ClaimRows(1, 7, 0, 16), SECONDS)
        assert claimed.ends[-1] == 16
        assert set(claimed.nodes) <= {*HONEST, ROGUE}

    def close(self) -> None:
        for stream in (self.rogue, *self._streams):
            ended(stream)


def link_of(controller: ClusterController, node: str) -> Link:
    return controller._links[controller.membership.members[node].stream or 0]


def heard(kinds: Sequence[type]) -> st.SearchStrategy[Any]:
    """Return messages of any class, mostly of these, about nodes that exist or do not exist."""
    return (st.sampled_from(kinds) | st.sampled_from(KINDS)).flatmap(messages)


controller = ClusterController(ClusterPlan(1))
said = heard([*controller._handlers, *controller.membership._messages, Refused])
asked = heard([NodeThere, NodeWanted, HoldsSlot, SupervisorEnded, *QUESTIONS, *controller.feeds._answers])


def with_field(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda message: replace(message, **{name: value}) if hasattr(message, name) else message


said_in_its_own_name = said.map(with_field("node", ROGUE))
small = st.none() | st.integers(-1, 4)
reports = st.builds(
    StepReport, small, small, small, small, st.dictionaries(st.sampled_from(["loss", "lr", "val_loss"]), st.floats()),
    st.booleans(), st.floats(), st.sampled_from(["", FIT, EVALUATE, OVER]),
)  # fmt: skip
beats = st.builds(Heartbeat, st.just(ROGUE), st.floats(), small, st.lists(reports, max_size=9).map(tuple), st.none())
asked_of_the_feed = asked.map(with_field("feed", 1))
reservations = st.builds(
    Reservation, st.sampled_from([ROGUE, "worker:0", "worker:9", ""]), st.text(max_size=5), st.integers(-1, 70000),
    st.text(max_size=5), st.integers(-1, 5), st.integers(-1, 99), generation=st.integers(-1, 3),
)  # fmt: skip


@examples(40)
@given(speech=st.lists(bytes_of_any_kind, min_size=1, max_size=3), begun=st.booleans())
def test_invalid_bytes_on_a_nodes_stream_end_only_that_stream(site: Site, speech: list[bytes], begun: bool) -> None:
    with site.cluster(begun) as cluster:
        cluster.hear(speech)
        cluster.check_unharmed()


@examples(40)
@given(
    token=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=70) | st.sampled_from(["", None]),
    kept=st.integers(0, 64),
    method=st.sampled_from([ASK, ATTEND, _CARRY, "/tfos_nb.Door/Other", "/grpc.health.v1.Health/Check"]),
    said=st.binary(max_size=20) | any_message.map(wire.encode),
)
def test_a_client_with_no_token_or_a_wrong_one_is_refused(
    site: Site, token: str | None, kept: int, method: str, said: bytes
) -> None:
    """It may use any method and send anything. The refusal reveals nothing of the right token."""
    right = site.address.token
    given_token = (("tfos-token", (right[:kept] + token)[:200]),) if token is not None else ()
    if given_token and given_token[0][1] == right:
        given_token = ()
    with site.cluster() as cluster:
        before = cluster.controller.snapshot()
        with pytest.raises(grpc.RpcError) as caught:
            list(site.channel.stream_stream(method)(iter([said]), timeout=SECONDS, metadata=given_token))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert right[:16] not in str(caught.value)
        assert [state.status for state in cluster.controller.snapshot()] == [state.status for state in before]
        cluster.check_unharmed()


@examples(40)
@given(question=bytes_of_any_kind)
def test_a_question_of_any_bytes_is_refused_or_answered_with_a_message(site: Site, question: bytes) -> None:
    with site.cluster() as cluster:
        answer = site.ask(question)
        assert answer is grpc.StatusCode.UNKNOWN or isinstance(answer, bytes)
        if isinstance(answer, bytes):
            wire.decode(answer)
        cluster.check_unharmed()


@example(NodeUp(ROGUE, 7, "2", "3", None), [])
@example(Refused("worker:0", "h", "why"), [])
@examples(80)
@given(first=said | said_in_its_own_name | reservations, later=st.lists(said | said_in_its_own_name, max_size=4))
def test_a_stream_that_begins_with_any_message_harms_no_other_node(site: Site, first: Any, later: Any) -> None:
    """Names of other nodes, missing reservations and reservations of connected nodes are not believed.

    A valid node that connects later is accepted.
    """
    with site.cluster(begun=False) as cluster:
        cluster.hear(wire.encode(word) for word in (first, *later))
        cluster.check_unharmed()
        if ROGUE in cluster.controller.missing and not cluster.controller.failures:
            cluster.rogue = cluster._reserved(ROGUE, 3000)
            assert {state.status for state in cluster.controller.snapshot()} == {NodeStatus.STARTING}


@examples(60)
@given(said=st.lists(beats, min_size=1, max_size=3))
def test_invalid_figures_do_not_prevent_the_display_of_the_cluster(site: Site, said: list[Heartbeat]) -> None:
    """The panel and the page are drawn even if epochs and steps decrease, or times and metrics are not finite."""
    with site.cluster() as cluster:
        for beat in said:
            cluster.controller.received(link_of(cluster.controller, ROGUE), beat)
            cluster.check_unharmed()


@example([NodeUp("worker:0", 7, "2", "3", FeedPlace("/elsewhere", "h", 1, b""))])
@example([NodeUp("worker:99", 7, "2", "3", FeedPlace("/elsewhere", "h", 1, b""))])
@example([feed_messages.FeedFrom("worker:1", 3)])
@examples(100)
@given(later=st.lists(said | said_in_its_own_name, min_size=1, max_size=4))
def test_a_node_that_sends_forbidden_messages_harms_no_other_node(site: Site, later: list[Any]) -> None:
    """It has reserved correctly, and then sends messages as another node, or with numbers out of range."""
    with site.cluster() as cluster:
        cluster.hear(map(wire.encode, later))
        cluster.check_unharmed()


@example([feed_messages.ClaimRows(1, 0, 0, 2**63)])
@example([feed_messages.OpenPartition(1, 0, b"no schema", {}, "")])
@example([feed_messages.PartitionDone(1, 0, -5, True)])
@examples(90)
@given(questions=st.lists(asked | asked_of_the_feed, min_size=1, max_size=3))
def test_a_task_that_asks_invalid_questions_is_refused_and_the_next_is_answered(
    site: Site, questions: list[Any]
) -> None:
    """Unknown feeds, partitions, rows and nodes, huge counts and invalid schemas get an answer or an error soon.

    Afterwards a valid task can still open its partition.
    """
    with site.cluster() as cluster:
        for question in questions:
            assert site.ask(wire.encode(question)) is not grpc.StatusCode.DEADLINE_EXCEEDED
        cluster.check_unharmed()
        answer = site.client.ask(OPEN, SECONDS)
        assert answer.refused == "no rows are taken by worker:2" or "its rows have other types" in answer.refused
        assert cluster.feed.ledger.rows >= 0


@examples(40)
@given(words=st.lists(messages(SingleProgramEnded) | asked, max_size=4))
def test_single_programs_are_not_ended_by_messages_of_others(site: Site, words: list[Any]) -> None:
    """The driver of ``parallel`` refuses numbers of programs that do not exist, and does not count them."""
    site.door._handler = controller = _Handler(2)
    for word in words:
        assert site.ask(wire.encode(word)) is not grpc.StatusCode.DEADLINE_EXCEEDED
    assert controller.ended.keys() <= {0, 1}
    site.client.ask(SingleProgramEnded(0, b"first"), SECONDS)
    site.client.ask(SingleProgramEnded(0, b"second"), SECONDS)
    assert controller.ended[0].result == next(
        (word.result for word in words if isinstance(word, SingleProgramEnded) and word.index == 0), b"first"
    )
