"""Convert rows to records and back; TensorFlow can read ours, and we can read TensorFlow's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfos_nb.runtime.tfrecord.canonical import canonical
from tfos_nb.runtime.tfrecord.decode import columns
from tfos_nb.runtime.tfrecord.encode import encode
from tfos_nb.runtime.tfrecord.fields import ELEMENTS, Field, RecordError, RecordType, arrow_schema
from tfos_nb.runtime.tfrecord.framing import PAD
from tfos_nb.runtime.tfrecord.parse import Parsed, parse

EXAMPLE, SEQUENCE = RecordType.EXAMPLE, RecordType.SEQUENCE_EXAMPLE
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(width=32, allow_nan=False),
    "boolean": st.booleans(),
    "tinyint": st.integers(-(2**7), 2**7 - 1),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "string": st.text(max_size=200),
    "binary": st.binary(max_size=200),
}


def parsed(messages: list[bytes], record_type: RecordType = EXAMPLE, wanted: Any = None) -> Parsed:
    bounds = np.concatenate(([0], np.cumsum([len(message) for message in messages]))).astype(np.int64)
    return parse(b"".join(messages) + PAD, bounds[:-1], bounds[1:], record_type, wanted)


def read_back(messages: list[bytes], fields: list[Field], record_type: RecordType = EXAMPLE) -> pa.RecordBatch:
    found = parsed(messages, record_type, {field.name for field in fields})
    assert not found.bad
    return columns(found, fields)


def batch_of(fields: list[Field], rows: dict[str, list[Any]]) -> pa.RecordBatch:
    return pa.record_batch(rows, schema=arrow_schema(tuple(fields)))


def example(**features: list[Any]) -> Any:
    import tensorflow as tf

    return tf.train.Example(features=tf.train.Features(feature={k: feature(v) for k, v in features.items()}))


def feature(values: list[Any]) -> Any:
    import tensorflow as tf

    if values and isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    if values and isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


@st.composite
def tables(draw: st.DrawFn, deepest: int) -> tuple[list[Field], dict[str, list[Any]]]:
    count = draw(st.sampled_from([0, 1, 3, 50]))
    fields, rows = [], {}
    for number in range(draw(st.integers(1, 4))):
        name = f"c{number}" * draw(st.sampled_from([1, 80]))
        field = Field(name, draw(st.sampled_from(sorted(VALUES))), draw(st.integers(0, deepest)))
        values = VALUES[field.element]
        for _ in range(field.depth):
            values = st.lists(values, max_size=draw(st.sampled_from([0, 3, 40])))
        # Draw a few values and build rows from them: drawing each row would take minutes.
        known = draw(st.lists(st.none() | values, min_size=1, max_size=4))
        chooser = random.Random(draw(st.integers(0, 99)))
        fields.append(field)
        rows[field.name] = [chooser.choice(known) for _ in range(count)]
    return fields, rows


@settings(max_examples=150, deadline=None)
@given(tables(1))
def test_any_table_is_restored_from_examples(table: tuple[list[Field], dict[str, list[Any]]]) -> None:
    fields, rows = table
    batch = batch_of(fields, rows)
    assert read_back(encode(batch, fields).to_pylist(), fields).to_pydict() == batch.to_pydict()


@settings(max_examples=100, deadline=None)
@given(tables(2))
def test_any_table_is_restored_from_sequence_examples(table: tuple[list[Field], dict[str, list[Any]]]) -> None:
    fields, rows = table
    batch = batch_of(fields, rows)
    messages = encode(batch, fields, SEQUENCE).to_pylist()
    assert read_back(messages, fields, SEQUENCE).to_pydict() == batch.to_pydict()


@settings(max_examples=60, deadline=None)
@given(tables(2))
def test_tensorflow_parses_and_writes_the_same_message(table: tuple[list[Field], dict[str, list[Any]]]) -> None:
    import tensorflow as tf

    fields, rows = table
    for message in encode(batch_of(fields, rows), fields, SEQUENCE).to_pylist()[:5]:
        theirs = tf.train.SequenceExample.FromString(message)
        assert read_back([theirs.SerializeToString()], fields, SEQUENCE).equals(read_back([message], fields, SEQUENCE))
        assert len(theirs.context.feature) + len(theirs.feature_lists.feature_list) == sum(
            value is not None for value in read_back([message], fields, SEQUENCE).to_pylist()[0].values()
        )


def test_tensorflow_parses_examples_that_we_write() -> None:
    import tensorflow as tf

    fields = [Field("f", "float", 1), Field("i", "bigint"), Field("s", "string"), Field("w", "string", 1)]
    batch = batch_of(fields, {"f": [[1.5, 2.0], [3.0, -4.0]], "i": [7, -1], "s": ["ä", ""], "w": [["x", "yy"], []]})
    spec = {
        "f": tf.io.FixedLenFeature([2], tf.float32),
        "i": tf.io.FixedLenFeature([], tf.int64),
        "s": tf.io.FixedLenFeature([], tf.string),
        "w": tf.io.RaggedFeature(tf.string),
    }
    found = tf.io.parse_example(encode(batch, fields).to_pylist(), spec)
    assert found["f"].numpy().tolist() == [[1.5, 2.0], [3.0, -4.0]]
    assert found["i"].numpy().tolist() == [7, -1]
    assert found["s"].numpy().tolist() == ["ä".encode(), b""]
    assert found["w"].to_list() == [[b"x", b"yy"], []]


def test_tensorflow_parses_feature_lists() -> None:
    import tensorflow as tf

    fields = [Field("id", "bigint"), Field("steps", "float", 2)]
    batch = batch_of(fields, {"id": [5], "steps": [[[1.0, 2.0], [3.0]]]})
    context, lists = tf.io.parse_single_sequence_example(
        encode(batch, fields, SEQUENCE)[0].as_py(),
        context_features={"id": tf.io.FixedLenFeature([], tf.int64)},
        sequence_features={"steps": tf.io.RaggedFeature(tf.float32)},
    )
    assert context["id"].numpy() == 5
    assert lists["steps"].to_list() == [[1.0, 2.0], [3.0]]


def test_tensorflows_examples_are_read_with_features_in_any_order() -> None:
    names = [f"feature_{number}" for number in range(40)]
    messages, expected = [], []
    chooser = random.Random(1)
    for row in range(200):
        there = chooser.sample(names, chooser.randint(0, 40))
        messages.append(example(**{name: [float(row)] * 2 for name in there}).SerializeToString())
        expected.append({name: [float(row)] * 2 if name in there else None for name in names})
    assert read_back(messages, [Field(name, "float", 1) for name in names]).to_pylist() == expected


def test_a_null_is_a_missing_feature_and_an_empty_array_an_empty_one() -> None:
    import tensorflow as tf

    fields = [Field("a", "float", 1), Field("n", "int"), Field("s", "string")]
    message = encode(batch_of(fields, {"a": [[]], "n": [None], "s": [""]}), fields)[0].as_py()
    features = tf.train.Example.FromString(message).features.feature
    assert sorted(features) == ["a", "s"]
    assert list(features["s"].bytes_list.value) == [b""]
    assert features["a"].WhichOneof("kind") == "float_list"


def test_only_the_rows_of_a_slice_are_written() -> None:
    fields = [Field("a", "bigint", 1), Field("s", "string"), Field("f", "float"), Field("n", "string", 2)]
    rows = {
        "a": [[1], None, [300, 2], [], [5]],
        "s": ["a", "bb", None, "dddd", "e"],
        "f": [1.0, None, 3.0, 4.0, 5.0],
        "n": [[["x"]], [], None, [[], ["y", "z"]], [["w"]]],
    }
    batch = batch_of(fields, rows).slice(1, 3)
    assert read_back(encode(batch, fields, SEQUENCE).to_pylist(), fields, SEQUENCE).to_pydict() == batch.to_pydict()


def test_arrays_of_arrays_below_a_null_are_left_out() -> None:
    inner = pa.array([[1, 2], [3], [4, 5]], pa.list_(pa.int64()))
    hidden = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), inner, mask=pa.array([False, True, False]))
    batch = pa.record_batch({"x": hidden})
    found = read_back(
        encode(batch, [Field("x", "bigint", 2)], SEQUENCE).to_pylist(), [Field("x", "bigint", 2)], SEQUENCE
    )
    assert found.to_pydict() == {"x": [[[1, 2]], None, [[4, 5]]]}


# --- unusual encodings that protobuf allows --------------------------------------------------------------------------

UNPACKED_FLOATS = bytes.fromhex("0a18 0a16 0a0166 1211 120f 0d0000803f 0d00000040 0d00004040".replace(" ", ""))
TWO_PARTS = bytes.fromhex("0a10 0a0e 0a0169 1209 1a07 0a0101 0a020203".replace(" ", ""))
VALUE_FIRST = bytes.fromhex("0a0c 0a0a 1205 1a03 0a0107 0a0169".replace(" ", ""))
UNKNOWN_INSIDE = bytes.fromhex("0a0e 0a0c 0a0169 1207 1a03 0a0109 2001".replace(" ", ""))


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (UNPACKED_FLOATS, Field("f", "float", 1), [1.0, 2.0, 3.0]),
        (TWO_PARTS, Field("i", "bigint", 1), [1, 2, 3]),
        (VALUE_FIRST, Field("i", "bigint"), 7),
        (UNKNOWN_INSIDE, Field("i", "bigint"), 9),
    ],
    ids=["unpacked", "two parts", "value before key", "unknown field"],
)
def test_an_unusual_encoding_is_read_as_tensorflow_reads_it(message: bytes, field: Field, value: Any) -> None:
    import tensorflow as tf

    theirs = tf.train.Example.FromString(message).features.feature[field.name]
    assert (
        list((theirs.float_list if field.element == "float" else theirs.int64_list).value) == np.ravel(value).tolist()
    )
    plain = example(other=[1]).SerializeToString()
    assert read_back([plain, message, plain], [field]).to_pydict() == {field.name: [None, value, None]}


def test_the_last_value_of_a_repeated_key_counts() -> None:
    message = example(i=[1]).SerializeToString()
    entries = message[2:] + example(i=[2]).SerializeToString()[2:]
    twice = b"\n" + bytes([len(entries)]) + entries
    assert read_back([twice], [Field("i", "bigint")]).to_pydict() == {"i": [2]}


def test_features_in_two_parts_are_merged() -> None:
    both = example(i=[1]).SerializeToString() + example(j=[2]).SerializeToString()
    assert read_back([both], [Field("i", "bigint"), Field("j", "bigint")]).to_pydict() == {"i": [1], "j": [2]}


def test_the_canonical_form_preserves_the_message() -> None:
    message = example(i=[1, -5], f=[0.5], s=[b"x", b""]).SerializeToString()
    assert read_back([canonical(message, EXAMPLE)], [Field("i", "bigint", 1), Field("s", "string", 1)]).to_pydict() == {
        "i": [[1, -5]],
        "s": [["x", ""]],
    }


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 2**32))
def test_garbage_is_refused_by_row_or_read_as_tensorflow_reads_it(garbage: bytes, seed: int) -> None:
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    whole = bytearray(example(i=[1, 300], s=[b"abc"], f=[1.0, 2.0]).SerializeToString())
    chooser = random.Random(seed)
    whole[chooser.randrange(len(whole))] ^= 1 << chooser.randrange(8)
    for message in (garbage, bytes(whole)):
        found = parsed([example(i=[4]).SerializeToString(), message])
        try:
            theirs = tf.train.Example.FromString(message).features.feature
        except DecodeError:
            assert 1 in found.bad
            continue
        if 1 not in found.bad:
            names = {name for name, lists in found.features.items() for one in lists if 1 in one.rows.tolist()}
            assert names == {name for name in theirs if theirs[name].WhichOneof("kind")}


def test_a_sequence_example_is_refused_as_an_example() -> None:
    import tensorflow as tf

    steps = tf.train.FeatureLists(feature_list={"x": tf.train.FeatureList(feature=[feature([1])])})
    other = tf.train.SequenceExample(feature_lists=steps).SerializeToString()
    assert parsed([other]).bad == {0: "it is a SequenceExample, not an Example"}


def test_a_bad_record_becomes_a_row_of_nulls_among_good_rows() -> None:
    found = parsed([example(i=[1]).SerializeToString(), b"\xff\xff\xff", example(i=[3]).SerializeToString()])
    assert list(found.bad) == [1]
    assert columns(found, [Field("i", "bigint")]).to_pydict() == {"i": [1, None, 3]}


# --- values that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "field", "says"),
    [
        ({"x": [1]}, Field("x", "float"), "is declared float, but a record has int64 values: declare bigint and cast"),
        ({"x": [1.0]}, Field("x", "int"), "is declared int, but a record has float values: declare float and cast"),
        ({"x": [b"a"]}, Field("x", "float", 1), "has bytes values: declare array<string or binary>"),
        ({"x": [1.0, 2.0]}, Field("x", "float"), "a record has 2 values: declare array<float>"),
        ({"x": [1, 300]}, Field("x", "tinyint", 1), "a record has 300: declare array<bigint>"),
        ({"x": [2]}, Field("x", "boolean"), "a record has 2: declare bigint"),
        ({"x": [b"\xff"]}, Field("x", "string"), "bytes that are not UTF-8: declare binary"),
        ({"x": [1.0]}, Field("x", "float", 1, length=2), "must have arrays of 2 values, got one of 1"),
    ],
)
def test_a_feature_that_does_not_fit_is_named_with_its_row(features: Any, field: Field, says: str) -> None:
    messages = [example(y=[1]).SerializeToString(), example(**features).SerializeToString()]
    with pytest.raises(RecordError, match=says) as caught:
        read_back(messages, [field])
    assert caught.value.row == 1
    assert "column 'x'" in str(caught.value)


def test_an_empty_list_is_null_if_one_value_is_declared() -> None:
    messages = [example(x=[1.0]).SerializeToString(), b"\x0a\x09\x0a\x07\x0a\x01x\x12\x02\x12\x00"]
    assert read_back(messages, [Field("x", "float")]).to_pydict() == {"x": [1.0, None]}


@pytest.mark.parametrize(
    ("field", "values", "says"),
    [
        (Field("x", "bigint", 1), [[1, None]], "column 'x' has a null inside an array"),
        (Field("x", "string", 2), [[["a"], None]], "column 'x' has a null inside an array"),
        (Field("x", "string", 2), [[["a", None]]], "column 'x' has a null inside an array"),
        (Field("x", "double"), [1.0, 1e300], "column 'x' has .*1e\\+300.*beyond float32"),
        (Field("x", "float", 1, length=3), [[1.0, 2.0, 3.0], [1.0]], "must have arrays of 3 values, got one of 1"),
        (Field("x", "float", 2, length=3), [[[1.0, 2.0, 3.0], [1.0]]], "must have arrays of 3 values, got one of 1"),
    ],
)
def test_a_value_that_no_record_can_hold_is_refused(field: Field, values: list[Any], says: str) -> None:
    with pytest.raises(RecordError, match=says):
        encode(batch_of([field], {"x": values}), [field], SEQUENCE)


def test_infinity_and_nan_are_accepted_as_floats() -> None:
    batch = batch_of([Field("x", "double")], {"x": [float("inf"), float("-inf"), float("nan")]})
    found = read_back(encode(batch, [Field("x", "double")]).to_pylist(), [Field("x", "double")]).column(0).to_numpy()
    assert found[:2].tolist() == [float("inf"), float("-inf")]
    assert np.isnan(found[2])


def test_a_float_is_unchanged_and_a_double_is_rounded_to_a_float() -> None:
    fields = [Field("f", "float"), Field("d", "double")]
    batch = batch_of(fields, {"f": [0.1], "d": [0.1]})
    found = read_back(encode(batch, fields).to_pylist(), fields)
    assert found.column(0).equals(batch.column(0))
    assert found.column(1).to_pylist() == [float(np.float32(0.1))]


def test_the_tests_cover_every_type() -> None:
    assert set(VALUES) == set(ELEMENTS)


def test_the_number_of_calls_does_not_grow_with_the_number_of_values() -> None:
    """Ten times as many rows must not need ten times as many calls (counted, not timed)."""
    import sys

    fields = [Field("f", "float", 1), Field("i", "bigint", 1), Field("s", "string"), Field("d", "double")]

    def calls(rows: int) -> int:
        batch = batch_of(
            fields, {"f": [[1.0] * 8] * rows, "i": [[1, 300]] * rows, "s": ["abc"] * rows, "d": [1.0] * rows}
        )
        counted = 0

        def count(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            messages = encode(batch, fields)
            raw = messages.buffers()[2].to_pybytes() + PAD
            offsets = np.frombuffer(messages.buffers()[1], dtype=np.int64)[: rows + 1]
            columns(parse(raw, offsets[:-1], offsets[1:], EXAMPLE), fields)
        finally:
            sys.setprofile(None)
        return counted

    calls(100)
    assert calls(5000) < 1.5 * calls(500)
