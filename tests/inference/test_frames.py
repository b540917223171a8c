"""Models applied to DataFrames on real executors: the same numbers as in one process, and clear errors."""

from __future__ import annotations

import importlib.util
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import IntegerType, StructField, StructType

from tests.conftest import SCRIPT_SECONDS, RunScript
from tests.saved_models import column, make_models
from tests.versions import SPARK, arrow_udfs
from tfos_nb.errors import PlanError
from tfos_nb.inference.frames import predict
from tfos_nb.magics import applying

ROWS = 50

# The parts that need TensorFlow: the models, and the results of Keras' own predict for the same rows.
MAKE_MODELS = """
import importlib.util, keras, numpy as np, os, tensorflow as tf
from keras import Input, Model, layers

numbers = np.random.default_rng(3)
x = numbers.normal(size=({rows}, 4)).astype("float32")
b = (np.arange({rows}) % 5).astype("int32")
keras.utils.set_random_seed(3)

given = Input((4,), name="x")
dense = Model(given, layers.Dense(3, activation="softmax")(given))
dense.save("dense.keras"), dense.save("dense.h5"), dense.export("dense", verbose=False)

one = keras.Sequential([Input((4,), name="x"), layers.Dense(1)])
one.save("one.keras")
Model(given, layers.Reshape(())(one(given))).save("flat.keras")

left, right = Input((4,), name="left"), Input((), name="right", dtype="int32")
far = layers.Dense(2, name="far")(layers.Concatenate()([left, layers.Embedding(5, 2)(right)]))
pair = Model([left, right], [far, layers.Dense(1, name="near")(far)])
pair.save("pair.keras"), pair.export("pair", verbose=False)
Model({{"b": right, "a": left}}, {{"p": far, "q": pair.outputs[1]}}).save("named.keras")

picture = Input((2, 2, 1), name="picture")
image = Model(picture, layers.Conv2D(3, 1)(picture))
image.save("image.keras")

words = Input((), dtype="string", name="word")
Model(words, layers.StringLookup(vocabulary=["a", "b"])(words)).export("words", verbose=False)
Model(words, layers.StringLookup(vocabulary=["a", "b"])(words)).save("words.keras")

steps = Input((None, 2), name="steps")
Model(steps, layers.LSTM(3, return_sequences=True)(steps)).save("steps.keras")

of_keras_2 = {{}}
if importlib.util.find_spec("tf_keras"):
    import tf_keras
    old = tf_keras.Sequential([tf_keras.Input((4,), name="x"), tf_keras.layers.Dense(2)])
    old.save("old.keras")
    of_keras_2["old"] = old.predict(x, verbose=0)

@keras.saving.register_keras_serializable()
class Twice(layers.Layer):
    def call(self, inputs):
        return 2 * inputs

twice = keras.Sequential([Input((4,)), Twice()])
twice.save("twice.keras"), twice.export("twice", verbose=False)
keras.Sequential([Input((4,)), layers.Lambda(lambda inputs: 2 * inputs)]).save("lambda.keras")
dense.save_weights("only.weights.h5")
for folder in ("other", "empty"):
    os.mkdir(folder)
open("other/m.pth", "w").close()

TYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64",
         "uint8", "uint16", "uint32", "uint64", "bool"]

class Kinds(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int32, name="n")])
    def kinds(self, n):
        text = tf.strings.as_string(n)
        cast = {{f"as_{{t}}": tf.cast(n, t) for t in TYPES}}
        return {{**cast, "as_string": text, "lists": tf.stack([text, text], 1)}}

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int32, name="n")])
    def bytes(self, n):
        return {{"raw": tf.fill(tf.shape(n), b"\\xff")}}

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int32, name="n")])
    def total(self, n):
        return {{"total": tf.reshape(tf.reduce_sum(n), [1])}}

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int32, name="n")])
    def spectrum(self, n):
        return {{"z": tf.complex(tf.cast(n, tf.float32), 0.0)}}

    @tf.function(input_signature=[tf.TensorSpec((8, 2), tf.float32, name="n")])
    def eight(self, n):
        return {{"n": n}}

kinds = Kinds()
for name in ("kinds", "bytes", "spectrum", "eight"):
    tf.saved_model.save(kinds, name, signatures=getattr(kinds, name))
tf.saved_model.save(kinds, "unserved")

by_keras = pair.predict([x, b], verbose=0, batch_size=7)
np.savez(
    "expected.npz", x=x, b=b, dense=dense.predict(x, verbose=0, batch_size=7), one=one.predict(x, verbose=0),
    far=by_keras[0], near=by_keras[1], image=image.predict(x.reshape(-1, 2, 2, 1), verbose=0),
    **of_keras_2, steps=keras.models.load_model("steps.keras").predict(x.reshape(-1, 2, 2), verbose=0),
)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), MAKE_MODELS.format(rows=ROWS))


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(models / "expected.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def frame(spark: SparkSession, expected: dict[str, Any]) -> DataFrame:
    """Rows for the models in three partitions: an id, the array x of 4, and the integer b."""
    rows = [(i, x.tolist(), int(b)) for i, (x, b) in enumerate(zip(expected["x"], expected["b"], strict=True))]
    return spark.createDataFrame(rows, "id int, x array<float>, b int").repartition(3).cache()


def close(found: Any, expected: Any) -> bool:
    assert np.shape(found) == np.shape(expected)
    return bool(np.allclose(found, expected, rtol=1e-6, atol=1e-6))


def refusal(df: DataFrame, model: Any, **options: Any) -> str:
    with pytest.raises(PlanError) as raised:
        predict(df, model, **options)
    return str(raised.value)


def failure(scored: DataFrame) -> str:
    with pytest.raises(Exception, match="FeedFailed") as raised:
        scored.collect()
    return str(raised.value)


# --- results


@pytest.mark.parametrize("model", ["dense.keras", "dense.h5", "dense"])
def test_every_kind_of_model_gives_what_keras_predict_gives(model, frame, models, expected):
    scored = predict(frame, models / model)
    assert scored.dtypes == [*frame.dtypes, ("prediction", "array<float>")]
    assert close(column(scored), expected["dense"])


def test_a_model_of_keras_2_is_loaded_by_keras_2(frame, models, expected):
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("there is no tf_keras for this TensorFlow yet")
    assert close(column(predict(frame, str(models / "old.keras"))), expected["old"])


@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(1000, marks=pytest.mark.slow)]
)
def test_batches_of_any_size_give_the_same_results(size, frame, models, expected):
    assert close(column(predict(frame, models / "dense.keras", batch_size=size)), expected["dense"])


@pytest.mark.parametrize("model", ["one.keras", pytest.param("flat.keras", marks=pytest.mark.slow)])
def test_one_value_per_row_becomes_a_number(model, frame, models, expected):
    scored = predict(frame, models / model, output="y")
    assert scored.dtypes[-1] == ("y", "float")
    assert close(column(scored, "y"), expected["one"][:, 0])


@pytest.mark.parametrize("model", ["pair.keras", pytest.param("pair", marks=pytest.mark.slow)])
@pytest.mark.parametrize("inputs", [["x", "b"], {"right": "b", "left": "x"}], ids=["list", "dict"])
def test_several_inputs_and_outputs_have_separate_columns(model, inputs, frame, models, expected):
    scored = predict(frame, models / model, inputs=inputs, output="p")
    far, near = scored.columns[-2:]
    assert (far, near) == (("p_far", "p_near") if model.endswith("keras") else ("p_output_0", "p_output_1"))
    assert dict(scored.dtypes)[far] == "array<float>"
    assert dict(scored.dtypes)[near] == "float"
    assert close(column(scored, far), expected["far"])
    assert close(column(scored, near), expected["near"][:, 0])


def test_inputs_are_matched_to_columns_by_name(frame, models, expected):
    renamed = frame.withColumnsRenamed({"x": "left", "b": "right"})
    assert close(column(predict(renamed, models / "pair.keras"), "prediction_far"), expected["far"])


def test_dictionaries_of_inputs_and_outputs_define_their_names(frame, models, expected):
    scored = predict(frame, models / "named.keras", inputs={"a": "x", "b": "b"})
    assert scored.columns[-2:] == ["prediction_p", "prediction_q"]
    assert close(column(scored, "prediction_p"), expected["far"])


def test_numeric_columns_are_concatenated_into_one_input(frame, models, expected):
    wide = frame.select("id", *(frame.x[i].cast("double").alias(f"x{i}") for i in range(4)))
    scored = predict(wide, models / "dense.keras", inputs=["x0", "x1", "x2", "x3"])
    assert close(column(scored), expected["dense"])


def test_dense_and_sparse_vectors_are_taken(spark, models, expected):
    x = expected["x"].copy()
    x[::2, 1:3] = 0
    rows = [
        (i, Vectors.sparse(4, [0, 3], [float(r[0]), float(r[3])]) if i % 2 == 0 else Vectors.dense(r.tolist()))
        for i, r in enumerate(x)
    ]
    schema = StructType([StructField("id", IntegerType()), StructField("features", VectorUDT())])
    vectors = spark.createDataFrame(rows, schema)
    arrays = spark.createDataFrame([(i, r.tolist()) for i, r in enumerate(x)], "id int, x array<float>")
    scored = predict(vectors, models / "dense.keras", batch_size=6)  # the only column that fits
    assert scored.schema["features"].dataType == VectorUDT()
    assert close(column(scored), column(predict(arrays, models / "dense.keras")))
    assert scored.select("features").collect() == vectors.select("features").collect()


@pytest.mark.parametrize("shape", ["nested", "flat", pytest.param("vector", marks=pytest.mark.slow)])
def test_an_input_of_several_axes_accepts_nested_and_flat_arrays(shape, frame, spark, models, expected):
    nested = F.transform(
        F.array(F.slice("x", 1, 2), F.slice("x", 3, 2)), lambda r: F.transform(r, lambda v: F.array(v))
    )
    pictures = {
        "nested": lambda: frame.select("id", nested.alias("picture")),
        "flat": lambda: frame.select("id", frame.x.alias("picture")),
        "vector": lambda: spark.createDataFrame(
            [(i, Vectors.dense(r.tolist())) for i, r in enumerate(expected["x"])], ["id", "picture"]
        ),
    }[shape]()
    scored = predict(pictures, models / "image.keras")
    assert scored.dtypes[-1] == ("prediction", "array<array<array<float>>>")
    assert close(column(scored), expected["image"])


def test_an_axis_of_any_length_accepts_arrays_of_equal_length(frame, models, expected):
    pairs = frame.select("id", F.array(F.slice("x", 1, 2), F.slice("x", 3, 2)).alias("steps"))
    scored = predict(pairs, models / "steps.keras")
    assert scored.dtypes[-1] == ("prediction", "array<array<float>>")
    assert close(column(scored), expected["steps"])


@pytest.mark.parametrize(
    "kinds", [("tinyint", "smallint", "int", "bigint"), ("float", "double", "decimal(9,2)", "boolean")], ids=str
)
def test_every_numeric_type_of_spark_is_accepted(kinds, frame, models):
    mixed = frame.select("id", *(frame.b.cast(kind).alias(kind) for kind in kinds))
    numbers = mixed.select("id", F.array(*(F.col(f"`{kind}`").cast("float") for kind in kinds)).alias("x"))
    same = column(predict(numbers, models / "dense.keras"))
    assert close(column(predict(mixed, models / "dense.keras", inputs=list(kinds))), same)


@pytest.mark.parametrize("model", [pytest.param("words", marks=pytest.mark.slow), "words.keras"])
@pytest.mark.parametrize("kind", ["string", "binary"])
def test_text_and_bytes_are_accepted(model, kind, spark, models):
    words = spark.createDataFrame([(i, w) for i, w in enumerate("abca")], "id int, word string")
    scored = predict(words.withColumn("word", words.word.cast(kind)), models / model)
    assert scored.dtypes[-1] == ("prediction", "bigint")
    assert column(scored).tolist() == [1, 2, 0, 1]


def test_every_output_type_has_a_spark_type(spark, models):
    scored = predict(spark.range(3).select(F.col("id").cast("int").alias("n")), models / "kinds", output="p")
    types = {name.removeprefix("p_").removeprefix("as_"): kind for name, kind in scored.dtypes[1:]}
    assert types == {
        "float16": "float", "bfloat16": "float", "float32": "float", "float64": "double",
        "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint",
        "uint8": "smallint", "uint16": "int", "uint32": "bigint", "uint64": "decimal(20,0)",
        "bool": "boolean", "string": "string", "lists": "array<string>",
    }  # fmt: skip
    last = scored.collect()[2].asDict()
    assert last.pop("p_as_bool") is True
    assert (last.pop("p_as_string"), last.pop("p_lists")) == ("2", ["2", "2"])
    assert last.pop("p_as_uint64") == Decimal(2)
    assert set(last.values()) == {2}


def test_all_other_columns_are_unchanged(frame, models, expected):
    rich = frame.select(
        "*",
        F.expr("timestamp'2024-03-31 02:30:00'").alias("at"),
        F.expr("date'2024-02-29'").alias("on"),
        F.expr("cast(1.25 as decimal(10,2))").alias("a.dotted name"),
        F.create_map(F.lit("k"), F.array("b")).alias("map"),
        F.struct("id", F.struct("x").alias("inner")).alias("struct"),
        F.when(frame.id % 2 == 0, "even").alias("perhaps"),
        F.expr("interval '3' second").alias("while"),
        frame.b.alias("b"),  # a second column of this name
    )
    scored = predict(rich, models / "dense.keras")
    if SPARK >= (4, 1):  # before 4.1, all columns pass through Python and become nullable
        assert scored.schema.fields[:-1] == rich.schema.fields
    rows = scored.orderBy("id").collect()
    assert [tuple(row)[:-1] for row in rows] == [tuple(row) for row in rich.orderBy("id").collect()]
    assert close([row[-1] for row in rows], expected["dense"])


def test_the_metadata_of_columns_is_kept(frame, models):
    noted = frame.withColumn("x", F.col("x").alias("x", metadata={"unit": "mm"}))
    assert predict(noted, models / "dense.keras").schema["x"].metadata == {"unit": "mm"}


# --- lazy evaluation


def test_no_row_is_read_before_an_action(spark, models):
    broken = spark.range(3).select(F.expr("array(1, 2, 3, raise_error('read'))").cast("array<double>").alias("x"))
    scored = predict(broken, models / "dense.keras")
    assert scored.dtypes[-1] == ("prediction", "array<float>")
    with pytest.raises(Exception, match="read"):
        scored.collect()


def test_an_empty_frame_and_empty_partitions_work(spark, frame, models, expected):
    assert predict(frame.limit(0), models / "dense.keras").collect() == []
    nothing = spark.createDataFrame([], frame.schema)
    assert predict(nothing, models / "dense.keras").dtypes[-1] == ("prediction", "array<float>")
    assert predict(nothing, models / "dense.keras").count() == 0
    few = frame.where("id < 2").repartition(6)
    assert close(column(predict(few, models / "dense.keras")), expected["dense"][:2])


@pytest.mark.slow
def test_a_stream_of_rows_is_scored(spark, frame, models, expected, tmp_path):
    frame.write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema(frame.schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "rows"))
    scored = predict(stream, models / "dense.keras")
    query = scored.writeStream.format("memory").queryName("scored").trigger(availableNow=True).start()
    assert query.awaitTermination(SCRIPT_SECONDS)
    assert query.exception() is None
    assert close(column(spark.table("scored")), expected["dense"])


@pytest.mark.slow
def test_two_models_can_be_applied_in_one_query(frame, models, expected):
    both = predict(predict(frame, models / "dense.keras", output="p"), models / "one.keras", inputs="x", output="q")
    assert close(column(both, "p"), expected["dense"])
    assert close(column(both, "q"), expected["one"][:, 0])


def test_a_model_is_loaded_from_a_url_by_the_executors(frame, models, expected):
    for url in (f"file://{models}/dense.keras", f"file:{models}/dense", f"local://{models}/dense.h5"):
        assert close(column(predict(frame, url)), expected["dense"])


def test_a_local_model_file_may_be_deleted_after_predict_was_called(frame, models, expected, tmp_path):
    copy = tmp_path / "model.keras"
    copy.write_bytes((models / "dense.keras").read_bytes())
    scored = predict(frame, copy)
    copy.unlink()
    assert close(column(scored), expected["dense"])


@pytest.mark.slow
def test_predict_does_not_import_tensorflow_in_the_driver(run_script: RunScript, models):
    ended = run_script(f"""
        import sys
        from tfos_nb import predict, spark_session
        frame = spark_session(2).createDataFrame([(1, [1.0, 2.0, 3.0, 4.0])], "id int, x array<double>")
        for model in ("dense.keras", "dense", "dense.h5"):
            assert len(predict(frame, {str(models)!r} + "/" + model).first().prediction) == 3
        print(sorted({{"tensorflow", "keras", "tf_keras"}} & set(sys.modules)))
    """)
    assert ended.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_keras_model_of_the_notebook_is_applied(run_script: RunScript):
    ended = run_script("""
        import keras, numpy as np
        from tfos_nb import predict, spark_session
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        x = np.arange(10, dtype="float32").reshape(5, 2)
        frame = spark_session(2).createDataFrame([(i, r.tolist()) for i, r in enumerate(x)], "id int, x array<float>")
        found = [row.prediction for row in predict(frame, model).orderBy("id").collect()]
        np.testing.assert_allclose(found, model.predict(x, verbose=0), rtol=1e-6, atol=1e-6)
    """)
    assert ended.returncode == 0


# --- models that cannot be used


def test_a_missing_model_is_refused(frame, tmp_path):
    told = refusal(frame, tmp_path / "no.keras")
    assert f"{tmp_path}/no.keras is neither here" in told
    assert "nor on the executor's host" in told
    told = refusal(frame, f"file://{tmp_path}/no.keras")
    assert "the file or directory does not exist (looked for on the executor's host" in told


def test_a_secret_in_a_url_is_not_shown(frame):
    told = refusal(frame, "nowhere://me:hunter2@bucket/m.keras?token=hunter2")
    assert told.startswith("nowhere://bucket/m.keras: nowhere://bucket cannot be opened on ")
    assert ": Protocol not known: nowhere. Install the package that opens it on every host" in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            "twice.keras",
            "needs your own Twice, which a file has only by its name: give custom_objects={'Twice': Twice}, or export",
        ),
        ("lambda.keras", "has a Lambda layer, whose Python code Keras does not load from a file: export it"),
        ("only.weights.h5", "it contains only weights, not a model: save the whole model with model.save("),
        ("expected.npz", "a model is a .keras or .h5 file, or the directory of a SavedModel"),
        ("unserved", "it has no signature 'serving_default'"),
        ("eight", "input 'n' has exactly 8 rows: save the model with a first axis of None"),
        ("spectrum", "output 'z' is complex64, for which Spark has no type"),
        ("other", "the directory has no saved_model.pb in it, and no checkpoint (it has: m.pth); m.pth is PyTorch's"),
        ("empty", "the directory is empty: the model is in another place, or not written yet"),
    ],
)
def test_an_unusable_model_is_refused_with_the_reason(model, why, frame, models):
    told = refusal(frame, models / model)
    assert told.startswith(f"{models / model}: ")
    assert why in told
    assert len(told) < 600


def test_a_file_with_the_wrong_extension_is_refused(frame, tmp_path):
    for name, content in (("a.keras", b"<html>"), ("b.h5", b"PK\3\4"), ("c.keras", b"")):
        (tmp_path / name).write_bytes(content)
        assert "but it is not such a file" in refusal(frame, tmp_path / name)
    (tmp_path / "d.keras").write_bytes(b"PK\3\4broken off")
    assert "the file is damaged or incomplete (File is not a zip file)" in refusal(frame, tmp_path / "d.keras")


def test_an_object_that_is_not_a_model_is_refused(frame):
    assert refusal(frame, 5) == "model must be a path, a URL or a Keras model, got a int, 5"
    assert "model must be a path" in refusal(frame, "")


def test_an_exported_model_needs_no_code_of_custom_classes(frame, models, expected):
    assert close(column(predict(frame, models / "twice")), 2 * expected["x"])


# --- columns that do not fit


def test_unsuitable_columns_are_refused_by_name(frame, models):
    dense, pair = models / "dense.keras", models / "pair.keras"
    takes = "The model takes x (float32, 4 values a row)"
    both = "The model takes left (float32, 4 values a row), right (int32, one value a row)"
    text = frame.withColumn("name", F.lit("n")).withColumn("x", F.lit("n"))
    arrays = frame.select("id", frame.x.alias("one"), frame.x.alias("two"))
    has = "The DataFrame has id (int), one (array<float>), two (array<float>)"
    cases = [
        (frame, dense, {"inputs": "y"}, "inputs: no column 'y'; there are id, x, b"),
        (arrays, dense, {"inputs": "tow"}, "inputs: no column 'tow'; did you mean 'two'?; there are id, one, two"),
        (frame, dense, {"inputs": ["id", "b"]}, f"inputs names 2 columns for one input. {takes}"),
        (frame, pair, {"inputs": ["x"]}, f"inputs names 1 column, and must name one for each input. {both}"),
        (frame, pair, {"inputs": {"left": "x"}}, f"inputs names no column for right. {both}"),
        (frame, pair, {"inputs": {"lefd": "x"}}, f"the model has no input 'lefd'; did you mean 'left'?. {both}"),
        (frame, pair, {}, f"not every input has a column of its name. {both}. The DataFrame has id (int), x "),
        (frame, dense, {"keep": ["idd"]}, "keep: no column 'idd'; did you mean 'id'?; there are id, x, b"),
        (frame, dense, {"decode": ["picture"]}, "decode: no column 'picture'; there are id, x, b"),
        (frame, dense, {"decode": ["x"]}, "only a binary column holds encoded pictures"),
        (frame, pair, {}, "Say which: inputs={'left': …, 'right': …}"),
        (frame, dense, {"inputs": 5}, "inputs must be the name of a column or a list of names, got 5"),
        (frame, dense, {"inputs": []}, "inputs names 0 columns"),
        (text, dense, {}, "column x (string) does not fit x (float32, 4 values a row): it is not numeric"),
        (frame, dense, {"inputs": "b"}, "column b (int) does not fit x (float32, 4 values a row): a row of it is one"),
        (frame, models / "words", {"inputs": "b"}, "does not fit word (string, one value a row): cast it to string"),
        (
            arrays,
            dense,
            {},
            f"2 columns fit (one, two). {takes}. {has}. Say which: inputs='COLUMN', or several numeric",
        ),
        (frame.select("id"), dense, {}, f"no column fits. {takes}. The DataFrame has id (int). Say which"),
        (frame.select("x", "x"), dense, {}, "inputs: the DataFrame has 2 columns 'x': rename one"),
    ]
    for df, model, options, told in cases:
        assert told in refusal(df, model, **options)


def test_errors_of_the_magic_name_its_options(frame, models):
    arrays = frame.select("id", frame.x.alias("one"), frame.x.alias("two"))
    options = {"inputs": None, "output": "p", "batch_size": 8}
    with pytest.raises(PlanError, match="Say which: --inputs COLUMN, or several"):
        applying.predict(arrays, str(models / "dense.keras"), **options)
    scored = applying.predict(arrays, str(models / "dense.keras"), **{**options, "inputs": ["two"]})
    assert scored.columns == ["id", "one", "two", "p"]


def test_vectors_of_another_declared_length_are_refused(frame, models):
    two = VectorAssembler(inputCols=["id", "b"], outputCol="two").transform(frame.select("id", "b"))
    assert "no column fits" in refusal(two, models / "dense.keras")
    assert "its vectors have 2 values" in refusal(two, models / "dense.keras", inputs="two")


def test_an_output_named_like_a_column_is_refused(frame, models):
    for name in ("b", "B"):
        told = refusal(frame, models / "dense.keras", output=name)
        assert told == f"the DataFrame has a column {name!r} already: take another name with output=…, or drop it"


def test_arguments_are_checked_first(spark, frame):
    assert "batch_size must be a whole number" in refusal(frame, "no", batch_size=0)
    assert "batch_size must be a whole number" in refusal(frame, "no", batch_size=True)
    assert "output must be the name of a column" in refusal(frame, "no", output="")
    assert "nulls must be 'fail', 'skip' or 'fill'" in refusal(frame, "no", nulls="drop")
    assert "keep must be a list of columns" in refusal(frame, "no", keep="id")
    assert "df must be a Spark DataFrame" in refusal([1], "no")  # type: ignore[arg-type]
    assert "the DataFrame has no columns" in refusal(frame.select(), "no")
    assert "spark must be a SparkSession, got an int" in refusal(frame, "no", spark=5)


@arrow_udfs
def test_a_column_that_spark_cannot_send_to_python_is_kept(frame, models, expected):
    months = frame.withColumn("for", F.expr("interval '1' month"))
    scored = predict(months, models / "dense.keras")
    assert scored.selectExpr("for = interval '1' month AS same").distinct().collect() == [(True,)]
    assert close(column(scored), expected["dense"])


def test_without_arrow_udfs_all_columns_pass_through_python(frame, models, expected, monkeypatch):
    monkeypatch.setattr("tfos_nb.inference.model_task.has_arrow_udfs", lambda: False)  # as before Spark 4.1
    none = frame.withColumn("x", F.when(frame.id != 7, frame.x))
    scored = predict(none, models / "pair", inputs=["x", "b"], nulls="skip", keep=["id"], batch_size=7)
    assert scored.columns == ["id", "prediction_output_0", "prediction_output_1"]
    there = [i for i in range(ROWS) if i != 7]
    assert close(column(scored, "prediction_output_0"), expected["far"][there])
    assert close(column(predict(frame, models / "dense.keras")), expected["dense"])
    months = frame.withColumn("for", F.expr("interval '1' month"))
    told = refusal(months, models / "dense.keras")
    assert told.startswith("column 'for' is interval month, which Spark cannot pass to Python: leave it out")


# --- rows that do not fit


def test_a_null_is_refused_with_its_column(frame, models):
    none = frame.withColumn("x", F.when(frame.id != 7, frame.x))
    told = failure(predict(none, models / "dense.keras"))
    assert re.search(r"column 'x' has a null \(row \d+ of partition \d+\), and a tensor has none: fill it", told)
    assert "df.dropna(subset=['x'])" in told
