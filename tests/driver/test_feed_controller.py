"""The feed controller: its answers to feeding tasks, and the data that it accepts."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession, types

from tfos_nb.driver.feed_controller import Feed, FeedController, FeedOf, feed_job
from tfos_nb.driver.membership.machine import Membership
from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.runtime.control.door import DoorAddress
from tfos_nb.runtime.control.lifecycle import FeedPlace
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.feed import messages
from tfos_nb.spark.feedable import feedable
from tfos_nb.state.cluster_state import FeedProgress

SCHEMA = pa.schema([("x", pa.list_(pa.float32()))]).serialize().to_pybytes()


class Fed:
    """A feed controller, what it sent, and the places that the nodes have opened."""

    def __init__(self, nodes: int) -> None:
        self.membership = Membership(ClusterPlan(nodes))
        self.names = list(self.membership.present.fed_names)
        self.places = self.membership.feed_places
        self.places.update((name, FeedPlace(f"/{name}", "h", 1, b"")) for name in self.names)
        self.sent: list[tuple[Any, list[str]]] = []
        changed = threading.Condition(threading.RLock())
        self.controller = FeedController(changed, self.membership, self.send)

    def send(self, message: Any, nodes: Iterable[str]) -> None:
        self.sent.append((message, list(nodes)))

    def open(self, partition: int, schema: bytes = SCHEMA, feed: int = 1) -> messages.Places:
        answer = self.controller.asked(messages.OpenPartition(feed, partition, schema, {"x": (3,)}))
        assert isinstance(answer, messages.Places)
        return answer


def test_a_feed_is_announced_and_described_once() -> None:
    box = Fed(2)
    feed = box.controller.begin(3, True, 1, 3)
    for partition in range(3):
        assert box.open(partition) == messages.Places(box.places, nodes=2)
    assert box.sent == [
        (messages.FeedBegins(1, 3, True), box.names),
        (messages.FeedSchema(1, SCHEMA, {"x": (3,)}), box.names),
    ]
    assert box.controller.current is feed
    assert feed.progress == FeedProgress(0, 0, 0, 3)


def test_rows_are_left_until_every_node_has_made_its_passes_or_wants_no_more() -> None:
    box = Fed(2)
    call = box.controller.begin_call()
    assert not box.controller.has_rows_left
    feed = box.controller.begin(1, False, 1, 1, FeedOf(call))
    box.open(0)
    assert box.controller.has_rows_left
    box.controller.end(feed, 1)
    box.controller.pass_done(messages.PassDone("worker:0", feed.number, 2, 8))
    box.controller.pass_done(messages.PassDone("worker:1", feed.number, 1, 8))
    assert not box.controller.has_made(feed, 2)
    assert box.controller.has_rows_left
    box.controller.pass_done(messages.PassDone("worker:1", feed.number, 1, 8, enough=True))
    assert box.controller.is_through("worker:1", call)
    assert box.controller.has_made(feed, 2)
    assert not box.controller.has_rows_left


def test_a_task_is_refused_while_a_node_takes_no_rows() -> None:
    box = Fed(3)
    box.controller.begin(1, False, 1, 1)
    del box.places["worker:1"], box.places["worker:2"]
    assert box.open(0) == messages.Places(refused="no rows are taken by worker:1, worker:2")


def test_a_cancelled_task_that_still_runs_does_not_end_the_feed() -> None:
    box = Fed(2)
    feed = box.controller.begin(1, False, 1, 1)
    assert box.open(0).nodes == 2
    box.places.pop("worker:1")  # the node is lost and will be replaced
    box.membership.rendezvous = 2
    assert box.open(1) == messages.Places(), "the feed is over for it"
    assert box.controller.asked(messages.WherePlaces(1, ("worker:1",))) == messages.Places()
    box.controller.asked(messages.PartitionFailed(1, 1, "no rows are taken by worker:1"))
    assert feed.error is None
    box.controller.go_on([feed], 2)
    box.places["worker:1"] = FeedPlace("/another", "h", 1, b"")
    assert box.open(1).nodes == 2


def test_an_attempt_that_gets_no_further_changes_nothing() -> None:
    box = Fed(2)
    feed = box.controller.begin(1, False, 1, 1)
    box.controller.asked(messages.ClaimRows(1, 0, 0, 100))
    box.controller.asked(messages.PartitionDone(1, 0, 100, True))
    for rows in (100, 80):  # a later speculative attempt, and an interrupted one
        assert box.open(0).places == box.places
        box.controller.asked(messages.PartitionDone(1, 0, rows, False))
    assert feed.ledger.shares() == {"worker:0": 50, "worker:1": 50}
    assert feed.ledger.spilled
    assert feed.progress == FeedProgress(1, 0, 100, 1)


def delivered(box: Fed, replays: int = 3) -> Feed:
    """Deliver 100 rows to two nodes, which keep them."""
    feed = box.controller.begin(1 + replays, True, 1, 1 + replays, FeedOf(1))
    box.open(0)
    box.controller.asked(messages.ClaimRows(1, 0, 0, 100))
    box.controller.asked(messages.PartitionDone(1, 0, 100, True))
    box.controller.end(feed, replays)
    return feed


def restart(box: Fed, **kept: int) -> None:
    """Start the nodes again; some have kept rows of these feeds."""
    box.membership.rendezvous += 1
    for name in box.names:
        box.places[name] = FeedPlace(f"/again/{name}", "h", 1, b"", kept=kept.get(name.replace(":", ""), 0))
    box.controller.start_again()


def test_a_new_generation_gets_only_the_rows_that_it_has_not_kept() -> None:
    box = Fed(2)
    feed = delivered(box)
    restart(box, worker0=1)
    assert box.controller.can_resume(feed, 2, by_all=False)
    assert not box.controller.can_resume(feed, 2, by_all=True)
    place, known = FeedOf(1, validation=7), {0: (messages.KnownRows(((0, 9),), 5),)}
    positions = {name: messages.PassPosition(4, seed=3) for name in box.names}
    box.sent.clear()
    box.controller.resume(feed, 2, place, held=messages.HeldRows({0: ((0, 9),)}, known), positions=positions)
    begins = [
        messages.FeedBegins(1, 2, spill, 1, validation=7, again=messages.FeedAgain(positions[name], 50, 100, 50, *more))
        for name, spill, more in (("worker:0", False, (True,)), ("worker:1", True, (False, {0: ((0, 9),)})))
    ]
    assert box.sent == [
        (begins[0], ["worker:0"]),
        (begins[1], ["worker:1"]),
    ]
    assert feed.lacking == {"worker:1"}
    opened = box.open(0)
    assert (opened.skip, opened.known) == ((), known[0]), "the node keeps all its rows, and they are compared"
    box.controller.end_resumed(feed)
    ends = messages.FeedEnds(1, 50, 1, 100, 50, 50)
    assert box.sent[-2:] == [(ends, ["worker:0"]), (ends, ["worker:1"])]
    assert not feed.lacking
    for name in box.names:
        box.controller.pass_done(messages.PassDone(name, 1, 1, 50))
    assert box.controller.has_made(feed, 3)
    assert not box.controller.has_made(feed, 4)


def validated(box: Fed) -> int:
    """Feed validation rows, one more to the first node; return the feed's number."""
    feed = box.controller.begin(2, True, 1, 1, FeedOf(box.controller.begin_call(), validates=True))
    box.open(0, feed=feed.number)
    box.controller.asked(messages.ClaimRows(feed.number, 0, 0, 5, 0, 5, ()))
    box.controller.asked(messages.PartitionDone(feed.number, 0, 5, spilled=True))
    box.controller.end(feed, 0)
    box.controller.close_ledgers([feed])
    return feed.number


def test_validation_rows_that_all_nodes_have_kept_are_announced_as_there() -> None:
    box = Fed(2)
    number = validated(box)
    box.controller.begin(3, True, 1, 3, FeedOf(1, validation=number))
    restart(box)
    for name, place in box.places.items():
        box.places[name] = replace(place, kept_validation=number)
    box.sent.clear()
    assert box.controller.resume_validation(number, FeedOf(1, validates=True))
    for name, rows in (("worker:0", 3), ("worker:1", 2)):
        begins, schema, ends = (message for message, nodes in box.sent if nodes == [name])
        assert (begins.feed, begins.validates, begins.again.kept, begins.again.rows) == (number, True, True, rows)
        assert schema == messages.FeedSchema(number, SCHEMA, {"x": (3,)})
        assert ends == messages.FeedEnds(number, rows, 0, 5, 2, 3)


@pytest.mark.parametrize("kept", [{}, {"worker:0": 1}, {"worker:0": 1, "worker:1": 7}])
def test_validation_rows_that_a_node_has_not_kept_are_fed_again(kept: dict[str, int]) -> None:
    box = Fed(2)
    number = validated(box)
    restart(box)
    for name, feed in kept.items():
        box.places[name] = replace(box.places[name], kept_validation=feed)
    box.sent.clear()
    assert not box.controller.resume_validation(number, FeedOf(1, validates=True))
    assert not box.controller.resume_validation(number + 1, FeedOf(1, validates=True))
    assert box.sent == []


@pytest.mark.parametrize(("kept", "passes"), [({}, 0), ({"worker0": 2}, 0), ({"worker0": 1}, 4), ({"worker0": 1}, -1)])
def test_rows_that_nobody_has_kept_are_all_fed_again(kept: dict[str, int], passes: int) -> None:
    box = Fed(2)
    feed = delivered(box)
    restart(box, **kept)
    assert not box.controller.can_resume(feed, passes, by_all=False)


def test_kept_rows_are_of_no_use_to_other_nodes_or_after_another_feed() -> None:
    box = Fed(2)
    feed = delivered(box)
    restart(box, worker0=1, worker1=1)
    box.controller.begin(2, True, 1, 1, FeedOf(1, validates=True))
    assert box.controller.can_resume(feed, 0, by_all=False), "validation rows are kept apart"
    box.controller.begin(2, True, 1, 1, FeedOf(1))
    assert not box.controller.can_resume(feed, 0, by_all=False), "its rows may be written over them"
    restart(box, worker0=1, worker1=1)
    assert box.controller.can_resume(feed, 0, by_all=False)
    feed.ledger.claimed["worker:2"] = 0
    assert not box.controller.can_resume(feed, 0, by_all=False)


def test_a_single_node_gets_every_row_without_a_claim() -> None:
    box = Fed(1)
    feed = box.controller.begin(1, False, 1, 1)
    for partition in (0, 1, 1):
        box.controller.asked(messages.PartitionDone(1, partition, 50, True))
    box.controller.end(feed, 2)
    assert box.sent[-1] == (messages.FeedEnds(1, 100, 2, 100, 100, 100), ["worker:0"])


def test_each_node_is_told_its_own_number_of_rows() -> None:
    box = Fed(2)
    feed = box.controller.begin(2, True, 1, 2)
    box.controller.asked(messages.ClaimRows(1, 0, 0, 151))
    box.controller.asked(messages.PartitionDone(1, 0, 151, True))
    box.controller.end(feed, 1)
    assert box.sent[-2:] == [
        (messages.FeedEnds(1, 76, 1, 151, 75, 76), ["worker:0"]),
        (messages.FeedEnds(1, 75, 1, 151, 75, 76), ["worker:1"]),
    ]  # fmt: skip


def test_the_first_error_of_a_partition_is_kept() -> None:
    box = Fed(1)
    feed = box.controller.begin(1, False, 1, 1)
    box.controller.asked(messages.PartitionFailed(1, 4, "row 7 is no number"))
    box.controller.asked(messages.PartitionFailed(1, 5, "and another"))
    assert str(feed.error) == "partition 4: row 7 is no number"


def test_feeds_are_numbered_and_passes_are_counted_for_each_feed() -> None:
    box = Fed(1)
    one, two = box.controller.begin(2, True, 1, 2), box.controller.begin(1, False, 1, 1)
    for number in (1, 2, 1):
        box.controller.pass_done(messages.PassDone("worker:0", 1, number, 9))
    assert (one.number, two.number) == (1, 2)
    assert (one.passes_done, two.passes_done) == ({"worker:0": 2}, {})


def test_every_message_of_a_task_counts_as_progress() -> None:
    box = Fed(2)
    feed = box.controller.begin(1, False, 1, 1)
    moves = [feed.moved]
    for message in (
        messages.OpenPartition(1, 0, SCHEMA, {}),
        messages.ClaimRows(1, 0, 0, 1),
        messages.PartitionDone(1, 0, 1, True),
    ):
        box.controller.asked(message)
        moves.append(feed.moved)
    box.controller.pass_done(messages.PassDone("worker:0", 1, 1, 1))
    moves.append(feed.moved)
    assert moves == [0, 1, 2, 3, 4]


def test_the_end_of_all_feeds_is_announced_once() -> None:
    box = Fed(2)
    box.controller.close("the driver waits for the end")
    box.controller.close("again")
    assert box.sent == [(messages.NoMoreFeeds(), box.names)]


# Partitions of an RDD may have different types, because each task infers its own. The first one describes the feed.
# Rows of other types would cause an error of Arrow in a node, or in the spill.
def test_a_partition_of_other_types_than_the_first_is_refused_by_column() -> None:
    whole, broken = (pa.schema([("x", kind)]).serialize().to_pybytes() for kind in (pa.int64(), pa.float64()))
    box = Fed(1)
    box.controller.begin(2, True, 1, 2)
    box.open(0, whole)
    assert "'x' is double, not int64" in box.open(1, broken).refused
    assert not box.open(2, whole).refused


@pytest.mark.parametrize("garbage", [b"", b"no schema", SCHEMA[:-9]], ids=["nothing", "noise", "cut off"])
def test_bytes_that_are_no_schema_do_not_become_the_schema_of_the_feed(garbage: bytes) -> None:
    """Otherwise it would be sent to the nodes, and the rows of all other tasks would differ from it."""
    box = Fed(1)
    feed = box.controller.begin(1, False, 1, 1)
    with pytest.raises((pa.ArrowException, OSError)):
        box.open(0, garbage)
    assert feed.schema == b""
    assert box.open(1) == messages.Places(box.places, nodes=1)


# --- accepted data --------------------------------------------------------------------------------

ADDRESS = DoorAddress("h", 1, b"", "t")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (types.DateType(), r"cast it to a number: F\.unix_date\(df\['c'\]\)"),
        (types.TimestampType(), r"cast it: df\['c'\]\.cast\('double'\)"),
        (types.TimestampNTZType(), "cast it"),
        (types.DecimalType(10, 2), "cast it"),
        (types.StructType([types.StructField("a", types.IntegerType())]), "select its fields"),
        (types.MapType(types.StringType(), types.IntegerType()), "take what you need"),
        (types.ArrayType(types.ArrayType(types.DateType())), "cast it to a number"),
    ],
    ids=str,
)
def test_a_column_that_cannot_become_a_tensor_is_named_before_anything_is_read(
    spark: SparkSession, kind: types.DataType, advice: str
) -> None:
    frame = spark.createDataFrame(
        [], types.StructType([types.StructField("x", types.FloatType()), types.StructField("c", kind)])
    )
    with pytest.raises(PlanError, match=rf"column 'c' is .* a tensor: .*{advice}.*df\.drop\('c'\)"):
        feedable(frame)
    assert feedable(frame.drop("c")).columns == ["x"]


@pytest.mark.parametrize(
    "kind",
    [
        types.ByteType(),
        types.ShortType(),
        types.IntegerType(),
        types.LongType(),
        types.FloatType(),
        types.DoubleType(),
        types.BooleanType(),
        types.StringType(),
        types.BinaryType(),
        types.ArrayType(types.FloatType()),
        types.ArrayType(types.ArrayType(types.IntegerType())),
    ],
    ids=str,
)
def test_a_column_that_can_become_a_tensor_is_not_changed(spark: SparkSession, kind: types.DataType) -> None:
    frame = spark.createDataFrame([], types.StructType([types.StructField("c", kind)]))
    assert feedable(frame).schema == frame.schema


def test_vectors_of_spark_ml_are_not_changed(spark: SparkSession) -> None:
    from pyspark.ml.linalg import Vectors

    frame = spark.createDataFrame(
        [(Vectors.dense([1.0, 2.0]), 1), (Vectors.sparse(2, [1], [5.0]), 0)], ["features", "label"]
    )
    assert feedable(frame).schema == frame.schema


def test_a_frame_without_columns_is_refused(spark: SparkSession) -> None:
    with pytest.raises(PlanError, match="has no columns"):
        feedable(spark.range(1).drop("id"))


@pytest.mark.parametrize("data", [None, [1, 2], {"x": 1}, "table"], ids=str)
def test_data_that_is_neither_a_dataframe_nor_an_rdd_is_refused(data: Any) -> None:
    box = Fed(1)
    with pytest.raises(PlanError, match=f"a {type(data).__name__} cannot be fed: give a Spark DataFrame or an RDD"):
        feed_job(data, box.controller.begin(1, False, 1, 1), ADDRESS)


def test_feeds_closed_long_ago_are_forgotten_and_their_late_tasks_get_an_answer() -> None:
    box = Fed(1)
    validation = box.controller.begin(0, True, 1, 1, FeedOf(1, validates=True))
    for _ in range(40):
        feed = box.controller.begin(1, False, 1, 1, FeedOf(1, validation=validation.number))
        box.controller.end(feed, 0)
        box.controller.close_ledgers([feed, validation])
    assert len(box.controller._feeds) < 20
    assert validation.number in box.controller._feeds, "the next one is compared with it"
    assert box.controller.asked(messages.StillFed(2)) is False
    with pytest.raises(FeedFailed, match="feed 2 has ended"):
        box.open(0, feed=2)
    box.controller.pass_done(messages.PassDone("worker:0", 2, 1, 8))
