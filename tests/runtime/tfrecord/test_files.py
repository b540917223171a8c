"""Paths, partitions and schemas: which files are listed, what is inferred, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from tfos_nb.errors import PlanError
from tfos_nb.runtime.tfrecord.encode import encode
from tfos_nb.runtime.tfrecord.fields import Field, RecordType, arrow_schema
from tfos_nb.runtime.tfrecord.files import (
    DataFile,
    NoFileSystem,
    absolute,
    file_system,
    found,
    open_file,
    partition_directory,
    partitions_of,
    plain,
)
from tfos_nb.runtime.tfrecord.framing import frame
from tfos_nb.runtime.tfrecord.inspection import Look, look, partition_types
from tfos_nb.runtime.tfrecord.plan import ask, plan
from tfos_nb.runtime.tfrecord.schema import fields_of, record_type_of

EXAMPLE, SEQUENCE = RecordType.EXAMPLE, RecordType.SEQUENCE_EXAMPLE


def put(path: Path, fields: list[Field], rows: dict[str, list[Any]], record_type: RecordType = EXAMPLE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = pa.record_batch(rows, schema=arrow_schema(tuple(fields)))
    path.write_bytes(frame(encode(batch, fields, record_type)))
    return path


def looked(*paths: Path, record_type: RecordType = EXAMPLE, skip: bool = False, sample: int = 1000) -> Look:
    files = [DataFile(str(path), path.stat().st_size) for path in paths]
    return look(files, open_file, record_type, sample, skip=skip)


def names(path: Path) -> list[str]:
    return [str(Path(file.url).relative_to(path)) for file in found(str(path))]


def test_markers_unfinished_files_and_empty_files_are_not_listed(tmp_path: Path) -> None:
    for name in ("a.tfrecord", "k=1/b", "_SUCCESS", ".a.crc", "_temporary-1/c", "k=1/_d", "_k=2/e", "empty"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"" if name in ("_SUCCESS", "empty") else b"x")
    assert names(tmp_path) == ["_k=2/e", "a.tfrecord", "k=1/b"]


def test_a_pattern_a_file_and_a_directory_are_accepted_as_paths(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "test-0"):
        (tmp_path / name).write_bytes(b"x")
    assert [Path(file.url).name for file in found(str(tmp_path / "train-*"))] == ["train-0", "train-1"]
    assert [Path(file.url).name for file in found(str(tmp_path / "test-0"))] == ["test-0"]
    with pytest.raises(PlanError, match=r"nothing-\*: no such file exists"):
        found(str(tmp_path / "nothing-*"))
    with pytest.raises(PlanError, match="nothing: no such path exists"):
        found(str(tmp_path / "nothing"))


def test_a_url_that_fsspec_supports_is_listed_with_its_protocol() -> None:
    with fsspec.open("memory://tfrecord-listing/k=3/a", "wb") as file:
        file.write(b"x")
    (only,) = found("memory://tfrecord-listing")
    assert only == DataFile("memory:///tfrecord-listing/k=3/a", 1, (("k", "3"),))
    with open_file(only.url) as stream:
        assert stream.read(5) == b"x"


def test_an_unknown_url_scheme_is_refused() -> None:
    with pytest.raises(NoFileSystem, match="viewfs"):
        file_system("viewfs://cluster/data")


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("file:/tmp/x%20y", "/tmp/x y"),
        ("file:///tmp/x", "/tmp/x"),
        ("hdfs://h/x/", "hdfs://h/x"),
        ("/x/../y", "/y"),
    ],
)
def test_a_path_is_normalized_so_that_all_processes_find_it(given: str, becomes: str) -> None:
    assert absolute(given) == becomes


def test_a_relative_path_is_resolved_on_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("x/y") == str(tmp_path / "x/y")


@pytest.mark.parametrize("given", [None, "", 5, b"x"])
def test_an_invalid_path_is_refused(given: Any) -> None:
    with pytest.raises(PlanError, match="path must be a path or a URL"):
        absolute(given)


def test_a_secret_in_a_url_is_not_shown() -> None:
    assert plain("s3://key:secret@bucket/x") == "s3://bucket/x"


def test_partition_values_survive_in_the_names_of_directories() -> None:
    for value in ("plain", "a/b", "1:30", "50%", "a=b", "ä", "x y", None):
        assert partitions_of([partition_directory("k", value)]) == (("k", value),)


# --- schemas ----------------------------------------------------------------------------------------------------------


def test_the_schema_is_inferred_from_all_files_and_not_from_the_first_record(tmp_path: Path) -> None:
    first = put(tmp_path / "a", [Field("x", "float", 1), Field("b", "binary")], {"x": [[1.0]], "b": [b"text"]})
    second = put(
        tmp_path / "b",
        [Field("x", "float", 1), Field("b", "binary"), Field("late", "int"), Field("w", "string", 1)],
        {"x": [[1.0, 2.0]], "b": [b"\xff"], "late": [3], "w": [[]]},
    )
    assert looked(first).infer() == (Field("b", "string"), Field("x", "float"))
    assert looked(first, second).infer() == (
        Field("b", "binary"),
        Field("late", "bigint"),
        Field("w", "string", 1),
        Field("x", "float", 1),
    )
    assert looked(first).infer(binary=["b"])[0] == Field("b", "binary")


def test_feature_lists_are_inferred_as_arrays_of_arrays(tmp_path: Path) -> None:
    fields = [Field("id", "bigint"), Field("steps", "float", 2), Field("words", "string", 2)]
    rows = {"id": [1, 2], "steps": [[[1.0], [2.0]], []], "words": [[], [["a", "b"]]]}
    path = put(tmp_path / "a", fields, rows, SEQUENCE)
    assert looked(path, record_type=SEQUENCE).infer() == tuple(fields)


def test_conflicts_are_reported_by_column_with_their_positions(tmp_path: Path) -> None:
    first = put(
        tmp_path / "a", [Field("x", "float"), Field("y", "int"), Field("z", "int")], {"x": [1.0], "y": [1], "z": [1]}
    )
    second = put(
        tmp_path / "b", [Field("x", "int"), Field("y", "string"), Field("z", "int")], {"x": [1], "y": ["a"], "z": [2]}
    )
    with pytest.raises(PlanError) as caught:
        looked(first, second).infer()
    told = str(caught.value)
    assert f"Column 'x' is float in {first}, byte 0, and int64 in {second}, byte 0" in told
    assert f"Column 'y' is int64 in {first}, byte 0, and bytes in {second}, byte 0" in told
    assert "'z'" not in told


def test_a_sample_is_taken_from_evenly_spaced_files(tmp_path: Path) -> None:
    paths = [put(tmp_path / f"{n:03d}", [Field(f"only_{n}", "int")], {f"only_{n}": [1] * 50}) for n in range(100)]
    seen = looked(*paths, sample=20)
    assert (seen.files, seen.records) == (10, 20)
    assert {"only_0", "only_99"} < set(seen.columns)


def test_a_missing_column_and_one_of_another_type_are_both_named(tmp_path: Path) -> None:
    path = put(tmp_path / "a", [Field("label", "int"), Field("x", "float", 1)], {"label": [1], "x": [[1.0, 2.0]]})
    with pytest.raises(PlanError) as caught:
        looked(path).check([Field("lable", "bigint"), Field("x", "float"), Field("label", "float")])
    told = str(caught.value)
    assert "column 'lable' is in none of the first records of 1 file (1 were read); did you mean 'label'?" in told
    assert f"column 'x' is declared float, but is array<float> in {path}, byte 0" in told
    assert f"column 'label' is declared float, but is bigint in {path}, byte 0" in told
    assert "The records have label (bigint), x (array<float>)" in told


def test_a_file_that_is_not_a_tfrecord_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"id,name\n1,x\n2,y\n" * 3)
    with pytest.raises(PlanError, match=r"a, byte 0: it is not a TFRecord file"):
        looked(tmp_path / "a")


def test_records_that_are_not_examples_are_named_by_byte(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(frame(pa.array([b"", b"plain text"], pa.large_binary())))
    with pytest.raises(PlanError, match=r"a, byte 16: it is not a valid Example"):
        looked(tmp_path / "a")
    assert looked(tmp_path / "a", skip=True).records == 2


def test_the_type_of_a_partition_column_fits_all_its_values() -> None:
    def files(*values: str | None) -> list[DataFile]:
        return [DataFile(str(number), 1, (("k", value),)) for number, value in enumerate(values)]

    assert partition_types(files("1", "-2", None), {}) == (("k", "int"),)
    assert partition_types(files("1", str(2**40)), {}) == (("k", "bigint"),)
    assert partition_types(files("1", "2.5"), {}) == (("k", "double"),)
    assert partition_types(files("1", "x"), {}) == (("k", "string"),)
    assert partition_types(files("1", "2"), {"k": "string"}) == (("k", "string"),)
    with pytest.raises(PlanError, match="'k' is declared int, but a directory is k=x"):
        partition_types(files("1", "x"), {"k": "int"})
    with pytest.raises(PlanError, match="must have the same partition columns"):
        partition_types([*files("1"), DataFile("b", 1)], {})


def test_every_unsupported_column_is_named_with_what_to_do() -> None:
    vector = {"type": "udt", "class": "org.apache.spark.ml.linalg.VectorUDT", "sqlType": {}}
    kinds = {
        "amount": "decimal(10,2)",
        "day": "date",
        "v": vector,
        "s": {"type": "struct", "fields": []},
        "days": {"type": "array", "elementType": "date", "containsNull": True},
        "nothing": "void",
        "nested": {"type": "array", "elementType": {"type": "array", "elementType": "float"}},
        "fine": "integer",
    }
    schema = {"type": "struct", "fields": [{"name": name, "type": kind} for name, kind in kinds.items()]}
    with pytest.raises(PlanError) as caught:
        fields_of(schema, EXAMPLE)
    told = str(caught.value)
    for part in (
        "'amount' is decimal(10,2): cast it to double",
        "'day' is date: cast it to string",
        "'v' is vector: use pyspark.ml.functions.vector_to_array",
        "'s' is struct: select its fields",
        "'days' is array<date>: its elements are date",
        "'nothing' is void: drop it",
        "'nested' is array<array<float>>, which an Example cannot store: write record_type='SequenceExample'",
    ):
        assert part in told
    assert "'fine'" not in told


def test_the_record_type_is_accepted_in_any_spelling() -> None:
    assert record_type_of("example") is record_type_of("Example") is EXAMPLE
    assert record_type_of("sequence_example") is record_type_of(SEQUENCE) is SEQUENCE
    with pytest.raises(PlanError, match="record_type must be .*, got 'Exampel'; did you mean 'Example'"):
        record_type_of("Exampel")


GOOD: dict[str, Any] = {
    "schema": None,
    "record_type": "Example",
    "mode": "fail",
    "bad_column": "",
    "binary": (),
    "lengths": None,
    "sample": 100,
}
DECLARED = {"type": "struct", "fields": [{"name": "x", "type": "float"}]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": "skp"}, "did you mean 'skip'"),
        ({"sample": -1}, "a number of records, or 0"),
        ({"sample": True}, "a number of records, or 0"),
        ({"sample": 0}, "the schema must be declared"),
        ({"bad_column": "bad"}, "needs mode='skip'"),
        ({"binary": ["x"], "schema": DECLARED}, "declare these columns as binary"),
    ],
)
def test_an_invalid_parameter_is_refused_with_what_it_should_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        ask(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ({"y": 3}, "no column 'y'"),
        ({"x": 3}, "column 'x' is float, not an array"),
        ([3], "lengths must be a mapping"),
        ({"a": "3"}, "the length of 'a' must be a number of values, got '3'"),
    ],
)
def test_an_invalid_length_is_refused(lengths: Any, says: str) -> None:
    array = {"type": "array", "elementType": "float", "containsNull": True}
    schema = {"fields": [{"name": "x", "type": "float"}, {"name": "a", "type": array}]}
    with pytest.raises(PlanError, match=says):
        fields_of(schema, EXAMPLE, lengths=lengths)


def test_no_schema_can_be_inferred_without_records(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no records to infer a schema from"):
        plan(ask(**GOOD), [], open_file)
    assert plan(ask(**{**GOOD, "schema": DECLARED}), [], open_file).reading.order == ("x",)
