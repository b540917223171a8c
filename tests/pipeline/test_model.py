"""TFModel on real executors: three styles of inference, Params, saving, streams, and errors about bad input."""

from __future__ import annotations

import shutil
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import SQLTransformer
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from tests.conftest import SCRIPT_SECONDS
from tests.saved_models import close, column
from tests.versions import arrow_udfs
from tfos_nb import TFModel
from tfos_nb.errors import PlanError


def refusal(model: TFModel, df: Any) -> str:
    with pytest.raises(PlanError) as raised:
        model.transform(df)
    return str(raised.value)


def failure(scored: Any) -> str:
    with pytest.raises(Exception, match="FeedFailed") as raised:
        scored.collect()
    return str(raised.value)


def build_dense(args: Any) -> Any:
    """The model whose weights the checkpoints have."""
    import keras

    given = keras.Input((4,), name="x")
    middle = keras.layers.Dense(args.units, activation="relu", name="middle")(given)
    return keras.Model(given, keras.layers.Dense(3, activation="softmax", name="last")(middle))


# --- three styles


@pytest.mark.parametrize("place", ["dense", "dense.keras", "dense.h5"])
def test_only_the_path_of_the_model_is_required(place, rows, kinds, known):
    scored = TFModel(export_dir=str(kinds / place)).transform(rows)
    assert scored.dtypes == [*rows.dtypes, ("prediction", "array<float>")]
    assert close(column(scored), known["dense"])


def test_a_signature_is_chosen_by_key_and_its_outputs_by_the_mapping(rows, kinds, known):
    model = TFModel(export_dir=str(kinds / "several"), input_mapping={"x": "x"}, tag_set="serve")
    scored = model.setSignatureDefKey("times").setOutputMapping({"total": "t"}).transform(rows)
    assert scored.dtypes == [*rows.dtypes, ("t", "float")]
    assert close(column(scored, "t"), known["x"].sum(1) * 3)
    plus = model.setSignatureDefKey("plus").setOutputMapping({"sum": "s"}).transform(rows)
    assert close(column(plus, "s"), known["x"] + 3)


def test_the_only_signature_needs_no_key(rows, kinds, known):
    scored = TFModel(export_dir=str(kinds / "only")).transform(rows)
    assert scored.dtypes[-2:] == [("prediction_product", "array<float>"), ("prediction_total", "float")]
    assert close(column(scored, "prediction_product"), known["x"] * 3)


@pytest.mark.parametrize("name", ["hidden", "hidden:0"])
def test_a_tensor_of_the_graph_is_chosen_by_name_without_a_signature(name, rows, kinds, known):
    model = TFModel(export_dir=str(kinds / "graph"), input_mapping={"x": "at:0"}, output_mapping={name: "h"})
    scored = model.transform(rows)
    assert scored.dtypes[-1] == ("h", "array<float>")
    assert close(column(scored, "h"), known["graph_hidden"])


def test_a_saved_model_of_keras_3_is_used_by_the_names_in_its_graph(rows, kinds, known):
    output = {"StatefulPartitionedCall": "p"}
    model = TFModel(export_dir=str(kinds / "dense"), input_mapping={"x": "serve_x:0"}, output_mapping=output)
    assert close(column(model.transform(rows), "p"), known["dense"])
    told = refusal(model.setInputMapping({"x": "serving_default_x"}), rows)
    assert "StatefulPartitionedCall also needs the placeholder 'serve_x': name a column for it as an input" in told


def test_a_layer_of_a_keras_file_is_chosen_by_name(rows, kinds, known):
    scored = TFModel(export_dir=str(kinds / "dense.keras"), output_mapping={"middle": "m"}).transform(rows)
    assert close(column(scored, "m"), known["features"])


def test_a_checkpoint_of_tensorflow_1_is_used_with_its_graph(rows, kinds, known):
    model = TFModel(
        model_dir=str(kinds / "graph_checkpoint"), input_mapping={"x": "at"}, output_mapping={"hidden": "h"}
    )
    assert close(column(model.transform(rows), "h"), known["graph_hidden"])  # the newest of two
    assert "name the tensors that it must return; it takes at" in refusal(
        TFModel(model_dir=str(kinds / "graph_checkpoint")), rows
    )


@pytest.mark.parametrize("place", ["built", "weights"])
def test_a_checkpoint_of_weights_is_loaded_into_the_result_of_model_fn(place, rows, kinds, known):
    model = TFModel({"units": 5}, model_dir=str(kinds / place), model_fn=build_dense)
    assert close(column(model.transform(rows)), known["doubled"])


def test_a_checkpoint_is_loaded_into_the_keras_file_beside_it(rows, kinds, known):
    assert close(column(TFModel(model_dir=str(kinds / "beside")).transform(rows)), known["doubled"])


def test_several_inputs_and_outputs_are_mapped(rows, kinds, known):
    model = TFModel(export_dir=str(kinds / "pair.keras"), input_mapping={"b": "right", "x": "left"})
    scored = model.setOutputMapping({"near": "n", "far": "f"}).transform(rows)
    assert close(column(scored, "f"), known["far"])
    assert close(column(scored, "n"), known["near"][:, 0])


def test_inputs_without_a_column_of_their_name_are_matched_by_shape(rows, kinds, known):
    scored = TFModel(export_dir=str(kinds / "pair.keras")).transform(rows.select("x", "b"))
    assert scored.columns == ["x", "b", "prediction_far", "prediction_near"]
    assert close(np.sort([r.prediction_near for r in scored.collect()]), np.sort(known["near"][:, 0]))


def test_the_mapping_concatenates_columns_into_one_input(rows, kinds, known):
    wide = rows.select("id", *(rows.x[i].alias(f"x{i}") for i in range(4)))
    model = TFModel(export_dir=str(kinds / "dense"), input_mapping={f"x{i}": "x" for i in range(4)})
    assert close(column(model.transform(wide)), known["dense"])


# --- rows


def test_the_columns_to_keep_can_be_named(rows, kinds, known):
    scored = TFModel(export_dir=str(kinds / "dense"), keep_columns=["id"]).transform(rows)
    assert scored.columns == ["id", "prediction"]
    assert close(column(scored), known["dense"])
    assert "keep_columns: no column 'idd'; did you mean 'id'?" in refusal(
        TFModel(export_dir=str(kinds / "dense"), keep_columns=["idd"]), rows
    )


@pytest.fixture
def holes(rows):
    """Rows with nulls: row 3 has no list, and row 7 has a null in its list."""
    hollow = F.when(rows.id == 7, F.transform("x", lambda v, i: F.when(i != 1, v))).when(rows.id != 3, rows.x)
    return rows.withColumn("x", hollow).coalesce(1).sortWithinPartitions("id")


def test_a_null_is_refused_with_its_column_and_row(holes, kinds):
    model = TFModel(export_dir=str(kinds / "dense"))
    assert "column 'x' has a null (row 3 of partition 0), and a tensor has none" in failure(model.transform(holes))
    late = model.setBatchSize(2).transform(holes.where("id != 3"))
    assert "column 'x' has a null in its lists (row 6 of partition 0)" in failure(late)


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("outputs", [{}, {"product": "p", "total": "t"}], ids=["all", "named"])
def test_rows_with_a_null_are_skipped(size, outputs, holes, kinds, known):
    model = TFModel(export_dir=str(kinds / "only"), null_policy="skip", batch_size=size, output_mapping=outputs)
    scored = model.transform(holes)
    there = [i for i in range(50) if i not in (3, 7)]
    assert [row.id for row in scored.select("id").collect()] == there
    name = "p" if outputs else "prediction_product"
    assert close(column(scored, name), known["x"][there] * 3)


def test_nulls_are_filled(holes, kinds, known):
    x = known["x"].copy()
    x[3], x[7, 1] = 0.5, 0.5
    model = TFModel(export_dir=str(kinds / "only"), output_mapping={"product": "p"}, null_policy="fill")
    assert close(column(model.setFill({"x": 0.5}).transform(holes), "p"), x * 3)
    x[3], x[7, 1] = 0, 0
    assert close(column(model.setFill(None).transform(holes), "p"), x * 3)
    assert "of the model's inputs (x), got 'xx'; did you mean 'x'?" in refusal(model.setFill({"xx": 1}), holes)
    assert "fill must be a number or a text" in refusal(model.setFill([1]), holes)


def test_a_row_of_another_length_is_refused_with_its_value(rows, kinds):
    short = rows.withColumn("x", F.when(rows.id == 5, F.slice("x", 1, 2)).otherwise(rows.x))
    ordered = short.coalesce(1).sortWithinPartitions("id")
    told = failure(TFModel(export_dir=str(kinds / "dense"), batch_size=3).transform(ordered))
    assert "column 'x' has a list of 2 values, [" in told
    assert "], where the model takes 4 (row 5 of partition 0): pad or cut it in Spark" in told


def test_encoded_pictures_are_decoded_and_resized(spark, kinds):
    content = [(0, bytearray((kinds / "small.png").read_bytes())), (1, bytearray((kinds / "large.png").read_bytes()))]
    pictures = spark.createDataFrame(content, "id int, file binary")
    model = TFModel(export_dir=str(kinds / "picture.keras"), keep_columns=["id"])
    told = refusal(model.copy().setInputMapping({"file": "picture"}), pictures)
    assert "it is binary; if these are encoded pictures, name it in decode" in told
    scored = model.setDecode(["file"]).transform(pictures)
    assert close(column(scored), [[200, 0, 10], [200, 0, 10]])
    broken = spark.createDataFrame([(0, bytearray(b"GIF8no picture"))], pictures.schema)
    assert "column 'file' has 14 bytes that are no image and begin with b'GIF8no p' (row 0 of" in failure(
        model.transform(broken)
    )


@arrow_udfs
def test_a_filter_on_the_prediction_scores_each_row_once(rows, kinds):
    scored = TFModel(export_dir=str(kinds / "only"), output_mapping={"total": "t"}).transform(rows)
    plan = scored.where("t > 0").select("id", "t")._jdf.queryExecution().executedPlan().toString()
    assert plan.count("ArrowEvalPython") == 1
    assert "x#" not in plan.partition("ArrowEvalPython")[0].splitlines()[-1]  # the input is not read
    unused = scored.select("id")._jdf.queryExecution().executedPlan().toString()
    assert "ArrowEvalPython" not in unused


def test_a_stream_is_transformed_in_batches(spark, rows, kinds, known, tmp_path):
    rows.write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    scored = TFModel(export_dir=str(kinds / "dense")).transform(stream)
    assert scored.isStreaming
    query = (
        scored.writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    assert query.awaitTermination(SCRIPT_SECONDS)
    assert query.exception() is None
    assert len(query.recentProgress) > 1  # several batches
    assert close(column(spark.read.parquet(str(tmp_path / "out"))), known["dense"])


def test_empty_frames_and_partitions_give_the_schema_and_no_rows(spark, rows, kinds):
    model = TFModel(export_dir=str(kinds / "dense"), null_policy="skip")
    nothing = model.transform(spark.createDataFrame([], rows.schema))
    assert nothing.dtypes[-1] == ("prediction", "array<float>")
    assert nothing.collect() == []
    assert len(model.transform(rows.where("id < 2").repartition(5)).collect()) == 2


# --- a Transformer of Spark ML


def test_params_have_docs_defaults_and_types():
    model = TFModel()
    told = model.explainParams()
    assert "batch_size: rows that the model takes at once (default: 100)" in told
    assert "null_policy: " in told
    assert model.getBatchSize() == 100
    assert model.getInputMapping() == {}
    for wrong in ({"batch_size": 0}, {"batch_size": "many"}, {"input_mapping": ["x"]}, {"null_policy": "drop"}):
        (name,) = wrong
        with pytest.raises(TypeError, match=f'"{name}"'):
            TFModel(**wrong)
    with pytest.raises(TypeError, match=r"TFModel has no Param 'batchsize'; did you mean 'batch_size'\?"):
        TFModel(batchsize=3)


def test_a_copy_has_separate_params():
    model = TFModel({"a": 1}, batch_size=7)
    other = model.copy({model.batch_size: 9})
    assert (model.getBatchSize(), other.getBatchSize()) == (7, 9)
    assert other.uid == model.uid
    assert other.setExportDir("there").getExportDir() == "there"
    assert model.getExportDir() is None
    assert vars(other.merge_args_params())["batch_size"] == 9
    assert other.merge_args_params().a == 1


def test_a_model_is_saved_alone_and_in_a_pipeline(rows, kinds, known, tmp_path):
    model = TFModel({"n": 1}, export_dir=str(kinds / "only"), output_mapping={"total": "t"}, batch_size=7)
    model.write().overwrite().save(str(tmp_path / "alone"))
    loaded = TFModel.load(str(tmp_path / "alone"))
    assert (loaded.uid, loaded.args.n, loaded.getBatchSize()) == (model.uid, 1, 7)
    assert loaded.getOutputMapping() == {"total": "t"}
    above = SQLTransformer(statement="SELECT id, t FROM __THIS__ WHERE t > 0")
    PipelineModel([loaded, above]).save(str(tmp_path / "model"))
    Pipeline(stages=[loaded, above]).save(str(tmp_path / "pipeline"))
    expected = known["x"].sum(1) * 3
    for pipeline in (
        PipelineModel.load(str(tmp_path / "model")),
        Pipeline.load(str(tmp_path / "pipeline")).fit(rows),
    ):
        assert close(column(pipeline.transform(rows), "t"), expected[expected > 0])


def test_a_model_object_is_saved_with_weights_and_model_fn_by_reference(rows, kinds, known, tmp_path):
    model = TFModel(model=keras.models.load_model(kinds / "dense.keras"))
    assert close(column(model.transform(rows)), known["dense"])
    model.save(str(tmp_path / "object"))
    assert close(column(TFModel.load(str(tmp_path / "object")).transform(rows)), known["dense"])
    checkpoint = TFModel({"units": 5}, model_dir=str(kinds / "built"), model_fn=build_dense)
    checkpoint.save(str(tmp_path / "function"))
    assert TFModel.load(str(tmp_path / "function")).model_fn is build_dense
    with pytest.raises(PlanError, match="model_fn is defined in the notebook or inside a function"):
        TFModel(model_dir="there", model_fn=lambda: None).save(str(tmp_path / "no"))


def test_a_custom_layer_is_sent_with_a_model_object(rows, known):
    @keras.saving.register_keras_serializable("mine")
    class Thrice(keras.layers.Layer):
        def call(self, inputs):
            return 3 * inputs

    model = keras.Sequential([keras.Input((4,)), Thrice()])
    assert close(column(TFModel(model=model).transform(rows)), known["x"] * 3)


def test_missing_custom_objects_are_named_and_given_ones_are_used(rows, kinds, known):
    class Twice(keras.layers.Layer):
        def call(self, inputs):
            return 2 * inputs

    model = TFModel(export_dir=str(kinds / "twice.keras"))
    assert (
        "it needs your own Twice, which a file has only by its name: give custom_objects={'Twice': Twice}"
        in refusal(model, rows)
    )
    given = TFModel(export_dir=str(kinds / "twice.keras"), custom_objects={"Twice": Twice})
    assert close(column(given.transform(rows)), known["x"] * 2)


# --- errors


def test_missing_names_are_refused_with_the_existing_ones(rows, kinds):
    dense, several, graph = (str(kinds / name) for name in ("dense", "several", "graph"))
    cases = [
        ({"export_dir": dense, "input_mapping": {"xx": "x"}}, "input_mapping: no column 'xx'"),
        (
            {"export_dir": dense, "output_mapping": {"output": "p"}},
            (
                "it has no tensor 'output'; did you mean 'output_0'?. signature 'serve': It takes x (float32) and "
                "gives output_0 (float32)"
            ),
        ),
        (
            {"export_dir": several, "signature_def_key": "times", "output_mapping": {"product ": "p"}},
            (
                "its signature 'times' has no 'product '; did you mean 'product'?. It takes x (float32) and gives "
                "product (float32), total (float32)"
            ),
        ),
        (
            {"export_dir": several, "signature_def_key": "time"},
            "it has no signature 'time'; did you mean 'times'? (it has: plus, times): name one of them",
        ),
        ({"export_dir": several}, "it has no signature 'serving_default' (it has: plus, times): name one of them"),
        ({"export_dir": dense, "tag_set": "train"}, "it has no graph with the tags train (it has: serve)"),
        (
            {"export_dir": graph, "input_mapping": {"x": "at"}, "output_mapping": {"hiden": "h"}},
            "did you mean 'hidden'?",
        ),
        (
            {"export_dir": str(kinds / "dense.keras"), "output_mapping": {"mid": "m"}},
            (
                "it has no output and no layer 'mid'; did you mean 'middle'?. It gives last (float32 3); its layers "
                "are x, middle, last"
            ),
        ),
        ({"export_dir": str(kinds / "dense.keras"), "input_mapping": {"x": "y"}}, "it has no input 'y'. It takes x"),
        ({"export_dir": dense, "input_mapping": {"b": "x"}}, "column b (int) does not fit x (float32, 4 values a row)"),
        ({"export_dir": dense, "output_mapping": {"output_0": "B"}}, "another name with output_mapping=…, or drop it"),
        ({"export_dir": dense, "prediction_col": "b"}, "another name with prediction_col=…, or drop it"),
    ]
    for params, told in cases:
        assert told in refusal(TFModel(**params), rows), params
    several = "or several numeric ones, side by side: input_mapping={'a': 'x', 'b': 'x', …}"
    assert f"Say which: input_mapping={{…: 'x'}}, {several}" in refusal(TFModel(export_dir=dense), rows.select("id"))


def test_paths_without_a_model_are_refused(rows, kinds, tmp_path):
    cut, bare = tmp_path / "cut.keras", tmp_path / "bare"
    cut.write_bytes((kinds / "dense.keras").read_bytes()[:3000])
    shutil.copytree(kinds / "dense", bare, ignore=shutil.ignore_patterns("variables.index"))
    cases = [
        ({}, "the model is missing: give model or export_dir or model_dir"),
        ({"export_dir": str(kinds / "empty")}, "the directory is empty: the model is in another place"),
        ({"export_dir": str(kinds / "torch")}, "pytorch_model.bin is PyTorch's"),
        ({"export_dir": str(kinds / "broken")}, "its saved_model.pb cannot be read"),
        (
            {"model_dir": str(kinds / "built")},
            "contains only weights: give the function that builds the model, model_fn=",
        ),
        ({"export_dir": str(kinds / "no")}, "is neither here"),
        ({"export_dir": str(cut)}, "the file is damaged or incomplete (File is not a zip file): copy it again"),
        ({"export_dir": str(bare)}, "any matching files for variables/variables (written by TensorFlow 2."),
        ({"export_dir": str(kinds / "later.keras")}, "of a newer Keras than the executors have: install that version"),
        ({"export_dir": str(kinds / "later.keras")}, "(written by Keras 99.1.0, read by keras 3."),
        ({"export_dir": str(kinds / "later")}, "(written by TensorFlow 99.1.0)"),
    ]
    for params, told in cases:
        assert told in refusal(TFModel(**params), rows), params


def test_a_checkpoint_that_does_not_match_the_model_is_refused(rows, kinds):
    unfit = TFModel({"units": 6}, model_dir=str(kinds / "built"), model_fn=build_dense)
    assert "ckpt-1" in refusal(unfit, rows)
    broken = TFModel(model_dir=str(kinds / "built"), model_fn=lambda: 1 / 0)
    assert "<lambda>() failed: ZeroDivisionError" in refusal(broken, rows)
    nothing = TFModel(model_dir=str(kinds / "built"), model_fn=lambda: 5)
    assert "<lambda>() must return a Keras model, got a int" in refusal(nothing, rows)
