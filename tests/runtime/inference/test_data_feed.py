"""Rows as lists and inference rows, in one process: a real Flight server, a real door, the real code of tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from tfos_nb.driver.placements import InferencePlacement
from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import Door, DoorAddress, Link
from tfos_nb.runtime.control.node_connection import connect
from tfos_nb.runtime.control.placement import QUESTIONS
from tfos_nb.runtime.feed import messages
from tfos_nb.runtime.feed.row_queues import RowQueues
from tfos_nb.runtime.feed.transfer import FeedServer
from tfos_nb.runtime.inference import serving
from tfos_nb.runtime.inference.answers import Answers, listed
from tfos_nb.runtime.inference.data_feed import DataFeed, RowLists
from tfos_nb.runtime.inference.requests import RequestQueue
from tfos_nb.runtime.inference.serving import InferTask, RequestExchange
from tfos_nb.runtime.rows.rdd_rows import batches_of_rows
from tfos_nb.runtime.rows.row_lists import FeedRow, RowMaker, columns_by_mapping

SECONDS = 30.0


class Ctx:
    """The part of a ``ctx`` that gives out rows as lists."""

    def __init__(self, rows: RowLists) -> None:
        self._rows = rows

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Any = None,
        *,
        across_partitions: bool = False,
        arrays: bool = False,
    ) -> DataFeed:
        return self._rows.data_feed(
            train_mode, qname_in, qname_out, input_mapping, across=across_partitions, arrays=arrays
        )

    def requests(
        self,
        batch_size: int = 1024,
        *,
        columns: Any = None,
        fill: Any = None,
        qname: str = "input",
        across_partitions: bool = False,
    ) -> Any:
        return self._rows.requests(batch_size, qname, across_partitions, columns, fill)


class Node:
    """A node's rows without its process."""

    def __init__(self, root: Path, name: str = "worker:0", queues: tuple[str, ...] = ("input",), buffer: int = 1 << 20):
        self.told: list[Any] = []
        self.queues = RowQueues(name, str(root), buffer, 1 << 30, self.told.append, names=queues)
        self.exchange = RequestExchange(name, queues, buffer)
        self.ctx = Ctx(RowLists(self.queues, self.exchange))

    def feed(self, number: int, blocks: list[pa.RecordBatch], replays: int = 0, queue: str = "input") -> None:
        """Feed rows, as the messages and the Flight server do."""
        self.queues.begin(messages.FeedBegins(number, replays + 1, replays > 0, call=number, queue=queue))
        schema = blocks[0].schema.serialize().to_pybytes()
        self.queues.describe(messages.FeedSchema(number, schema, {}))
        at = 0
        for block in blocks:
            self.queues.feed_rows(number).accept(0, ((at, at + block.num_rows),), block)
            at += block.num_rows
        self.queues.end(messages.FeedEnds(number, at, replays))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def numbers(*sizes: int, start: int = 0) -> list[pa.RecordBatch]:
    blocks = []
    for size in sizes:
        blocks.append(pa.RecordBatch.from_pydict({"id": pa.array(range(start, start + size))}))
        start += size
    return blocks


def test_the_batch_size_may_be_a_numpy_integer(node: Node) -> None:
    node.feed(1, numbers(5))
    feed = node.ctx.get_data_feed()
    assert feed.next_batch(np.int64(3)) == [(0,), (1,), (2,)]
    for size in (0, -1, 1.5, True, "3"):
        with pytest.raises(FeedFailed, match="the rows of a batch must be a whole number, 1 or more"):
            feed.next_batch(size)  # type: ignore[arg-type]


# --- rows are unchanged ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        ["5,1,2", "7,3,4"],
        [([0.5, 1.5], 3), ([2.5], 4), ([], 5)],
        [[1, 2], [3, 4]],
        [{"a": 1, "b": "x"}, {"a": 2, "b": None}],
        [(1, None, b"\x00"), (None, True, b"")],
        [([[1, 2], [3]], "x"), (None, "y")],
        [7, 8, None],
        [(float("inf"),)],
    ],
    ids=str,
)
def test_a_row_of_an_rdd_arrives_unchanged(rows: list[Any]) -> None:
    block = next(batches_of_rows(rows))
    assert RowMaker(block.schema).rows(block) == rows
    assert [type(row) for row in RowMaker(block.schema).rows(block)] == [type(row) for row in rows]


def test_rows_with_names_are_named_tuples() -> None:
    block = pa.RecordBatch.from_pydict({"label": [1, None], "pixels": [[1.0, 2.0], [3.0]], "a b": ["x", "y"]})
    one, two = RowMaker(block.schema).rows(block)
    assert isinstance(one, tuple)
    assert one == (1, [1.0, 2.0], "x")
    assert (one.label, one["a b"], one[1], two[0]) == (1, "x", [1.0, 2.0], None)
    assert one.asDict() == {"label": 1, "pixels": [1.0, 2.0], "a b": "x"}
    with pytest.raises(AttributeError, match="no field 'lable'; it has label, pixels, a b"):
        _ = one.lable
    with pytest.raises(KeyError, match="no field 'x'"):
        _ = one["x"]


def test_lists_become_arrays_on_request() -> None:
    block = next(batches_of_rows([([1.0, 2.0], "a"), ([3.0], "b")]))
    rows = RowMaker(block.schema, arrays=True).rows(block)
    assert all(isinstance(row[0], np.ndarray) for row in rows)
    assert [row[0].tolist() for row in rows] == [[1.0, 2.0], [3.0]]


def test_arrays_in_an_rdd_arrive_as_arrays() -> None:
    block = next(batches_of_rows([np.arange(3.0), np.arange(2.0)]))
    assert [row.tolist() for row in RowMaker(block.schema).rows(block)] == [[0.0, 1.0, 2.0], [0.0, 1.0]]


def test_pictures_in_an_rdd_arrive_unchanged_or_as_lists_in_a_tuple() -> None:
    alone = next(batches_of_rows([np.full((2, 3), 7, "uint8"), np.zeros((1, 2), "uint8")]))
    assert [row.tolist() for row in RowMaker(alone.schema).rows(alone)] == [[[7] * 3] * 2, [[0, 0]]]
    labelled = next(batches_of_rows([(np.eye(2), 1)]))
    assert RowMaker(labelled.schema).rows(labelled) == [([[1.0, 0.0], [0.0, 1.0]], 1)]


def test_a_sliced_column_with_nulls_keeps_its_rows() -> None:
    fixed = pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
    block = pa.RecordBatch.from_pydict({"f": fixed, "n": [1, None, 3, None], "l": [["a"], None, [], ["b", None]]})
    rows = RowMaker(block.schema).rows(block.slice(1, 3))
    assert [tuple(row) for row in rows] == [(None, None, None), ([3, 4], 3, []), ([5, 6], None, ["b", None])]


def test_a_mapping_uses_sorted_names_if_rows_have_no_names() -> None:
    block = next(batches_of_rows([(1, 2), (3, 4)]))
    assert columns_by_mapping(block, {"b": "tb", "a": "ta"}) == {"ta": [1, 3], "tb": [2, 4]}
    named = pa.RecordBatch.from_pydict({"b": [1], "x": [0], "a": [2]})
    assert columns_by_mapping(named, {"b": "tb", "a": "ta"}) == {"ta": [2], "tb": [1]}
    with pytest.raises(FeedFailed, match=r"input_mapping names 1 columns \(z\), and a row has 2 fields"):
        columns_by_mapping(block, {"z": "t"})


# --- train ----------------------------------------------------------------------------------------


def test_a_batch_may_span_blocks_passes_and_feeds(node: Node) -> None:
    node.feed(1, numbers(5, 3), replays=1)
    node.feed(2, numbers(2, start=100))
    node.queues.close()
    feed = node.ctx.get_data_feed()
    batches = []
    while not feed.should_stop():
        batches.append([row.id for row in feed.next_batch(4)])
    rows = [*range(8), *range(8), 100, 101]
    assert [batch for batch in batches if batch] == [rows[start : start + 4] for start in range(0, 18, 4)]
    assert feed.done_feeding
    assert feed.next_batch(4) == []
    assert [done.number for done in node.told] == [1, 2, 1]


def test_a_second_data_feed_continues_where_the_first_stopped(node: Node) -> None:
    node.feed(1, numbers(6))
    node.queues.close()
    assert [row.id for row in node.ctx.get_data_feed().next_batch(4)] == [0, 1, 2, 3]
    assert [row.id for row in node.ctx.get_data_feed().next_batch(4)] == [4, 5]


def test_a_mapped_feed_returns_lists_by_tensor(node: Node) -> None:
    node.feed(1, [next(batches_of_rows([([1.0], 7), ([2.0], 8)]))])
    node.queues.close()
    feed = node.ctx.get_data_feed(input_mapping={"image": "x", "label": "y"})
    assert feed.next_batch(10) == {"x": [[1.0], [2.0]], "y": [7, 8]}
    assert feed.next_batch(10) == {"x": [], "y": []}


def test_terminate_ends_the_feed_and_informs_the_driver(node: Node) -> None:
    node.feed(1, numbers(6), replays=3)
    feed = node.ctx.get_data_feed()
    feed.next_batch(2)
    feed.terminate()
    assert feed.should_stop()
    assert feed.next_batch(2) == []
    assert any(done.enough for done in node.told)
    node.queues.begin(messages.FeedBegins(2, 1, False, call=2))  # a later call of train
    assert [done.enough for done in node.told if done.feed == 2] == [True]


def test_each_queue_is_read_separately(tmp_path: Path) -> None:
    node = Node(tmp_path, queues=("input", "valid"))
    node.feed(1, numbers(3, start=10), queue="valid")
    node.feed(2, numbers(2))
    node.queues.close()
    assert [row.id for row in node.ctx.get_data_feed().next_batch(9)] == [0, 1]
    assert [row.id for row in node.ctx.get_data_feed(qname_in="valid").next_batch(9)] == [10, 11, 12]
    with pytest.raises(FeedFailed, match="the queue must be 'input' or 'valid', got 'vaild'"):
        node.ctx.get_data_feed(qname_in="vaild")


@pytest.mark.parametrize("size", [0, -1, 2.5, None])
def test_a_batch_size_must_be_a_whole_number(node: Node, size: Any) -> None:
    with pytest.raises(FeedFailed, match="whole number, 1 or more"):
        node.ctx.get_data_feed().next_batch(size)
    with pytest.raises(FeedFailed, match="whole number, 1 or more"):
        node.ctx.requests(size)


def test_results_of_training_rows_are_refused(node: Node) -> None:
    with pytest.raises(FeedFailed, match="rows need no results"):
        node.ctx.get_data_feed().batch_results([1])


# --- results become columns -----------------------------------------------------------------------


SCHEMA = pa.schema([("label", pa.int64()), ("scores", pa.list_(pa.float32()))])


@pytest.mark.parametrize(
    "results",
    [
        {"label": np.array([1, 2]), "scores": np.array([[0.5, 1.5], [2.5, 3.5]])},
        {"label": [1, 2], "scores": [np.array([0.5, 1.5]), np.array([2.5, 3.5])]},
        {"label": np.array([[1], [2]], "int32"), "scores": [[0.5, 1.5], [2.5, 3.5]]},
        [(1, [0.5, 1.5]), (2, [2.5, 3.5])],
        [{"label": 1, "scores": [0.5, 1.5]}, {"scores": [2.5, 3.5], "label": 2}],
    ],
    ids=["arrays", "lists of arrays", "a column of one", "tuples", "dictionaries"],
)
def test_results_of_many_shapes_become_the_columns_of_the_schema(results: Any) -> None:
    given = Answers(results)
    assert given.count == 2
    assert given.cut(0, 2, SCHEMA).to_pylist() == [
        {"label": 1, "scores": [0.5, 1.5]},
        {"label": 2, "scores": [2.5, 3.5]},
    ]
    assert given.cut(1, 1, SCHEMA).to_pylist() == [{"label": 2, "scores": [2.5, 3.5]}]


@pytest.mark.parametrize(
    ("kind", "results", "expected"),
    [
        (pa.float64(), np.array([[0.5], [1.5]], "float32"), [0.5, 1.5]),
        (pa.string(), ["a", None], ["a", None]),
        (pa.string(), np.array([b"a", b"b"], object), ["a", "b"]),
        (pa.bool_(), np.array([True, False]), [True, False]),
        (pa.list_(pa.list_(pa.int32())), np.arange(8).reshape(2, 2, 2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    ],
    ids=str,
)
def test_one_column_accepts_plain_results(kind: pa.DataType, results: Any, expected: list[Any]) -> None:
    schema = pa.schema([("p", kind)])
    assert Answers(results).cut(0, 2, schema).column(0).to_pylist() == expected


def test_an_array_with_one_value_per_column_is_split() -> None:
    schema = pa.schema([("a", pa.float64()), ("b", pa.float64())])
    assert Answers(np.array([[1.0, 2.0]])).cut(0, 1, schema).to_pylist() == [{"a": 1.0, "b": 2.0}]
    with pytest.raises(FeedFailed, match="a result has 3 values; the schema has a, b"):
        Answers(np.zeros((1, 3))).cut(0, 1, schema)


@pytest.mark.parametrize(
    ("results", "told"),
    [
        (
            {"label": [1], "score": [[1.0]]},
            "the results have the columns label, score; the schema .* has label, scores",
        ),
        ({"label": [1], "scores": []}, "must have one value for each row, got {'label': 1, 'scores': 0}"),
        ({"label": [0.5], "scores": [[1.0]]}, "column 'label' of the results must be int64"),
        ({"label": ["x"], "scores": [[1.0]]}, "column 'label' of the results must be int64"),
        ({"label": [1], "scores": np.array([1.0])}, "shape \\(1,\\) that does not fit: it has 0 axes"),
        ([5], "a result is one value"),
        ([{"label": 1}], "not every result has a value for column 'scores'"),
        (5, "results must be a list with one result for each row, got a int"),
        ("ab", "got a str"),
        (np.float32(1), "one number|result for each row"),
    ],
    ids=str,
)
def test_results_that_do_not_fit_are_named(results: Any, told: str) -> None:
    with pytest.raises(FeedFailed, match=told):
        Answers(results).cut(0, 1, SCHEMA)


class Tensor:
    """An object that NumPy can convert to an array, such as a TensorFlow tensor."""

    def __init__(self, value: Any) -> None:
        self._value = np.asarray(value)

    def numpy(self) -> Any:
        return self._value[()]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._value


def test_tensors_among_the_results_of_an_rdd_become_arrays_and_numbers() -> None:
    given = [Tensor(1.5), (Tensor([1, 2]), "a"), {"p": [Tensor(3)]}, None]
    one, (two, text), three, none = listed(Answers(given).cut(0, 4, None).column(0)[0].as_py())
    assert (one, two.tolist(), text, three, none) == (1.5, [1, 2], "a", {"p": [3]}, None)


def test_results_of_an_rdd_may_be_any_data() -> None:
    given: list[Any] = [1, "a", (1, [2.5]), {"k": b"v"}, None]
    assert listed(Answers(given).cut(0, 5, None).column(0)[0].as_py()) == given
    rows = listed(Answers({"a": np.arange(2), "b": ["x", "y"]}).cut(0, 2, None).column(0)[0].as_py())
    assert rows == [{"a": 0, "b": "x"}, {"a": 1, "b": "y"}]
    with pytest.raises(FeedFailed, match="a result cannot be sent: a builtins.object"):
        Answers([object()]).cut(0, 1, None)


# --- inference over the real wire -----------------------------------------------------------------


class Driver:
    """The door with the real placement, and the nodes that connect to it."""

    def __init__(self, root: Path, nodes: int = 1, buffer: int = 1 << 20) -> None:
        self.why = ""
        self.placement = InferencePlacement(
            lambda: {name: one.place for name, one in self.servers.items()}, lambda: self.why
        )
        self.door = Door(self, host="127.0.0.1", bind="127.0.0.1")
        self.address = self.door.open()
        self.nodes: dict[str, Node] = {}
        self.servers: dict[str, FeedServer] = {}
        for index in range(nodes):
            name = f"worker:{index}"
            directory = root / f"node{index}"
            directory.mkdir()
            self.nodes[name] = node = Node(directory, name, buffer=buffer)
            server = FeedServer(node.queues, directory=str(directory), host="127.0.0.1", token=self.address.token)
            server.answer_with(node.exchange.exchange)
            self.servers[name] = server

    def arrived(self, link: Link, message: Any) -> None: ...

    def received(self, link: Link, message: Any) -> None: ...

    def left(self, link: Link) -> None: ...

    def ticked(self, late: float) -> None: ...

    def asked(self, message: Any) -> Any:
        assert isinstance(message, QUESTIONS)
        return self.placement.asked(message)

    def close(self) -> None:
        for name, server in self.servers.items():
            self.nodes[name].exchange.stop("the test is over")
            server.close()
        self.door.close()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path, nodes=1)
    yield made
    made.close()


def task(address: DoorAddress, **changes: Any) -> InferTask:
    settings = {"cluster": "c", "inference": "i", "queue": "input", "timeout": SECONDS, "rows": True, **changes}
    return InferTask(address, **settings)


def in_thread(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(action())
        except FeedFailed as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def doubled(node: Node) -> list[int]:
    """A main that answers until the end and returns the sizes of its batches."""
    feed, sizes = node.ctx.get_data_feed(False), []
    while not feed.should_stop():
        rows = feed.next_batch(100)
        if rows:
            sizes.append(len(rows))
            feed.batch_results([row * 2 for row in rows])
    return sizes


def test_results_come_in_the_order_of_the_rows_while_tasks_run_in_parallel(driver: Driver) -> None:
    node = driver.nodes["worker:0"]
    main, sizes = in_thread(lambda: doubled(node))
    lots = [list(range(start, start + 2500)) for start in range(0, 20000, 2500)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda rows: list(task(driver.address)(rows)), lots))
    assert found == [[row * 2 for row in rows] for rows in lots]
    node.exchange.close()
    main.join(SECONDS)
    assert sum(sizes[0]) == 20000
    assert max(sizes[0]) == 100


def test_a_frame_keeps_its_columns_but_sends_only_the_selected_ones(driver: Driver) -> None:
    node = driver.nodes["worker:0"]

    def main() -> None:
        for batch in node.ctx.requests(64):
            assert list(batch) == ["x"]
            batch.reply({"y": batch["x"].sum(axis=1)})

    thread, found = in_thread(main)
    block = pa.RecordBatch.from_pydict({"id": list(range(200)), "x": [[float(i), 1.0] for i in range(200)]})
    schema = pa.schema([("y", pa.float64())]).serialize().to_pybytes()
    asked = task(driver.address, rows=False, schema=schema, names=("id", "x"), sent=(1,), keep=True)
    whole = pa.Table.from_batches(list(asked(iter([block.slice(0, 150), block.slice(150)])))).to_pydict()
    assert whole["c0"] == list(range(200))
    assert whole["c2"] == [i + 1.0 for i in range(200)]
    node.exchange.close()
    thread.join(SECONDS)
    assert found == [None]


@pytest.mark.parametrize("across", [False, True])
def test_a_batch_contains_rows_of_several_partitions_only_if_allowed(driver: Driver, across: bool) -> None:
    node = driver.nodes["worker:0"]
    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(lambda rows=rows: list(task(driver.address)(rows))) for rows in ([1, 2], [3, 4], [5])]
        await_streams(node.exchange.of("input"), 3)
        feed = node.ctx.get_data_feed(False, across_partitions=across)
        sizes = []
        while sum(sizes) < 5:
            rows = feed.next_batch(100)
            sizes.append(len(rows))
            feed.batch_results(rows)
        assert sorted(row for done in tasks for row in done.result(SECONDS)) == [1, 2, 3, 4, 5]
    assert sorted(sizes) == ([5] if across else [1, 2, 2])


def await_streams(queue: RequestQueue, count: int) -> None:
    with queue._changed:
        assert queue._changed.wait_for(
            lambda: len(queue._streams) == count and all(stream.ended for stream in queue._streams), SECONDS
        )


def test_results_may_be_given_for_several_batches_at_once(driver: Driver) -> None:
    node = driver.nodes["worker:0"]
    thread, found = in_thread(lambda: list(task(driver.address)(range(10))))
    feed = node.ctx.get_data_feed(False)
    rows = [feed.next_batch(1)[0] for _ in range(10)]
    feed.batch_results(rows[:7])
    feed.batch_results(rows[7:])
    thread.join(SECONDS)
    assert found == [list(range(10))]


def test_too_few_results_are_an_error_when_the_next_rows_are_requested(driver: Driver) -> None:
    node = driver.nodes["worker:0"]
    thread, found = in_thread(lambda: list(task(driver.address)(range(10))))
    feed = node.ctx.get_data_feed(False)
    feed.batch_results(feed.next_batch(100)[:-3])
    with pytest.raises(FeedFailed, match="worker:0: main asks for more rows, but 3 of partition 0 have no result"):
        feed.next_batch(100)
    thread.join(SECONDS)
    assert "3 of partition 0 have no result" in str(found[0])


def test_too_many_results_are_an_error_at_once(driver: Driver) -> None:
    node = driver.nodes["worker:0"]
    thread, found = in_thread(lambda: list(task(driver.address)(range(10))))
    feed = node.ctx.get_data_feed(False)
    rows = feed.next_batch(4)
    with pytest.raises(
        FeedFailed,
        match="worker:0: main must return one result for each row, got 5 results for 4 rows of partition 0",
    ):
        feed.batch_results([*rows, 0])
    thread.join(SECONDS)
    assert "got 5 results" in str(found[0])


def test_a_request_that_is_not_replied_to_is_an_error(driver: Driver) -> None:
    node = driver.nodes["worker:0"]
    thread, found = in_thread(lambda: list(task(driver.address)(range(10))))
    requests = node.ctx.requests(4)
    next(requests)
    with pytest.raises(FeedFailed, match="4 of partition 0 have no result"):
        next(requests)
    thread.join(SECONDS)
    assert "have no result" in str(found[0])


def test_a_task_gets_an_error_if_main_returns_early(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_WHY_SECONDS", 0.1)
    node = driver.nodes["worker:0"]
    thread, found = in_thread(lambda: list(task(driver.address)(range(10))))
    node.ctx.get_data_feed(False).next_batch(5)
    node.exchange.stop()
    thread.join(SECONDS)
    assert "worker:0 takes no more rows: its main has ended" in str(found[0])
    with pytest.raises(FeedFailed, match="worker:0 takes no more rows: its main has ended"):
        list(task(driver.address)(range(3)))


def test_a_main_that_requests_no_rows_is_an_error_after_one_timeout(driver: Driver) -> None:
    with pytest.raises(
        FeedFailed, match=r"10 rows of partition 0 .* for 0.2 s. main has asked for none: .*ctx.requests"
    ):
        list(task(driver.address, timeout=0.2)(range(10)))
    with pytest.raises(FeedFailed, match="main has asked for none"):
        list(task(driver.address, timeout=1000.0)(range(10)))  # nothing has changed since


def test_a_task_that_disconnects_leaves_the_node_usable_for_others(driver: Driver) -> None:
    node = driver.nodes["worker:0"]
    main, _ = in_thread(lambda: doubled(node))
    results = task(driver.address)(range(100_000))
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    results.close()
    assert list(task(driver.address)(range(5))) == [0, 2, 4, 6, 8]
    node.exchange.close()
    main.join(SECONDS)
    assert not main.is_alive()


def test_rows_beyond_the_nodes_memory_limit_wait_and_are_answered(tmp_path: Path) -> None:
    driver = Driver(tmp_path, buffer=5000)
    try:
        node = driver.nodes["worker:0"]
        main, sizes = in_thread(
            lambda: [len(batch) and batch.reply(batch["value"]) for batch in node.ctx.requests(10**6)]
        )
        assert list(task(driver.address)(range(30_000))) == list(range(30_000))
        node.exchange.close()
        main.join(SECONDS)
        assert len(sizes[0]) > 1  # a batch has as many rows as fit, if that is fewer than requested
    finally:
        driver.close()


def test_an_error_in_reading_the_rows_is_raised_in_the_task(driver: Driver) -> None:
    node = driver.nodes["worker:0"]
    main, _ = in_thread(lambda: doubled(node))

    def rows() -> Iterator[int]:
        yield from range(3000)
        raise ZeroDivisionError("in the user's own map")

    with pytest.raises(ZeroDivisionError, match="in the user's own map"):
        list(task(driver.address)(rows()))
    node.exchange.close()
    main.join(SECONDS)
    assert not main.is_alive()


def test_an_empty_partition_makes_no_request() -> None:
    nowhere = DoorAddress("127.0.0.1", 1, b"", "t")
    assert list(task(nowhere)([])) == []


def test_the_driver_gives_the_reason_when_a_node_ends_without_one(driver: Driver) -> None:
    node = driver.nodes["worker:0"]
    thread, found = in_thread(lambda: list(task(driver.address)(range(10))))
    node.ctx.get_data_feed(False).next_batch(5)
    driver.why = "worker:1: ValueError: boom"
    node.exchange.stop()
    thread.join(SECONDS)
    assert str(found[0]).endswith("launch the cluster again. worker:1: ValueError: boom")


def test_a_node_on_another_host_is_reached_by_tls(driver: Driver) -> None:
    server = driver.servers["worker:0"]
    server.place = replace(server.place, socket="/on/another/host")
    main, _ = in_thread(lambda: doubled(driver.nodes["worker:0"]))
    assert list(task(driver.address)(range(3000))) == list(range(0, 6000, 2))
    driver.nodes["worker:0"].exchange.close()
    main.join(SECONDS)


def test_a_request_without_the_token_is_refused(driver: Driver) -> None:
    client = connect(driver.servers["worker:0"].place, near=True)
    ticket = wire.encode(serving.Ticket("input", 0, 0, b"", 1.0))
    with pytest.raises(flight.FlightUnauthenticatedError):  # at once, or when the answer is read
        _, reader = client.do_exchange(flight.FlightDescriptor.for_command(ticket))
        reader.read_chunk()
    client.close()


def test_a_task_of_an_ended_cluster_gets_an_error(driver: Driver) -> None:
    driver.close()
    with pytest.raises(
        FeedFailed, match="cluster c cannot be reached at .* so it has ended: its main has returned, or"
    ):
        list(task(driver.address)(range(4)))


# --- messages -------------------------------------------------------------------------------------


def test_the_messages_of_inference_can_be_sent() -> None:
    ticket = serving.Ticket("input", 3, 4, b"s", 5.0)
    assert wire.decode(wire.encode(ticket)) == ticket
    assert isinstance(FeedRow((1,)), tuple)
    assert DataFeed is not None
