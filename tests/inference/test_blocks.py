"""TensorFlow functions applied to blocks: new columns, other rows, reductions, and errors."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import IntegerType, StructField, StructType

from tests.conftest import SCRIPT_SECONDS
from tests.saved_models import close, column
from tfos_nb import map_batches, reduce_batches
from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.runtime.code.custom_objects import ModelCode, pack
from tfos_nb.runtime.models.blocks import Function
from tfos_nb.runtime.models.keras_model import keras_model
from tfos_nb.runtime.models.model import WHOLE
from tfos_nb.runtime.models.outputs import column_of
from tfos_nb.runtime.models.signature import Signature, Tensor


def scaled(x):
    return {"total": tf.reduce_sum(x, 1), "double": 2 * x}


def test_a_function_adds_new_columns_to_the_rows(rows, known):
    found = map_batches(rows, scaled, "double array<float>, total double", batch_size=7)
    assert found.dtypes == [*rows.dtypes, ("double", "array<float>"), ("total", "double")]
    assert close(column(found, "double"), known["x"] * 2)
    assert close(column(found, "total"), known["x"].sum(1))


def test_a_single_parameter_receives_a_dictionary_of_all_columns(rows, known):
    found = map_batches(rows, lambda block: block["x"][:, 0] * tf.cast(block["b"], tf.float32), "y float")
    assert close(column(found, "y"), known["x"][:, 0] * known["b"])


def test_several_parameters_receive_several_columns(rows, known):
    found = map_batches(rows, lambda b, id: (b + id, b - id), "plus int, minus bigint")
    assert column(found, "plus").tolist() == (known["b"] + np.arange(50)).tolist()
    assert column(found, "minus").tolist() == (known["b"] - np.arange(50)).tolist()


def test_an_uncompiled_function_may_use_numpy(rows, known):
    found = map_batches(rows, lambda x: np.sort(x.numpy(), 1), "s array<float>", compiled=False)
    assert close(column(found, "s"), np.sort(known["x"], 1))


def test_blocks_have_the_batch_size(spark):
    numbers = spark.range(10).coalesce(1)
    sizes = map_batches(numbers, lambda id: tf.fill(tf.shape(id), tf.size(id)), "n int", batch_size=4)
    assert [row.n for row in sizes.orderBy("id").collect()] == [4] * 8 + [2] * 2


def test_keep_false_lets_a_function_return_other_rows(rows):
    firsts = map_batches(rows, lambda b: {"n": tf.unique(b)[0]}, "n int", keep=False, batch_size=100)
    assert firsts.dtypes == [("n", "int")]
    assert {row.n for row in firsts.collect()} == set(range(5))
    none = map_batches(rows, lambda b: b[:0], "n int", keep=False)
    assert none.collect() == []


def test_text_vectors_and_nested_arrays_are_accepted(spark):
    words = spark.createDataFrame([(0, "ab", [["a"], ["b"]])], "id int, word string, nested array<array<string>>")
    found = map_batches(
        words, lambda word, nested: (tf.strings.upper(word), nested), "u string, n array<array<string>>"
    )
    assert found.first()[3:] == ("AB", [["a"], ["b"]])
    vectors = spark.createDataFrame([(0, Vectors.dense(1, 2)), (1, Vectors.sparse(2, [1], [5.0]))], ["id", "v"])
    assert column(map_batches(vectors, lambda v: v * 2, "w array<double>"), "w").tolist() == [[2, 4], [0, 10]]


@pytest.mark.slow
def test_column_names_may_contain_a_dot(rows, known):
    dotted = rows.select("id", rows.b.alias("b.c"))
    found = map_batches(dotted, lambda block: block["b.c"] + 1, "n int")
    assert column(found, "n").tolist() == (known["b"] + 1).tolist()
    assert map_batches(dotted, lambda block: block["b.c"], "n int", keep=False).count() == 50
    assert reduce_batches(dotted.drop("id"), lambda block: {"b.c": tf.reduce_max(block["b.c"])}) == {"b.c": 4}
    by = reduce_batches(dotted, lambda id: tf.reduce_min(id), by="b.c")
    assert sorted(tuple(row) for row in by.collect()) == [(i, i) for i in range(5)]


def words(t):
    return tf.strings.split(t)


def test_ragged_results_become_columns_of_arrays(spark):
    texts = spark.createDataFrame([(0, "a b"), (1, "c"), (2, "")], "id int, t string")
    found = map_batches(texts, words, "w array<string>", batch_size=2)
    assert [row.w for row in found.orderBy("id").collect()] == [["a", "b"], ["c"], []]


TEXTS = np.array([b"a b", b"c", b""], object)


def column_given(fn: Any, wanted: tuple[None, ...], kind: str = "string", **how: Any) -> list[Any]:
    """Return the column that an executor makes from a function of three texts."""
    given = Tensor("y", kind, wanted)
    source = Function(
        "fn()", pack(ModelCode(function=fn)), Signature((Tensor("t", "string", ()),), (given,)), False, **how
    )
    (output,) = source.reader("")().apply([TEXTS])
    found: list[Any] = column_of(output, given, len(TEXTS)).to_pylist()
    return found


def test_ragged_and_sparse_results_of_any_depth_become_lists():
    deep = column_given(lambda t: tf.strings.bytes_split(tf.strings.split(t)), (None, None))
    assert deep == [[["a"], ["b"]], [["c"]], []]
    pairs = column_given(
        lambda t: tf.RaggedTensor.from_row_lengths(tf.ones((4, 2)), [1, 0, 3]), (None, None), "float32"
    )
    assert pairs == [[[1, 1]], [], [[1, 1]] * 3]
    sparse = column_given(lambda t: tf.sparse.from_dense(tf.eye(tf.size(t))), (None,), "float32")
    assert sparse == np.eye(3).tolist()


def test_errors_of_ragged_results_name_the_function():
    with pytest.raises(
        Exception, match=r"fn\(\) must return 1 axes for 'y', as declared in its schema, got a ragged tensor of 2:"
    ):
        column_given(words, ())
    with pytest.raises(Exception, match=r"fn\(\) is a reduction and must return a dense tensor for 'y', got a ragged"):
        column_given(words, (), rows=False)
    told = r"fn\(\) must return a tensor for 'y', got a list .*: return a tensor, an array, or lists of one length"
    with pytest.raises(Exception, match=told):
        column_given(lambda t: {"y": [["a"], ["b", "c"]]}, (None,), compiled=False)


def test_nulls_follow_the_policy(spark):
    frame = spark.createDataFrame([(0, 1.0), (1, None), (2, 3.0)], "id int, v double").coalesce(1)
    with pytest.raises(Exception, match=r"column 'v' has a null \(row 1 of partition 0\)"):
        map_batches(frame, lambda v: v + 1, "w double").collect()
    skipped = map_batches(frame, lambda v: v + 1, "w double", nulls="skip")
    assert [(row.id, row.w) for row in skipped.orderBy("id").collect()] == [(0, 2.0), (2, 4.0)]
    filled = map_batches(frame, lambda v: v + 1, "w double", nulls="fill", fill=9)
    assert column(filled, "w").tolist() == [2, 10, 4]
    assert reduce_batches(frame, lambda v: tf.reduce_sum(v), nulls="skip") == {"v": 4.0}


@pytest.mark.slow
def test_a_stream_is_mapped(spark, rows, tmp_path):
    rows.write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(rows.schema).parquet(str(tmp_path / "in"))
    query = map_batches(stream, lambda b: b + 1, "c int").writeStream.format("memory").queryName("mapped")
    running = query.trigger(availableNow=True).start()
    assert running.awaitTermination(SCRIPT_SECONDS)
    assert running.exception() is None
    assert spark.table("mapped").where("c = b + 1").count() == 50


# --- reductions


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_all_rows_are_reduced_to_one(size, rows, known):
    found = reduce_batches(rows.select("x"), lambda x: tf.reduce_sum(x, 0), batch_size=size)
    assert close(found["x"], known["x"].sum(0))


def test_several_columns_are_reduced_together(rows, known):
    found = reduce_batches(rows, lambda b, x: {"x": tf.reduce_max(x, 0), "b": tf.reduce_min(b)})
    assert (found["b"], found["b"].dtype) == (0, np.int32)
    assert close(found["x"], known["x"].max(0))


@pytest.mark.parametrize("size", [3, 1000])
def test_rows_are_reduced_by_key(size, rows, known):
    found = reduce_batches(rows.select("b", "x"), lambda x: tf.reduce_sum(x, 0), by="b", batch_size=size)
    assert found.dtypes == [("b", "int"), ("x", "array<float>")]
    by_key = {row.b: row.x for row in found.collect()}
    assert sorted(by_key) == [0, 1, 2, 3, 4]
    for key, value in by_key.items():
        assert close(value, known["x"][known["b"] == key].sum(0))


def test_nulls_nans_and_several_columns_can_be_keys(spark):
    nan = float("nan")
    values = [("a", 1.0, 1), ("a", 1.0, 2), ("a", nan, 4), ("a", nan, 8), (None, 1.0, 16), (None, 1.0, 32)]
    values += [("b", 0.0, 64), ("b", -0.0, 128)]  # one key, as in Spark's groupBy
    frame = spark.createDataFrame(values * 3, "k string, f double, v bigint").repartition(4)
    found = reduce_batches(frame, lambda v: tf.reduce_sum(v), by=["k", "f"], batch_size=2).collect()
    assert sorted(row.v for row in found) == [9, 36, 144, 576]


def test_reducing_no_rows_fails_and_by_key_returns_no_rows(rows):
    with pytest.raises(FeedFailed, match="the DataFrame has no rows, so it cannot be reduced"):
        reduce_batches(rows.where("id < 0"), lambda b: tf.reduce_sum(b))
    assert reduce_batches(rows.where("id < 0"), lambda x: tf.reduce_sum(x, 0), by="b").collect() == []


# --- errors


def test_unsuitable_functions_are_refused_before_any_job_runs(rows):
    dated = rows.select(F.current_date().alias("d"))
    cases: list[tuple[Any, ...]] = [
        (rows, lambda x, z: x, "y float", "fn takes 'z', which is not a column; there are id, x, b. A function"),
        (rows, 5, "y float", "fn must be a function that takes columns as tensors, got a int"),
        (rows, lambda: 1, "y float", "fn takes no column"),
        (rows, lambda x: x, "y date", "schema: 'y' is date; a tensor becomes a number"),
        (rows, lambda x: x, "y what ever", "schema must be as in"),
        (rows, lambda x: x, "b array<float>", "the DataFrame has a column 'b' already"),
        (rows, lambda x: x, "B array<float>", "the DataFrame has a column 'B' already"),
        (rows, lambda x: x, "y array<float>, Y int", "the schema has two columns 'y': rename one"),
        (rows, lambda x: x, "float", "schema='float' is a type without a column: name one, as in 'y float'"),
        (rows, lambda x: x, None, "schema must be as in 'y float, z array<long>', got None"),
        (dated, lambda d: d, "y float", "column 'd' is date, for which TensorFlow has no tensor: cast it"),
        (rows, keras.Sequential([keras.Input((4,))]), "y float", "fn is a Sequential: a model is applied by predict"),
    ]
    for df, fn, schema, told in cases:
        with pytest.raises(PlanError) as raised:
            map_batches(df, fn, schema)
        assert told in str(raised.value)
    with pytest.raises(PlanError, match="by: no column 'bb'; did you mean 'b'"):
        reduce_batches(rows, lambda x: x, by="bb")
    with pytest.raises(PlanError, match="by: column 'x' is array<float>, and a key must be one value"):
        reduce_batches(rows, lambda b: b, by="x")
    with pytest.raises(PlanError, match="reduce_batches cannot use a stream"):
        reduce_batches(rows.sparkSession.readStream.format("rate").load(), lambda value: value)
    frame = rows
    with pytest.raises(PlanError, match="an object that it refers to cannot be sent to the executors"):
        map_batches(rows, lambda x: frame, "y float")


@pytest.mark.slow
def test_results_that_do_not_match_the_schema_are_refused(rows):
    one = rows.coalesce(1)  # one task, since Spark tries each failing task four times
    with pytest.raises(Exception, match=r"<lambda>\(\) must return its schema's y, got z"):
        map_batches(one, lambda x: {"z": x}, "y array<float>", batch_size=10).collect()
    with pytest.raises(
        Exception, match=r"output 'y' must have one value of the declared shape for each row, got 1x4 for"
    ):
        map_batches(one, lambda x: x[:1], "y array<float>", batch_size=10).collect()
    with pytest.raises(Exception, match="the result of a reduction has no axis of rows"):
        reduce_batches(one, lambda x: tf.expand_dims(x, 0))


def applied(fn: Any, kind: str, **how: Any) -> Any:
    """Apply a function as an executor does, to the numbers 1.0 and 2.5."""
    signature = Signature((Tensor("x", "float32", ()),), (Tensor("y", kind, ()),))
    source = Function("fn()", pack(ModelCode(function=fn)), signature, False, **how)
    (given,) = source.reader("")().apply([np.array([1, 2.5], np.float32)])
    return given.tolist()


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda x: (x, x), r"must return its schema's y, got 2 tensors"),
        (lambda x: tf.stack([x, x], axis=1), r"must return 1 axes for 'y', as declared in its schema, got 2x2"),
        (tf.strings.as_string, r"must return float32 for 'y', got string"),
    ],
)
def test_errors_of_results_name_the_function_and_the_schema(fn: Any, told: str) -> None:
    with pytest.raises(Exception, match=told):
        applied(fn, "float32")


def test_a_float_is_not_truncated_to_an_integer():
    told = r"FeedFailed: fn\(\) must return int32 for 'y', got float32: cast it in the function"
    with pytest.raises(Exception, match=told):  # TensorFlow wraps it in its own error
        applied(lambda x: x, "int32")
    with pytest.raises(Exception, match=told):
        applied(lambda x: tf.reduce_mean(x, 0), "int32", rows=False)
    assert applied(lambda x: tf.cast(x, tf.int64), "int32") == [1, 2]
    assert applied(lambda x: tf.cast(x, tf.int64), "float64") == [1, 2]


def test_a_function_that_returns_nothing_is_refused():
    for compiled in (True, False):
        with pytest.raises(Exception, match=r"fn\(\) must return a tensor for 'y', got None"):
            applied(lambda x: None, "float32", compiled=compiled)


def positive(x: Any) -> Any:
    if tf.reduce_all(x > 0):
        return x
    return -x


def test_no_source_file_of_autograph_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert applied(positive, "float32") == [1.0, 2.5]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    (given,) = keras_model(model, WHOLE).apply([np.ones((2, 1), np.float32)])
    assert given.tolist() == [[1.0], [1.0]]
    assert list(tmp_path.iterdir()) == []


def test_a_module_beside_the_notebook_is_sent_to_the_executors(rows, known, tmp_path, monkeypatch):
    folder = tmp_path / "beside"
    folder.mkdir()
    text = "FACTOR = 3\ndef scaled(b):\n    return b * FACTOR if b[0] >= 0 else b * FACTOR\n"
    (folder / "my_scaling.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    scaled = importlib.import_module("my_scaling").scaled
    try:
        found = map_batches(rows, lambda b: scaled(b), "y int")
        assert column(found, "y").tolist() == (known["b"] * 3).tolist()
    finally:
        del sys.modules["my_scaling"]


def test_a_last_parameter_keeps_its_default(rows, known):
    found = map_batches(rows, lambda b, factor=3: b * factor, "y int")
    assert column(found, "y").tolist() == (known["b"] * 3).tolist()


def test_by_none_means_no_key(rows, known):
    assert reduce_batches(rows, lambda b: tf.reduce_sum(b, 0), by=None)["b"] == known["b"].sum()


def test_the_schema_may_be_a_struct_type(rows, known):
    schema = StructType([StructField("c", IntegerType())])
    assert column(map_batches(rows, lambda b: b * 2, schema), "c").tolist() == (known["b"] * 2).tolist()
