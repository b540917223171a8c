"""DataFrames written and read by real executors, and by TensorFlow."""

from __future__ import annotations

import base64
import datetime
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, FloatType, StructType

from tests.runtime.tfrecord.test_codec import example
from tests.versions import data_sources
from tfos_nb import tfrecord
from tfos_nb.errors import FeedFailed, PlanError
from tfos_nb.runtime.tfrecord.framing import frame
from tfos_nb.tfrecord import Saved, Skipped, infer_schema, read, write

SCHEMA = (
    "f float, d double, b boolean, t tinyint, s smallint, i int, l bigint, y binary, x string, af array<float>, "
    "ad array<double>, ab array<boolean>, at array<tinyint>, as_ array<smallint>, ai array<int>, al array<bigint>, "
    "ax array<string>, ay array<binary>"
)
# Three records of org.tensorflow:tensorflow-hadoop 1.15.0 and org.tensorflow:proto 1.15.0: label, pixels, name, words
# and big; they have 0, 1 and 2 words, and big is minus the label.
HADOOP = (
    "VQAAAAAAAADX3w/BClMKDgoFbGFiZWwSBRoDCgEAChYKBnBpeGVscxIMEgoKCAAAAAAAAMA/Cg4KBG5hbWUSBgoECgJuMAoLCgV3b3JkcxICCgAK"
    "DAoDYmlnEgUaAwoBABvPIzhhAAAAAAAAAACPkGQKXwoOCgVsYWJlbBIFGgMKAQEKFgoGcGl4ZWxzEgwSCgoIAAAAPwAAwD8KDgoEbmFtZRIGCgQK"
    "Am4xCg4KBXdvcmRzEgUKAwoBYQoVCgNiaWcSDhoMCgr///////////8BGcvpvmQAAAAAAAAAQ18c3wpiCg4KBWxhYmVsEgUaAwoBAgoWCgZwaXhl"
    "bHMSDBIKCggAAIA/AADAPwoOCgRuYW1lEgYKBAoCbjIKEQoFd29yZHMSCAoGCgFhCgFiChUKA2JpZxIOGgwKCv7//////////wGo04DG"
)


def row(number: int) -> tuple[Any, ...]:
    one, text = number % 100, f"ä{number}"
    many = [one] * (number % 3)
    scalars = (number / 2, number / 4, number % 2 == 0, one, one, -number, -(2**40) * number, text.encode(), text)
    arrays = ([n / 2 for n in many], [n / 4 for n in many], [True] * len(many), many, many, many, many)
    return (*scalars, *arrays, [text] * len(many), [b"\xff\0"] * len(many))


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    data = [row(number) if number % 5 else (None,) * len(row(0)) for number in range(200)]
    frame_ = spark.createDataFrame(data, SCHEMA).repartition(3).cache()
    yield frame_
    frame_.unpersist(blocking=True)


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    return spark.range(0, 60, 1, 3).selectExpr("cast(id as int) AS id", "array(cast(id as float), 1f) AS x")


def collected(frame_: DataFrame) -> list[str]:
    return sorted(map(str, frame_.collect()))


def put(path: Path, *examples: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(frame(pa.array([one.SerializeToString() for one in examples], pa.large_binary())))
    return path


def there(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.name.startswith("."))


# --- write and read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_every_type_is_read_as_written_with_its_nulls(
    spark: SparkSession, rows: DataFrame, tmp_path: Path, compression: str | None
) -> None:
    saved = write(rows, tmp_path / "out", compression=compression)
    assert saved == Saved(str(tmp_path / "out"), 3, 200, saved.size)
    assert saved.size == sum(file.stat().st_size for file in (tmp_path / "out").glob("part-*"))
    found = read(spark, tmp_path / "out", schema=rows.schema)
    assert found.schema == rows.schema
    assert collected(found) == collected(rows)


def test_schema_inference_finds_floats_and_text(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    write(rows, tmp_path / "out")
    schema = infer_schema(spark, tmp_path / "out", binary=["y"])
    kinds = {field.name: field.dataType.simpleString() for field in schema}
    assert kinds == {
        **dict.fromkeys("btsil", "bigint"),
        **dict.fromkeys(("ab", "at", "as_", "ai", "al"), "array<bigint>"),
        **{"f": "float", "d": "float", "af": "array<float>", "ad": "array<float>"},
        **{"x": "string", "y": "binary", "ax": "array<string>", "ay": "array<binary>"},
    }
    assert schema["af"].dataType == ArrayType(FloatType())
    found = read(spark, tmp_path / "out", binary=["y"])
    assert found.schema == schema
    same = [name for name in rows.columns if kinds[name] == rows.schema[name].dataType.simpleString()]
    assert len(same) == 8
    assert collected(found.select(same)) == collected(rows.select(same))


def test_arrays_of_arrays_are_read_from_sequence_examples(spark: SparkSession, tmp_path: Path) -> None:
    data = [(1, [[1.5], [2.0, 3.0]], [["a"], []]), (2, None, []), (3, [], None)]
    frame_ = spark.createDataFrame(data, "id bigint, steps array<array<float>>, words array<array<string>>")
    write(frame_, tmp_path / "out", record_type="SequenceExample")
    found = read(spark, tmp_path / "out", record_type="SequenceExample")
    assert found.schema == frame_.schema
    assert collected(found) == collected(frame_)
    with pytest.raises(PlanError, match="byte 0: it is a SequenceExample, not an Example"):
        read(spark, tmp_path / "out")


def test_tf_data_reads_files_that_spark_wrote(spark: SparkSession, numbers: DataFrame, tmp_path: Path) -> None:
    import tensorflow as tf

    write(numbers, tmp_path / "out", compression="gzip")
    files = tf.io.gfile.glob(str(tmp_path / "out/part-*"))
    spec = {"id": tf.io.FixedLenFeature([], tf.int64), "x": tf.io.FixedLenFeature([2], tf.float32)}
    dataset = tf.data.TFRecordDataset(files, compression_type="GZIP").batch(16)
    found = [row for batch in dataset for row in _rows_of(tf.io.parse_example(batch, spec))]
    assert sorted(found) == [(number, [float(number), 1.0]) for number in range(60)]


def _rows_of(parsed: Any) -> list[tuple[int, list[float]]]:
    return list(zip(parsed["id"].numpy().tolist(), parsed["x"].numpy().tolist(), strict=True))


def test_spark_reads_files_that_tensorflow_wrote(spark: SparkSession, tmp_path: Path) -> None:
    import tensorflow as tf

    for number, options in enumerate(("", "GZIP", "ZLIB")):
        with tf.io.TFRecordWriter(str(tmp_path / f"train-{number}"), options) as writer:
            for value in range(10):
                writer.write(example(id=[10 * number + value], x=[value / 2, 1.0], s=[b"t"]).SerializeToString())
    found = read(spark, [tmp_path / "train-0", tmp_path / "train-[12]"])
    assert found.schema.simpleString() == "struct<id:bigint,s:string,x:array<float>>"
    assert [r.id for r in found.sort("id").collect()] == list(range(30))


def test_spark_reads_files_that_the_hadoop_connector_wrote(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "part-r-00000").write_bytes(base64.b64decode(HADOOP))
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".part-r-00000.crc").write_bytes(b"crc")
    found = [tuple(r) for r in read(spark, tmp_path).sort("label").collect()]
    assert found == [(-n, n, f"n{n}", [n / 2, 1.5], ["a", "b"][:n]) for n in range(3)]


def test_column_names_may_contain_a_dot(spark: SparkSession, tmp_path: Path) -> None:
    frame_ = spark.createDataFrame([(1, "x")], "`a.b` bigint, `c d` string")
    write(frame_, tmp_path / "out", partition_by="c d")
    assert (tmp_path / "out/c d=x").is_dir()
    assert read(spark, tmp_path / "out").collect() == frame_.collect()


# --- directories and modes --------------------------------------------------------------------------------------------


def test_partitions_have_sparks_layout(spark: SparkSession, tmp_path: Path) -> None:
    data = [(1, "a/b", 1.0), (1, "50%", 2.0), (2, None, 3.0), (2, "", 4.0), (None, "x y", 5.0)]
    frame_ = spark.createDataFrame(data, "k int, t string, x float")
    write(frame_, tmp_path / "ours", partition_by=["k", "t"])
    frame_.write.partitionBy("k", "t").parquet(str(tmp_path / "theirs"))
    directories = [
        sorted(str(file.parent.relative_to(tmp_path / kind)) for file in (tmp_path / kind).rglob("part-*"))
        for kind in ("ours", "theirs")
    ]
    assert directories[0] == directories[1]
    found, theirs = read(spark, tmp_path / "ours"), spark.read.parquet(str(tmp_path / "theirs"))
    assert dict(found.dtypes) == dict(theirs.dtypes)
    assert collected(found.select("k", "t", "x")) == collected(theirs.select("k", "t", "x"))
    declared = read(spark, tmp_path / "ours", schema="x float, k string, t string")
    assert {r.k for r in declared.collect()} == {"1", "2", None}


def test_a_partition_column_of_dates_is_read_as_declared(spark: SparkSession, tmp_path: Path) -> None:
    days = [(1.0, datetime.date(2026, 11, 21)), (2.0, None)]
    frame_ = spark.createDataFrame(days, "x float, day date").coalesce(1)
    write(frame_, tmp_path / "out", partition_by="day")
    found = read(spark, tmp_path / "out", schema="x float, day date")
    assert sorted(tuple(row) for row in found.collect()) == days


@data_sources
def test_a_partition_column_of_dates_is_read_by_name(spark: SparkSession, tmp_path: Path) -> None:
    frame_ = spark.createDataFrame([(1.0, datetime.date(2026, 11, 21)), (2.0, None)], "x float, day date")
    write(frame_, tmp_path / "out", partition_by="day")
    assert spark.read.format("tfrecord").schema("x float, day date").load(str(tmp_path / "out")).count() == 2


def test_sparks_setting_lets_an_overwrite_replace_single_partitions(
    spark: SparkSession, tmp_path: Path, viewfs: str
) -> None:
    one, two = (spark.createDataFrame([(x, x % 2) for x in xs], "x int, k int").coalesce(1) for xs in ((1, 2), (3,)))
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:
        for place in (str(tmp_path / "out"), f"{viewfs}/out"):
            write(one, place, partition_by="k")
            write(two, place, partition_by="k", mode="overwrite")
            assert sorted(row.x for row in read(spark, place).collect()) == [2, 3]
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")


@data_sources
def test_an_overwrite_by_name_may_replace_single_partitions(spark: SparkSession, tmp_path: Path) -> None:
    one, two = (spark.createDataFrame([(x, x % 2) for x in xs], "x int, k int").coalesce(1) for xs in ((1, 2), (3,)))
    write(one, tmp_path / "out", partition_by="k")
    by_name = two.write.format("tfrecord").mode("overwrite").option("partitionBy", "k")
    by_name.option("partitionOverwriteMode", "dynamic").save(str(tmp_path / "out"))
    assert sorted(row.x for row in read(spark, tmp_path / "out").collect()) == [2, 3]


def test_append_overwrite_ignore_and_error_work_as_in_spark(
    spark: SparkSession, numbers: DataFrame, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    write(numbers, path)
    with pytest.raises(PlanError, match="exists already"):
        write(numbers, path)
    assert write(numbers, path, mode="ignore") == Saved(str(path), 0, 0, 0)
    assert write(numbers, path, mode="append").rows == 60
    assert read(spark, path).count() == 120
    # The files to overwrite may be the files that are read.
    write(read(spark, path, schema=numbers.schema).where("id < 5"), path, mode="overwrite")
    assert sorted(r.id for r in read(spark, path).collect()) == sorted([0, 1, 2, 3, 4] * 2)
    assert [name for name in there(path) if not name.startswith("part-")] == ["_SUCCESS"]


def test_a_frame_without_rows_becomes_a_directory_without_rows(spark: SparkSession, tmp_path: Path) -> None:
    empty = spark.createDataFrame([], "x float")
    assert write(empty, tmp_path / "out").files == 0
    assert there(tmp_path / "out") == ["_SUCCESS"]
    assert read(spark, tmp_path / "out", schema="x float").collect() == []
    with pytest.raises(PlanError, match="no records to infer a schema from"):
        read(spark, tmp_path / "out")


class FailsOnce:
    """Yields each partition's rows; the first attempt fails in the middle."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        for batch in batches:
            yield batch.slice(0, 1)
            if TaskContext.get().attemptNumber() == 0:
                raise RuntimeError("the first attempt")
            yield batch.slice(1)


def test_a_retried_task_writes_each_row_once(spark: SparkSession, numbers: DataFrame, tmp_path: Path) -> None:
    saved = write(numbers.mapInArrow(FailsOnce(), numbers.schema), tmp_path / "out")
    assert (saved.files, saved.rows) == (3, 60)
    assert len(there(tmp_path / "out")) == 4
    assert [r.id for r in read(spark, tmp_path / "out").sort("id").collect()] == list(range(60))


def test_a_failed_job_leaves_no_files_and_reports_the_cause(
    spark: SparkSession, numbers: DataFrame, tmp_path: Path
) -> None:
    bad = numbers.selectExpr("if(id = 59, raise_error('row 59 is bad'), id) AS id")
    with pytest.raises(FeedFailed, match="was not written: .*row 59 is bad"):
        write(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write(numbers, tmp_path / "out")
    before = there(tmp_path / "out")
    with pytest.raises(FeedFailed, match="column 'x' must have arrays of 3 values, got one of 2"):
        write(numbers, tmp_path / "out", mode="overwrite", lengths={"x": 3})
    assert there(tmp_path / "out") == before


# --- the data source --------------------------------------------------------------------------------------------------


@data_sources
def test_spark_writes_and_reads_the_format_by_its_name(spark: SparkSession, numbers: DataFrame, tmp_path: Path) -> None:
    tfrecord.register(spark)
    tfrecord.register(spark)
    path = str(tmp_path / "out")
    numbers.write.format("tfrecord").mode("append").save(path)
    numbers.write.format("tfrecord").mode("append").option("compression", "gzip").save(path)
    found = spark.read.format("tfrecord").load(path)
    assert found.schema.simpleString() == "struct<id:bigint,x:array<float>>"
    assert found.where("id >= 50").count() == 20
    declared = spark.read.format("tfrecord").schema(numbers.schema).load(path)
    assert sorted(map(str, declared.distinct().collect())) == collected(numbers)
    numbers.limit(7).write.format("tfrecord").mode("overwrite").option("partitionBy", "id").save(path)
    assert spark.read.format("tfrecord").load(path).select("id").distinct().count() == 7
    assert len([name for name in there(tmp_path / "out") if "temporary" in name]) == 0


@data_sources
def test_a_failed_write_by_name_keeps_the_existing_files(
    spark: SparkSession, numbers: DataFrame, tmp_path: Path
) -> None:
    tfrecord.register(spark)
    numbers.write.format("tfrecord").mode("append").save(str(tmp_path / "out"))
    before = there(tmp_path / "out")
    bad = numbers.selectExpr("if(id = 59, raise_error('row 59 is bad'), id) AS id")
    with pytest.raises(Exception, match="row 59 is bad"):
        bad.write.format("tfrecord").mode("overwrite").save(str(tmp_path / "out"))
    assert there(tmp_path / "out") == before


@data_sources
def test_options_by_name_are_checked_before_any_row_is_read(
    spark: SparkSession, numbers: DataFrame, tmp_path: Path
) -> None:
    tfrecord.register(spark)
    write(numbers, tmp_path / "out")
    reader = spark.read.format("tfrecord")
    with pytest.raises(AnalysisException, match="option 'recordtyp': no such option; did you mean 'recordtype'"):
        reader.option("recordTyp", "Example").load(str(tmp_path / "out"))
    with pytest.raises(AnalysisException, match="nothing: no such path exists"):
        spark.read.format("tfrecord").load(str(tmp_path / "nothing"))
    with pytest.raises(AnalysisException, match="column 'y' is date: cast it to string"):
        spark.sql("SELECT current_date() AS y").write.format("tfrecord").mode("append").save(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@data_sources
def test_damaged_records_by_name_are_rows_of_the_bad_column(spark: SparkSession, tmp_path: Path) -> None:
    tfrecord.register(spark)
    damaged(tmp_path / "a")
    options = {"mode": "skip", "badColumn": "bad"}
    found = spark.read.format("tfrecord").options(**options).load(str(tmp_path / "a"))
    assert found.where("bad IS NULL").count() == 9
    (told,) = found.where("bad IS NOT NULL").collect()
    assert told.bad == f"{tmp_path / 'a'}, byte {DAMAGED}: the checksum of the record is wrong"


# --- damage -----------------------------------------------------------------------------------------------------------

WHOLE = 16 + len(b"\x0a\x0c\x0a\x0a\x0a\x01i\x12\x05\x1a\x03\x0a\x01\x00")
DAMAGED = 4 * WHOLE


def damaged(path: Path) -> Path:
    """Write ten records of one size, the fifth with a bit flipped."""
    put(path, *(example(i=[number]) for number in range(10)))
    data = bytearray(path.read_bytes())
    assert len(data) == 10 * WHOLE
    data[DAMAGED + 12 + 3] ^= 1
    path.write_bytes(bytes(data))
    return path


def test_a_damaged_record_raises_an_error_with_file_and_byte(spark: SparkSession, tmp_path: Path) -> None:
    path = damaged(tmp_path / "a")
    says = f"{path}, byte {DAMAGED}: the checksum of the record is wrong; mode='skip' skips such records"
    with pytest.raises(PlanError, match=says):
        read(spark, tmp_path)
    with pytest.raises(PythonException, match=says):
        read(spark, tmp_path, schema="i bigint", sample=0).collect()


def test_skipped_records_are_counted_and_located(spark: SparkSession, tmp_path: Path) -> None:
    damaged(tmp_path / "a")
    cut = put(tmp_path / "b", *(example(i=[number]) for number in range(10)))
    cut.write_bytes(cut.read_bytes()[: 3 * WHOLE + 20])
    put(tmp_path / "c", example(i=[1]))
    skipped = Skipped(spark)
    found = read(spark, tmp_path, mode="skip", skipped=skipped)
    assert repr(skipped) == "nothing was left out"
    for _ in range(2):  # a file that is read twice counts once
        assert found.count() == 9 + 3 + 1
        assert skipped.records == 2
    files = skipped.files
    assert set(files) == {str(tmp_path / "a"), str(tmp_path / "b")}
    assert (files[str(tmp_path / "a")].first, files[str(tmp_path / "a")].cut) == (DAMAGED, None)
    assert files[str(tmp_path / "b")].cut == 3 * WHOLE
    assert "2 damaged places in 2 files were left out" in repr(skipped)
    assert f"b, byte {3 * WHOLE}: the file ends within a record" in repr(skipped)


def test_the_bad_column_reports_damage_beside_the_rows(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path / "k=1/a", example(i=[1]), example(i=[2]))
    damaged(tmp_path / "k=2/b")
    found = read(spark, tmp_path, mode="skip", bad_column="bad", schema="bad string, i int, k int")
    assert found.columns == ["bad", "i", "k"]
    told = {(r.i, r.k) for r in found.where("bad IS NOT NULL").collect()}
    assert told == {(None, 2)}
    assert found.where("bad IS NULL").count() == 11


# --- what is refused --------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_on_the_driver(spark: SparkSession, numbers: DataFrame, tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(numbers, path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no records here, " * 9)
    refused: list[tuple[str, Any]] = [
        ("no such path exists", lambda: read(spark, tmp_path / "nothing")),
        ("no records to infer a schema from", lambda: read(spark, tmp_path / "empty")),
        ("it is not a TFRecord file", lambda: read(spark, tmp_path / "text")),
        ("column 'lable' is in none", lambda: read(spark, path, schema="id int, lable int")),
        ("column 'id' is declared float, but is bigint", lambda: read(spark, path, schema="id float")),
        ("column 'x' is declared float, but is array<float>", lambda: read(spark, path, schema="x float")),
        ("got 'Exmple'; did you mean", lambda: read(spark, path, record_type="Exmple")),
        ("schema must be as in 'x float', got 'id integre': ", lambda: read(spark, path, schema="id integre")),
        ("column 'id' is date: cast", lambda: read(spark, path, schema="id date")),
        ("spark must be a SparkSession", lambda: read(path, spark)),  # type: ignore[arg-type]
        ("df must be a Spark DataFrame", lambda: write([1, 2], path)),  # type: ignore[arg-type]
        ("got 'apend'; did you mean 'append'", lambda: write(numbers, path, mode="apend")),
        (
            "compression must be 'gzip', or None, got 'lz4'",
            lambda: write(numbers, path, mode="append", compression="lz4"),
        ),
        ("partition_by: no column 'k'", lambda: write(numbers, path, mode="append", partition_by="k")),
        ("partition_by: column 'x' is array<float>", lambda: write(numbers, path, mode="append", partition_by="x")),
        (
            "must have a column to write apart from those of partition_by, got id",
            lambda: write(numbers.select("id"), tmp_path / "n", partition_by="id"),
        ),
        ("is a file: give a directory", lambda: write(numbers, tmp_path / "text", mode="overwrite")),
    ]
    for says, call in refused:
        with pytest.raises(PlanError) as caught:
            call()
        assert says in str(caught.value)
    assert (tmp_path / "text").is_file()


def test_a_vector_and_a_decimal_are_refused_with_what_to_do(spark: SparkSession, tmp_path: Path) -> None:
    frame_ = spark.createDataFrame([(Vectors.dense(1.0), 2)], ["v", "n"]).selectExpr(
        "v", "cast(n as decimal(5,1)) AS d"
    )
    with pytest.raises(PlanError, match=r"'v' is vector: use .*vector_to_array.* 'd' is decimal\(5,1\): cast it"):
        write(frame_, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_array_of_another_length_is_reported_with_file_and_byte(spark: SparkSession, tmp_path: Path) -> None:
    path = put(tmp_path / "a", example(x=[1.0, 2.0]), example(x=[3.0]))
    with pytest.raises(
        PythonException, match=rf"{path}, byte \d+: column 'x' must have arrays of 2 values, got one of 1"
    ):
        read(spark, path, lengths={"x": 2}).collect()


def test_a_column_that_is_missing_everywhere_can_be_read_as_null(spark: SparkSession, tmp_path: Path) -> None:
    put(tmp_path / "a", example(i=[1]))
    found = read(spark, tmp_path, schema="i int, later string", sample=0)
    assert [tuple(r) for r in found.collect()] == [(1, None)]


# --- Hadoop's own file systems ----------------------------------------------------------------------------------------


@pytest.fixture
def viewfs(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A URL that Hadoop knows and fsspec does not."""
    (tmp_path / "mounted").mkdir()
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    cluster = f"tfos{os.getpid()}{abs(hash(tmp_path)) % 10**6}"
    conf.set(f"fs.viewfs.mounttable.{cluster}.link./data", f"file://{tmp_path}/mounted")
    yield f"viewfs://{cluster}/data"
    conf.unset(f"fs.viewfs.mounttable.{cluster}.link./data")


def test_urls_that_only_hadoop_knows_are_written_and_read_by_hadoop(
    spark: SparkSession, numbers: DataFrame, tmp_path: Path, viewfs: str
) -> None:
    url, local = f"{viewfs}/out", tmp_path / "mounted/out"
    saved = write(numbers.selectExpr("*", "id % 2 AS k"), url, partition_by="k", compression="gzip")
    assert (saved.files, saved.rows) == (6, 60)
    assert saved.size == sum(file.stat().st_size for file in local.rglob("part-*"))
    assert (local / "_SUCCESS").exists()
    for path in (url, local):
        found = read(spark, path, schema="id int, x array<float>, k int")
        assert sorted(tuple(r) for r in found.collect()) == [(n, [float(n), 1.0], n % 2) for n in range(60)]
    assert read(spark, url).schema.simpleString() == "struct<id:bigint,x:array<float>,k:int>"
    with pytest.raises(PlanError, match="exists already"):
        write(numbers, url)
    write(numbers.limit(5), url, mode="overwrite")
    assert read(spark, url).count() == 5
    with pytest.raises(FeedFailed, match="row 9 is bad"):
        write(numbers.selectExpr("if(id = 9, raise_error('row 9 is bad'), id) AS id"), url, mode="append")
    assert read(spark, url).count() == 5
    assert not [name for name in there(local) if "temporary" in name]
    with pytest.raises(PlanError, match="no such path exists"):
        read(spark, f"{viewfs}/nothing")
    shutil.rmtree(local)


def test_an_unknown_url_is_refused_with_the_libraries_tried(spark: SparkSession, numbers: DataFrame) -> None:
    for call in (lambda: read(spark, "nofs://host/x"), lambda: write(numbers, "nofs://host/x")):
        with pytest.raises(PlanError, match=r"neither fsspec \(Protocol not known.* nor Spark's Hadoop .*nofs"):
            call()


def test_the_schema_may_be_a_struct_or_text(spark: SparkSession, numbers: DataFrame, tmp_path: Path) -> None:
    write(numbers, tmp_path / "out")
    schema = StructType.fromDDL("x array<float>, id int") if hasattr(StructType, "fromDDL") else numbers.schema
    assert read(spark, tmp_path / "out", schema=schema).columns == schema.fieldNames()
