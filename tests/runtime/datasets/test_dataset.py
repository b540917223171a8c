"""A node's rows as TensorFlow sees them: batches, shapes, columns and passes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.datasets.dataset import DatasetOptions, build_dataset
from tfos_nb.runtime.feed.messages import FeedBegins, FeedEnds, FeedSchema
from tfos_nb.runtime.feed.row_queue import RowQueue
from tfos_nb.runtime.rows.columns import first_lengths

SECONDS = 20.0


def rows_of(start: int, count: int) -> pa.RecordBatch:
    ids = np.arange(start, start + count)
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array(ids, pa.int64()),
            "x": pa.array([[float(number), 0.5, 1.0] for number in ids], pa.list_(pa.float32())),
            "label": pa.array(ids % 10, pa.int32()),
            "weight": pa.array(ids / 2, pa.float64()),
            "name": pa.array([f"row {number}" for number in ids]),
        }
    )


class Share:
    """A node's passes, filled as the driver and the tasks fill them."""

    def __init__(self, directory: Path) -> None:
        self.passes = RowQueue("worker:0", str(directory), 1 << 20, 1 << 20, lambda _: None)
        self.failures: list[FeedFailed] = []
        self.feeds = 0

    def feed(self, blocks: list[pa.RecordBatch], epochs: int = 1) -> None:
        self.feeds += 1
        self.passes.begin(FeedBegins(self.feeds, epochs, epochs > 1))
        intake, row = self.passes.feed_rows(self.feeds), 0
        for block in blocks:
            if self.feeds == 1 and row == 0:
                schema = block.schema.serialize().to_pybytes()
                self.passes.describe(FeedSchema(1, schema, first_lengths(block)))
            intake.accept(0, ((row, row + block.num_rows),), block)
            row += block.num_rows
        self.passes.end(FeedEnds(self.feeds, row, epochs - 1))

    def dataset(self, batch_size: int, **options: Any) -> Any:
        return build_dataset(self.passes, DatasetOptions(batch_size, **options), self.failures.append)


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Share]:
    share = Share(tmp_path)
    yield share
    share.passes.stop()


def ids_of(dataset: Any) -> list[int]:
    return [number for batch in dataset.as_numpy_iterator() for number in batch["id"].tolist()]


@pytest.mark.parametrize(
    ("blocks", "batch_size", "sizes"),
    [
        ([10], 4, [4, 4, 2]),
        ([3, 3, 3, 3], 4, [4, 4, 4]),
        ([1, 5, 2, 3], 4, [4, 4, 3]),
        ([5], 100, [5]),
        ([2, 2, 2], 1, [1] * 6),
        ([64, 36], 50, [50, 50]),
    ],
    ids=str,
)
def test_a_batch_may_contain_rows_of_several_blocks(
    share: Share, blocks: list[int], batch_size: int, sizes: list[int]
) -> None:
    starts = np.cumsum([0, *blocks])
    share.feed([rows_of(int(start), count) for start, count in zip(starts, blocks, strict=False)])
    batches = list(share.dataset(batch_size).as_numpy_iterator())
    assert [len(batch["id"]) for batch in batches] == sizes
    assert np.concatenate([batch["id"] for batch in batches]).tolist() == list(range(sum(blocks)))


def test_the_elements_contain_every_column_unchanged(share: Share) -> None:
    share.feed([rows_of(0, 3), rows_of(3, 1)])
    [batch] = share.dataset(4).as_numpy_iterator()
    assert list(batch) == ["id", "x", "label", "weight", "name"]
    assert batch["x"].tolist() == [[0.0, 0.5, 1.0], [1.0, 0.5, 1.0], [2.0, 0.5, 1.0], [3.0, 0.5, 1.0]]
    assert batch["label"].tolist() == [0, 1, 2, 3]
    assert batch["weight"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert batch["name"].tolist() == [b"row 0", b"row 1", b"row 2", b"row 3"]
    assert (batch["x"].dtype, batch["label"].dtype, batch["weight"].dtype) == (np.float32, np.int32, np.float64)


def test_computing_with_a_batch_does_not_change_the_rows(share: Share) -> None:
    kept = rows_of(0, 64)
    before = kept.to_pydict()
    share.feed([kept.slice(start, 16) for start in range(0, 64, 16)])
    changed = share.dataset(8).map(lambda row: {name: row[name] * 2 - 1 for name in ("id", "x", "label", "weight")})
    assert len(list(changed.prefetch(2))) == 8
    assert kept.to_pydict() == before


def test_drop_remainder_leaves_out_the_smaller_batch(share: Share) -> None:
    share.feed([rows_of(0, 10)])
    assert ids_of(share.dataset(4, drop_remainder=True)) == list(range(8))


def test_each_iteration_is_one_pass(share: Share) -> None:
    share.feed([rows_of(0, 5), rows_of(5, 5)], epochs=3)
    share.passes.close()
    dataset = share.dataset(4)
    assert [ids_of(dataset) for _ in range(4)] == [list(range(10))] * 3 + [[]]


def test_repeat_reads_one_pass_after_another(share: Share) -> None:
    share.feed([rows_of(0, 3)], epochs=2)
    share.passes.close()
    assert ids_of(share.dataset(2).repeat(2)) == [0, 1, 2, 0, 1, 2]


def test_a_second_feed_is_the_next_pass(share: Share) -> None:
    share.feed([rows_of(0, 3)])
    share.feed([rows_of(100, 2)])
    dataset = share.dataset(8)
    assert [ids_of(dataset), ids_of(dataset)] == [[0, 1, 2], [100, 101]]


def test_an_abandoned_iteration_unblocks_the_sender_and_the_next_has_all_rows(tmp_path: Path) -> None:
    share = Share(tmp_path)
    share.passes = RowQueue("worker:0", str(tmp_path), 1, 1 << 20, lambda _: None)  # at most one block waits
    share.passes.begin(FeedBegins(1, 2, True))
    first = rows_of(0, 10)
    share.passes.describe(FeedSchema(1, first.schema.serialize().to_pybytes(), first_lengths(first)))
    intake = share.passes.feed_rows(1)

    def send() -> None:
        for start in range(0, 1000, 10):
            intake.accept(0, ((start, start + 10),), rows_of(start, 10))

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    dataset = share.dataset(10, prefetch=1)
    taken = [batch["id"].tolist() for batch in dataset.take(1).as_numpy_iterator()]
    assert taken == [list(range(10))]
    gc.collect()
    sender.join(SECONDS)
    assert not sender.is_alive()
    share.passes.end(FeedEnds(1, 1000, 1))
    assert ids_of(dataset) == list(range(1000))
    share.passes.stop()


@pytest.mark.parametrize(
    ("options", "structure"),
    [
        ({"x": "x"}, "x"),
        ({"x": "x", "y": "label"}, ("x", "label")),
        ({"x": "x", "y": "label", "sample_weight": "weight"}, ("x", "label", "weight")),
        ({"x": ["x", "id"], "y": "label"}, ({"x": "x", "id": "id"}, "label")),
        ({"x": "x", "y": ["label", "weight"]}, ("x", {"label": "label", "weight": "weight"})),
        ({"columns": ["label", "id"]}, {"label": "label", "id": "id"}),
        ({"x": "x", "y": "x"}, ("x", "x")),
        ({"x": "x", "sample_weight": "weight"}, ("x", None, "weight")),
    ],
    ids=str,
)
def test_x_y_and_sample_weight_become_what_fit_takes(share: Share, options: dict[str, Any], structure: Any) -> None:
    share.feed([rows_of(0, 6)])
    [element] = share.dataset(6, **options)
    whole = rows_of(0, 6).to_pydict()

    def check(part: Any, expected: Any) -> None:
        if isinstance(expected, (tuple, dict)):
            assert type(part) is type(expected)
            assert len(part) == len(expected)
            for key in expected if isinstance(expected, dict) else range(len(expected)):
                check(part[key], expected[key])
        elif expected is None:
            assert part is None
        else:
            assert part.numpy().tolist() == whole[expected]

    check(element, structure)


def test_shapes_are_known_before_the_first_row(share: Share) -> None:
    share.feed([rows_of(0, 2)])
    spec = share.dataset(2).element_spec
    assert spec["x"] == tf.TensorSpec((None, 3), tf.float32)
    assert spec["label"] == tf.TensorSpec((None,), tf.int32)
    assert spec["name"] == tf.TensorSpec((None,), tf.string)
    assert share.dataset(2, drop_remainder=True).element_spec["x"] == tf.TensorSpec((2, 3), tf.float32)
    shuffled = share.dataset(2, x="x", y="label", shuffle=4).element_spec
    assert shuffled == (tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None,), tf.int32))


def test_shuffling_keeps_every_row_and_changes_the_order(share: Share) -> None:
    share.feed([rows_of(0, 40), rows_of(40, 60)], epochs=2)
    dataset = share.dataset(16, shuffle=50, seed=1)
    one, two = ids_of(dataset), ids_of(dataset)
    assert sorted(one) == sorted(two) == list(range(100))
    assert one != list(range(100))
    assert one != two


def test_epochs_after_a_loss_have_the_orders_that_they_would_have_had(share: Share, tmp_path: Path) -> None:
    """Otherwise the orders of the first epochs would come again."""
    blocks = [rows_of(0, 40), rows_of(40, 60)]
    share.feed(blocks, epochs=4)
    dataset = share.dataset(16, shuffle=50, seed=1)
    orders = [ids_of(dataset) for _ in range(4)]
    (tmp_path / "again").mkdir()
    again = Share(tmp_path / "again")
    again.passes.begin_generation()
    again.passes.resume(2)
    again.feed(blocks, epochs=2)
    dataset = again.dataset(16, shuffle=50, seed=1)
    assert [ids_of(dataset), ids_of(dataset)] == orders[2:]
    again.passes.stop()


def test_rows_stay_whole_when_they_are_shuffled(share: Share) -> None:
    share.feed([rows_of(0, 50)])
    for batch in share.dataset(8, shuffle=50, seed=1).as_numpy_iterator():
        assert batch["x"][:, 0].tolist() == batch["id"].tolist()
        assert batch["name"].tolist() == [f"row {number}".encode() for number in batch["id"]]


def test_tensorflow_does_not_shard_a_nodes_share_again(share: Share) -> None:
    share.feed([rows_of(0, 2)])
    policy = share.dataset(2).options().experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF


def test_autotuning_is_off_for_a_nodes_dataset(share: Share) -> None:
    share.feed([rows_of(0, 2)])
    assert share.dataset(2).options().autotune.enabled is False


def test_a_node_without_rows_has_an_empty_pass_of_the_right_shape(share: Share) -> None:
    first = rows_of(0, 1)
    share.passes.describe(FeedSchema(1, first.schema.serialize().to_pybytes(), first_lengths(first)))
    share.passes.begin(FeedBegins(1, 1, False))
    share.passes.end(FeedEnds(1, 0, 0))
    dataset = share.dataset(4, x="x", y="label")
    assert list(dataset) == []
    assert dataset.element_spec[0] == tf.TensorSpec((None, 3), tf.float32)


@pytest.mark.parametrize(
    "options", [{"columns": ["labl"]}, {"x": "labl"}, {"x": "x", "y": "labl"}, {"fill": {"labl": 0}}]
)
def test_a_missing_column_is_named_with_the_most_similar_column(share: Share, options: dict[str, Any]) -> None:
    share.feed([rows_of(0, 2)])
    with pytest.raises(
        FeedFailed, match="no column 'labl' .* they have id, x, label, weight, name; did you mean 'label'"
    ):
        share.dataset(2, **options)


def test_a_missing_column_unlike_all_others_gets_no_suggestion(share: Share) -> None:
    share.feed([rows_of(0, 2)])
    with pytest.raises(FeedFailed, match="no column 'qqqq' .* they have id, x, label, weight, name$"):
        share.dataset(2, columns=["qqqq"])


def test_an_unused_column_may_have_a_type_without_a_tensor(share: Share) -> None:
    block = pa.RecordBatch.from_pydict({"id": [1, 2], "when": pa.array([1, 2], pa.timestamp("us"))})
    share.feed([block])
    with pytest.raises(FeedFailed, match="column 'when' is timestamp"):
        share.dataset(2)
    assert ids_of(share.dataset(2, columns=["id"])) == [1, 2]


def test_nulls_are_replaced_if_a_fill_is_given(share: Share) -> None:
    share.feed([pa.RecordBatch.from_pydict({"id": [1, None], "x": [[1.0, 2.0], None]})])
    [batch] = share.dataset(2, fill={"id": -1, "x": 0.5}).as_numpy_iterator()
    assert batch["id"].tolist() == [1, -1]
    assert batch["x"].tolist() == [[1.0, 2.0], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"id": [None, 2], "x": [0.5, 0.5]}, "column 'id' has a null"),
        ({"id": [1, 2]}, "this feed has no column 'x'; it has id: feed rows with the columns"),
        ({"id": [1, 2], "x": [1, 2]}, "column 'x' is int64 here, and was float64"),
    ],
    ids=["null", "missing column", "another type"],
)
def test_a_later_feed_with_another_schema_fails_and_names_the_column(
    share: Share, later: dict[str, Any], message: str
) -> None:
    share.feed([pa.RecordBatch.from_pydict({"id": [1, 2], "x": [0.5, 1.5]})])
    dataset = share.dataset(2)
    assert ids_of(dataset) == [1, 2]
    share.feed([pa.RecordBatch.from_pydict(later)])
    with pytest.raises(tf.errors.OpError, match=message):
        ids_of(dataset)
    assert [message in str(failure) for failure in share.failures] == [True]


def test_a_later_feed_may_have_its_columns_in_a_different_order(share: Share) -> None:
    share.feed([pa.RecordBatch.from_pydict({"id": [1, 2], "x": [0.5, 1.5]})])
    dataset = share.dataset(2)
    ids_of(dataset)
    share.feed([pa.RecordBatch.from_pydict({"x": [2.5], "more": [0], "id": [3]})])
    [batch] = dataset.as_numpy_iterator()
    assert (batch["id"].tolist(), batch["x"].tolist()) == ([3], [2.5])


def test_a_dataset_without_any_feed_says_how_to_feed(share: Share) -> None:
    share.passes.close()
    with pytest.raises(FeedFailed, match=r"no rows will come.*cluster\.train\(df\)"):
        share.dataset(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more, got 0"),
        ({"batch_size": 1, "shuffle": "a"}, "shuffle must be a whole number, 0 or more, got 'a'"),
        ({"batch_size": 1, "prefetch": -1}, "prefetch must be a whole number, 0 or more, got -1"),
        ({"batch_size": 1, "fill": 3}, "fill must be a dictionary, as in fill={'age': 0}"),
        ({"batch_size": 1, "columns": "age"}, "columns must be a list of columns"),
        ({"batch_size": "validation"}, r"ctx\.dataset\('validation'\): .* are ctx\.validation\(64, …\)"),
        ({"batch_size": 2.5}, "batch_size must be .*, got 2.5"),
        ({"batch_size": True}, "batch_size must be .*, got True"),
        ({"batch_size": 2, "y": "label"}, "y and sample_weight need x"),
        ({"batch_size": 2, "sample_weight": "weight"}, "y and sample_weight need x"),
        ({"batch_size": 2, "x": "x", "columns": ["x"]}, "either columns .* or x and y"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DatasetOptions(**options)
