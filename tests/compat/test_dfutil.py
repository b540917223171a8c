"""TensorFlowOnSpark's dfutil: its names and types, over this package's TFRecords."""

from __future__ import annotations

import gc
import inspect
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from tests.runtime.tfrecord.test_codec import example
from tfos_nb.compat import dfutil
from tfos_nb.errors import FeedFailed, PlanError

DATA = [
    (1, 0.5, True, "a", bytearray(b"\xff"), [1.5, 2.5], ["x", "y"], [7]),
    (2, None, False, None, None, [], ["z"], [8, 9]),
    (-(2**40), 3.25, True, "ü", bytearray(b"b"), [3.5], [], None),
]
SCHEMA = "i long, f double, b boolean, s string, y binary, af array<float>, ax array<string>, al array<long>"


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(DATA, SCHEMA).coalesce(1)


@dataclass(frozen=True)
class FromExamples:
    """The function that programs write as ``lambda it: dfutil.fromTFExample(it, …)``."""

    binary: tuple[str, ...] = ()

    def __call__(self, records: Any) -> list[Row]:
        return dfutil.fromTFExample(records, list(self.binary))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (dfutil.saveAsTFRecords, "df output_dir"),
        (dfutil.loadTFRecords, "sc input_dir binary_features"),
        (dfutil.toTFExample, "dtypes"),
        (dfutil.fromTFExample, "iter binary_features"),
        (dfutil.infer_schema, "example binary_features"),
        (dfutil.isLoadedDF, "df"),
    ],
)
def test_arguments_have_tensorflowonsparks_order(function: Any, arguments: str) -> None:
    assert " ".join(inspect.signature(function).parameters) == arguments


def test_a_frame_is_saved_and_loaded_with_tensorflowonsparks_types(
    spark: SparkSession, frame: DataFrame, tmp_path: Path
) -> None:
    dfutil.saveAsTFRecords(frame, str(tmp_path / "out"))
    with pytest.raises(PlanError, match="exists already"):
        dfutil.saveAsTFRecords(frame, f"file://{tmp_path}/out")
    found = dfutil.loadTFRecords(spark.sparkContext, str(tmp_path / "out"), ["y", "not_there"])
    assert dict(found.dtypes) == {
        **{"i": "bigint", "f": "double", "b": "bigint", "s": "string", "y": "binary"},
        **{"af": "array<double>", "ax": "array<string>", "al": "array<bigint>"},
    }
    assert found.columns == sorted(found.columns)
    rows = [tuple(row) for row in found.select(*frame.columns).collect()]
    assert rows == [(*row[:2], int(row[2]), *row[3:]) for row in DATA]
    assert dfutil.isLoadedDF(found)
    assert not dfutil.isLoadedDF(frame)
    assert dfutil.loadedDF[found] == str(tmp_path / "out")
    del found
    gc.collect()
    assert not [path for path in dfutil.loadedDF.values() if path == str(tmp_path / "out")]


def test_rows_become_examples_for_tensorflow_and_rows_again(spark: SparkSession, frame: DataFrame) -> None:
    import tensorflow as tf

    records = frame.rdd.mapPartitions(dfutil.toTFExample(frame.dtypes))
    first, second, _ = records.collect()
    assert type(first[0]) is bytearray
    assert first[1] is None
    features = tf.train.Example.FromString(bytes(first[0])).features.feature
    assert list(features["ax"].bytes_list.value) == [b"x", b"y"]
    assert list(features["f"].float_list.value) == [0.5]
    assert list(features["b"].int64_list.value) == [1]
    assert "s" not in tf.train.Example.FromString(bytes(second[0])).features.feature
    one, two, three = records.mapPartitions(FromExamples(("y",))).collect()
    assert one == Row(
        **{"af": [1.5, 2.5], "al": 7, "ax": ["x", "y"], "b": 1, "f": 0.5, "i": 1, "s": "a", "y": bytearray(b"\xff")}
    )
    assert two.asDict() == {"af": None, "al": [8, 9], "ax": "z", "b": 0, "i": 2}
    assert (three.s, three.i) == ("ü", -(2**40))


def test_the_schema_of_an_example_follows_from_its_values() -> None:
    one = example(a=[1], b=[1.5, 2.5], c=[b"x"], d=[b"y"])
    one.features.feature["e"].bytes_list.SetInParent()
    assert dfutil.infer_schema(one, ["d"]).simpleString() == (
        "struct<a:bigint,b:array<double>,c:string,d:binary,e:string>"
    )


def test_an_invalid_example_and_bytes_that_are_not_text_are_refused() -> None:
    with pytest.raises(FeedFailed, match="it is not a valid Example"):
        dfutil.fromTFExample([(b"nonsense", None)])
    with pytest.raises(FeedFailed, match=r"feature 'y' has bytes that are not text: set binary_features=\['y'\]"):
        dfutil.fromTFExample([(example(y=[b"\xff"]).SerializeToString(), None)])
    assert dfutil.fromTFExample([]) == []


def test_an_unsupported_type_is_refused_on_the_driver(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="column 'd' is date: cast it to string"):
        dfutil.toTFExample([("i", "bigint"), ("d", "date")])
    with pytest.raises(PlanError, match="sc is a SparkSession, not a SparkContext"):
        dfutil.loadTFRecords(spark, str(tmp_path))
    with pytest.raises(PlanError, match="no such path exists"):
        dfutil.loadTFRecords(spark.sparkContext, str(tmp_path / "nothing"))


def test_a_path_without_a_scheme_uses_hadoops_default_file_system(
    spark: SparkSession, frame: DataFrame, tmp_path: Path
) -> None:
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    (tmp_path / "mounted").mkdir()
    conf.set("fs.viewfs.mounttable.dfutil.link./data", f"file://{tmp_path}/mounted")
    conf.set("fs.defaultFS", "viewfs://dfutil/")
    try:
        dfutil.saveAsTFRecords(frame, "/data/out")
        assert (tmp_path / "mounted/out/_SUCCESS").exists()
        assert dfutil.loadTFRecords(spark.sparkContext, "/data/out").count() == len(DATA)
    finally:
        conf.unset("fs.defaultFS")
        conf.unset("fs.viewfs.mounttable.dfutil.link./data")
        shutil.rmtree(tmp_path / "mounted")
