"""Convert rows to a model's arrays and back; keep one model per Python process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tests.conftest import RunScript
from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.models.inputs import Feed, Where, incomplete_rows
from tfos_nb.runtime.models.model_cache import StoredModel
from tfos_nb.runtime.models.scoring import ScoreTask, rebatched
from tfos_nb.runtime.models.signature import Signature, Tensor

VECTOR = pa.struct(
    {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}
)


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size: int, **entries: float) -> dict[str, Any]:
    indices = [int(key[1:]) for key in entries]
    return {"type": 0, "size": size, "indices": indices, "values": list(entries.values())}


def array(values: Any, dtype: str, *shape: int | None) -> np.ndarray[Any, Any]:
    column = values if isinstance(values, pa.Array) else pa.array(values)
    return Feed(Tensor("x", dtype, shape), (0,), ("c",)).array([column])


def refusal(values: Any, dtype: str, *shape: int | None) -> str:
    with pytest.raises(FeedFailed) as raised:
        array(values, dtype, *shape)
    return str(raised.value)


# --- batches


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 9))
def test_batches_have_the_requested_size(sizes: list[int], size: int) -> None:
    numbers = iter(range(1000))
    batches = [
        pa.RecordBatch.from_pydict({"n": pa.array([next(numbers) for _ in range(n)], pa.int64())}) for n in sizes
    ]
    cut = list(rebatched(iter(batches), size))
    assert [n for batch in cut for n in batch["n"].to_pylist()] == list(range(sum(sizes)))
    assert all(batch.num_rows == size for batch in cut[:-1])
    assert not cut or 0 < cut[-1].num_rows <= size


# --- columns become tensors


def test_numbers_are_converted_to_the_type_of_their_input() -> None:
    assert array([1, 2], "float32").tolist() == [1.0, 2.0]
    assert array([1.0, 3.0], "int32").dtype == np.int32
    assert array([Decimal("1.25")], "float64").tolist() == [1.25]
    assert array([[Decimal("1.25"), Decimal(2)]], "float32", 2).tolist() == [[1.25, 2.0]]
    assert array([True, False], "float32").tolist() == [1.0, 0.0]
    assert array([1, 2], "float32", 1).shape == (2, 1)
    assert array([1, 2], "float32", None).shape == (2, 1)


@pytest.mark.parametrize(
    ("values", "dtype", "culprit"),
    [
        ([1.0, 2.5], "int32", "2.5"),
        ([float("nan")], "int64", "nan"),
        ([1, 2**31], "int32", "2147483648"),
        ([0, -1], "uint8", "-1"),
        ([0, 2], "bool", "2"),
    ],
)
def test_a_value_that_the_input_cannot_hold_is_named(values: Any, dtype: str, culprit: str) -> None:
    row = len(values) - 1
    assert refusal(values, dtype) == (
        f"column 'c' has the value {culprit} (row {row} of partition 0), which input 'x', {dtype}, cannot hold: round "
        "or filter it in Spark"
    )


def test_text_and_bytes_become_bytes() -> None:
    assert array(["ä", "b"], "string").tolist() == ["ä".encode(), b"b"]
    assert array([b"\xff"], "string").tolist() == [b"\xff"]
    assert array([["a", "b"]], "string", 2).tolist() == [[b"a", b"b"]]


def test_a_float_that_the_inputs_type_cannot_hold_is_reported() -> None:
    assert refusal([[1.0, 2.0], [float("inf"), -1e300]], "float32", 2) == (
        "column 'c' has the value -1e+300 (row 1 of partition 0), which input 'x', float32, cannot hold: scale or "
        "filter it in Spark"
    )
    assert "has the value 70000 (row 1 of" in refusal([1, 70000], "float16")
    assert np.isinf(array([1.0, float("inf")], "float32")).tolist() == [False, True]


def test_columns_are_stacked_side_by_side() -> None:
    batch = pa.RecordBatch.from_pydict({"c0": [9, 9], "c1": [1, 2], "c2": [0.5, 0.25]})
    assert Feed(Tensor("x", "float32", (2,)), (1, 2), ("a", "b")).array(batch.columns).tolist() == [[1, 0.5], [2, 0.25]]
    with pytest.raises(FeedFailed, match="column 'b' has the value 0.5"):
        Feed(Tensor("x", "int32", (2,)), (1, 2), ("a", "b")).array(batch.columns)


def test_a_flat_list_is_reshaped_to_the_axes_of_its_input() -> None:
    assert array([[1, 2, 3, 4]], "int64", 2, 2).tolist() == [[[1, 2], [3, 4]]]
    assert array([[[1], [2]]], "int64", 2, 1).tolist() == [[[1], [2]]]
    assert "has a list of 3 values, [1, 2, 3], where the model takes 4 (row 0 of" in refusal([[1, 2, 3]], "int64", 2, 2)


def test_lists_of_a_different_length_are_reported_with_both_lengths() -> None:
    assert refusal([[1, 2], [1, 2, 3]], "float32", 2) == (
        "column 'c' has a list of 3 values, [1, 2, 3], where the model takes 2 (row 1 of partition 0): pad or cut it "
        "in Spark, or leave such rows out"
    )
    assert "has a list of 1 values, [1], where another row of its batch has 2 (row 1 of" in refusal(
        [[1, 2], [1]], "float32", None
    )
    assert "has a list of 1 values, [1], where the model takes 2 (row 1 of" in refusal(
        [[[1, 2]], [[1]]], "float32", None, 2
    )


@pytest.mark.parametrize(
    ("values", "shape", "where"),
    [
        ([1, None], (), ""),
        ([[1], None], (1,), ""),
        ([[1, None]], (2,), " in its lists"),
        ([[[1], None]], (2, 1), " in its lists"),
    ],
)
def test_a_null_is_reported_with_its_column(values: Any, shape: tuple[int, ...], where: str) -> None:
    told = refusal(values, "float32", *shape)
    row = len(values) - 1
    assert told.startswith(f"column 'c' has a null{where} (row {row} of partition 0), and a tensor has none: fill it")
    assert "df.dropna(subset=['c'])" in told


def test_vectors_become_dense_in_any_slice_of_a_batch() -> None:
    rows = [dense(1, 2, 3), sparse(3, i2=5.0), sparse(3), dense(4, 5, 6), sparse(3, i0=7.0, i1=8.0)]
    expected = [[1, 2, 3], [0, 0, 5], [0, 0, 0], [4, 5, 6], [7, 8, 0]]
    whole = pa.array(rows, VECTOR)
    for start in range(5):
        for stop in range(start + 1, 6):
            found = array(whole.slice(start, stop - start), "float32", 3)
            assert (found.dtype, found.tolist()) == (np.dtype("float32"), expected[start:stop])
    assert array(whole, "float32", None).tolist() == expected
    assert array(pa.array([dense(1, 2, 3, 4)], VECTOR), "float32", 2, 2).tolist() == [[[1, 2], [3, 4]]]


def test_a_missing_vector_and_one_of_another_length_are_reported() -> None:
    assert "has a list of 4 values, {1: 5.0}, where the model takes 3" in refusal(
        pa.array([sparse(4, i1=5.0)], VECTOR), "float32", 3
    )
    assert "column 'c' has a null (row 1 of partition 0), and" in refusal(
        pa.array([dense(1.0), None], VECTOR), "float32", 1
    )


# --- nulls


def filled(values: Any, dtype: str, *shape: int | None, fill: Any) -> np.ndarray[Any, Any]:
    column = values if isinstance(values, pa.Array) else pa.array(values)
    return Feed(Tensor("x", dtype, shape), (0,), ("c",), fill).array([column])


def test_nulls_are_filled_at_every_depth() -> None:
    assert filled([1, None], "int32", fill=7).tolist() == [1, 7]
    assert filled([None, [1.0, None]], "float32", 2, fill=5).tolist() == [[5, 5], [1, 5]]
    assert filled([[[1.0], None], None], "float32", 2, 1, fill=0).tolist() == [[[1], [0]], [[0], [0]]]
    assert filled(pa.array([[None], None], pa.list_(pa.int8())), "float32", None, fill=2).tolist() == [[2], [2]]
    assert filled(pa.array([None, None], pa.list_(pa.float32())), "float32", 3, fill=1).tolist() == [[1] * 3] * 2
    assert filled(["a", None], "string", fill="?").tolist() == [b"a", b"?"]
    assert filled(pa.array([dense(1, 2), None], VECTOR), "float32", 2, fill=9).tolist() == [[1, 2], [9, 9]]


def test_a_fill_value_of_another_type_is_reported() -> None:
    small = pa.array([1, None], pa.int8())
    cases: list[tuple[Any, str, Any]] = [
        ([1, None], "int32", 0.5),
        ([1, None], "float32", float("nan")),
        (small, "float32", 300),
        (small, "float32", float("inf")),
        ([1.0, None], "float32", "x"),
        (["a", None], "string", 0),
    ]
    for values, dtype, fill in cases:
        with pytest.raises(
            FeedFailed, match=r"column 'c' has a null, and .* to fill it is not a .* \(row 1 of partition 0\)"
        ):
            filled(values, dtype, fill=fill)


@given(st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=9))
def test_rows_with_a_null_anywhere_are_found(values: list[Any]) -> None:
    column = pa.array([None, *values, [None, 1]], pa.list_(pa.int64())).slice(1, len(values))  # with an offset
    found = incomplete_rows([column])
    expected = [value is None or None in value for value in values]
    assert (found is None and not any(expected)) or (found is not None and found.tolist() == expected)


def test_row_numbers_in_errors_count_nulls_and_removed_rows() -> None:
    feed = Feed(Tensor("x", "float32", (2,)), (0,), ("c",), 0)
    with pytest.raises(FeedFailed, match=r"\(row 12 of partition 3\)"):
        feed.array([pa.array([None, [1, 2], [1]])], Where(3, 10))
    with pytest.raises(FeedFailed, match=r"\(row 15 of partition 3\)"):
        feed.array([pa.array([[1, 2], [1]])], Where(3, 10, np.array([0, 5])))


# --- the model of a process

PREPARE = """
    import gc, multiprocessing, os, weakref, sys
    from concurrent.futures import ProcessPoolExecutor
    import pyarrow as pa
    from tfos_nb.errors import FeedFailed
    from tfos_nb.runtime.models import model_cache
    from tfos_nb.runtime.models.model import Use
    from tfos_nb.runtime.models.signature import Signature, Tensor
    from tfos_nb.runtime.models.inputs import Feed
    from tfos_nb.runtime.models.scoring import ScoreTask
    from tfos_nb.runtime.models.model_cache import StoredModel, TaskResources, ModelCache
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    assert "tensorflow" not in sys.modules
"""


MODEL_CACHE = (
    PREPARE
    + """
    cache = ModelCache()
    def save(name, units):
        import keras
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)]).save(name)
"""
)


def test_a_process_keeps_one_model_and_reloads_it_after_a_change(run_script: RunScript) -> None:
    run_script(
        MODEL_CACHE
        + """
    try:
        cache.take(StoredModel("a.keras"), TaskResources())
    except Exception as error:
        assert "does not exist" in str(error), error
    assert "tensorflow" not in sys.modules
    save("a.keras", 1), save("b.keras", 2)
    first = cache.take(StoredModel("a.keras"), TaskResources())
    assert cache.take(StoredModel("a.keras"), TaskResources()) is first
    gone = weakref.ref(first)
    del first
    assert len(cache.take(StoredModel("b.keras"), TaskResources()).signature.outputs) == 1
    gc.collect()
    assert gone() is None
    save("b.keras", 3)
    assert cache.take(StoredModel("b.keras"), TaskResources()).signature.outputs[0].shape == (3,)
    """
    )


def test_a_wrong_number_of_arguments_is_reported() -> None:
    signature = Signature((Tensor("x", "float32", (2,)),), (Tensor("y", "float32", ()),))
    task = ScoreTask(StoredModel("nowhere.keras"), signature, None, 8)
    one = pa.array([1.0])
    with pytest.raises(FeedFailed, match=r"the model takes x \(float32 2\), got 3 arguments side by side"):
        list(task.outputs(iter([(one, one, one)])))
    with pytest.raises(FeedFailed, match="the model needs arguments: name the columns"):
        list(task.outputs(iter([()])))


@pytest.mark.slow
def test_garbage_collection_skips_a_loaded_model_which_can_still_be_freed(run_script: RunScript) -> None:
    run_script(
        MODEL_CACHE
        + """
    save("a.keras", 31), save("b.keras", 32)
    import keras
    def looked_through(units):
        return sum(isinstance(thing, keras.layers.Dense) and thing.units == units for thing in gc.get_objects())
    gc.collect()
    assert not looked_through(31)
    cache.take(StoredModel("a.keras"), TaskResources())
    assert gc.get_freeze_count() > 100_000
    assert not looked_through(31), "what Spark's collection after each task has to look at"
    cache.take(StoredModel("b.keras"), TaskResources())
    gc.unfreeze()
    assert looked_through(32) and not looked_through(31), "the first one is gone"
    """
    )


def test_tensorflow_uses_the_gpus_and_cores_of_the_task(run_script: RunScript) -> None:
    run_script(
        PREPARE
        + """
    model_cache._set_up(TaskResources(("2", "3"), 3))
    import tensorflow as tf
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert tf.config.threading.get_intra_op_parallelism_threads() == 3
    assert tf.config.threading.get_inter_op_parallelism_threads() == 3
    model_cache._set_up(TaskResources())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
    """
    )


@pytest.mark.slow
def test_a_task_with_different_gpus_than_its_process_uses_another_process(run_script: RunScript) -> None:
    run_script(
        PREPARE
        + """
    if __name__ == "__main__":
        import keras, numpy as np
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        model.save("m.keras")
        x = np.arange(8, dtype="float32").reshape(4, 2)
        expected = model.predict(x, verbose=0)
        kept = ModelCache()
        for gpus, processes in ((("0",), 0), (("1",), 1), (("0",), 0)):
            model = kept.take(StoredModel("m.keras"), TaskResources(gpus))
            np.testing.assert_allclose(model.apply([x])[0], expected, rtol=1e-6)
            assert len(multiprocessing.active_children()) == processes, (gpus, processes)
        context = multiprocessing.get_context("spawn")
        begin = model_cache._begin_elsewhere, (TaskResources(("1",)), os.getpid())
        with ProcessPoolExecutor(1, context, *begin) as pool:
            assert pool.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() == "1"
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    """
    )


def test_a_model_whose_outputs_differ_from_its_signature_is_reported(run_script: RunScript) -> None:
    ended = run_script(
        PREPARE
        + """
    import tensorflow as tf
    class Odd(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None,), tf.int32, name="n")])
        def raw(self, n):
            return {"y": tf.fill(tf.shape(n), b"\\xff")}
        @tf.function(input_signature=[tf.TensorSpec((None,), tf.int32, name="n")])
        def half(self, n):
            return {"y": n[::2]}
    odd, batch = Odd(), pa.RecordBatch.from_pydict({"c0": [1, 2, 3, 4]})
    tf.saved_model.save(odd, "m", signatures={"serving_default": odd.raw, "half": odd.half})
    feed = Feed(Tensor("n", "int32", ()), (0,), ("n",))
    for name, dtype in (("serving_default", "string"), ("half", "int32"), ("half", "int64"), ("more", "int64")):
        said = Signature((feed.tensor,), (Tensor("y", dtype, ()),))
        try:
            list(ScoreTask(StoredModel("m", Use(name)), said, (feed,), 3)(iter([batch])))
        except FeedFailed as error:
            print(error)
    """
    )
    told = ended.stdout.splitlines()
    assert told[0].startswith("output 'y' has bytes that are not UTF-8 text: let the model encode them")
    assert told[1].startswith("output 'y' must have one value of the declared shape for each row, got 2 for 3 rows")
    assert told[2] == "the model's inputs or outputs changed after it was loaded; call transform() again"
    assert "it has no signature 'more' (it has: " in told[3]


@dataclass(frozen=True)
class CountedPlace(StoredModel):
    """Records which process loads it."""

    diary: str = ""

    @contextlib.contextmanager
    def on_disk(self) -> Iterator[str]:
        with open(self.diary, "a") as file:
            file.write(f"{os.getpid()}\n")
        with super().on_disk() as path:
            yield path


@dataclass(frozen=True)
class CountedTask(ScoreTask):
    """Returns the process in which each row was scored."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in super().__call__(batches):
            yield batch.set_column(0, "pid", pa.array([os.getpid()] * batch.num_rows, pa.int64()))


def test_a_process_loads_the_model_once_for_all_its_tasks(
    spark: SparkSession, run_script: RunScript, tmp_path: Path
) -> None:
    run_script(
        PREPARE
        + """
    import keras
    keras.Sequential([keras.Input((1,), name="x"), keras.layers.Dense(1)]).save("m.keras")
    """
    )
    x = Tensor("x", "float32", (1,))
    signature = Signature((x,), (Tensor("output_0", "float32", (1,)),))
    source = CountedPlace(str(tmp_path / "m.keras"), diary=str(tmp_path / "diary"))
    task = CountedTask(source, signature, (Feed(x, (0,), ("id",)),), 8)
    pids: list[int] = []
    for _ in range(2):
        rows = spark.range(0, 160, 1, 8).mapInArrow(task, "pid long, y float").collect()
        assert len(rows) == 160
        pids += {row.pid for row in rows}
    loads = [int(line) for line in (tmp_path / "diary").read_text().split()]
    assert sorted(loads) == sorted(set(pids))
    assert len(loads) < 16  # 16 tasks
