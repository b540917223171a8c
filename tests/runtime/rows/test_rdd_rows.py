"""The elements of an RDD become columns; a row that does not fit is named by its number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Row

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.rows.rdd_rows import batches_of_rows


class Named(NamedTuple):
    label: str
    pixels: list[int]


def columns(rows: Iterable[Any]) -> dict[str, list[Any]]:
    return dict(pa.Table.from_batches(batches_of_rows(rows)).to_pydict())


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([Row(x=1.5, y=2), Row(x=2.5, y=3)], {"x": [1.5, 2.5], "y": [2, 3]}),
        ([{"x": 1, "y": "a"}, {"y": "b", "x": 2}], {"x": [1, 2], "y": ["a", "b"]}),
        ([(1.0, [1, 2]), (2.0, [3, 4])], {"_1": [1.0, 2.0], "_2": [[1, 2], [3, 4]]}),
        ([[1, "a"], [2, "b"]], {"_1": [1, 2], "_2": ["a", "b"]}),
        ([Named("a", [1, 2]), Named("b", [3])], {"label": ["a", "b"], "pixels": [[1, 2], [3]]}),
        ([1, 2, 3], {"value": [1, 2, 3]}),
        (["a", "b"], {"value": ["a", "b"]}),
        ([(np.arange(3), np.float32(0.5))], {"_1": [[0, 1, 2]], "_2": [0.5]}),
        ([np.zeros(2), np.ones(2)], {"value": [[0.0, 0.0], [1.0, 1.0]]}),
        (
            [(np.eye(2), 1), (None, 2), (np.zeros((1, 3)), 3)],
            {"_1": [[[1, 0], [0, 1]], None, [[0] * 3]], "_2": [1, 2, 3]},
        ),
        ([np.ones((1, 2, 1), "uint8")] * 2, {"value": [[[[1], [1]]]] * 2}),
        ([(1, None), (None, 2)], {"_1": [1, None], "_2": [None, 2]}),
        ([(1,), (2.5,)], {"_1": [1.0, 2.5]}),
    ],
    ids=[
        "Row",
        "dict",
        "tuple",
        "list",
        "named tuple",
        "number",
        "text",
        "array in a tuple",
        "array",
        "pictures in tuples",
        "pictures",
        "None",
        "int and float",
    ],
)
def test_rows_of_each_kind_become_columns(rows: list[Any], expected: dict[str, Any]) -> None:
    assert columns(rows) == expected


def test_the_values_of_a_picture_keep_their_type() -> None:
    (batch,) = batches_of_rows([(np.full((2, 2), 7, "uint8"),)] * 3)
    assert batch.schema.field("_1").type == pa.list_(pa.list_(pa.uint8()))


def test_no_rows_make_no_batch() -> None:
    assert list(batches_of_rows(iter([]))) == []


def test_many_rows_make_batches_of_one_schema_in_order() -> None:
    batches = list(batches_of_rows((number, float(number)) for number in range(2500)))
    assert [batch.num_rows for batch in batches] == [1024, 1024, 452]
    assert len({batch.schema for batch in batches}) == 1
    assert pa.Table.from_batches(batches)["_1"].to_pylist() == list(range(2500))


def test_rows_are_read_only_when_they_are_needed() -> None:
    read: list[int] = []
    batches = batches_of_rows(read.append(number) or number for number in range(5000))
    next(batches)
    assert len(read) == 1024


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(1,), ("two",)], r"column '_1', row 1: 'two' is a str, not int64"),
        ([(1,)] * 1030 + [("two",)], r"column '_1', row 1030: 'two' is a str, not int64"),
        ([(1,)] * 1030 + [(2.5,)], r"column '_1', row 1030: 2.5 is a float, not int64"),
        ([(None,), (1,), ("two",)], r"column '_1', row 2: 'two' is a str, not int64"),
        ([([1.0],), (2.0,)], r"column '_1', row 1: 2.0 is a float, not list<.*double>"),
        ([("a" * 100,), (1,)], r"column '_1', row 1: 1 is a int, not string"),
        ([(1,), ("a" * 100,)], r"column '_1', row 1: 'a{56}\.\.\. is a str, not int64"),
        ([(1,), (object(),)], r"column '_1', row 1: <object.*> is a object, not int64"),
        (
            [(object(),)],
            r"column '_1', row 0: <object.*> is a object, which is no number, text, bytes or list of these",
        ),
        ([((1, "a"),)], r"column '_1', row 0: \(1, 'a'\) is a tuple, .* of one type. Convert it in the RDD's map"),
        ([(2**70,)], r"column '_1', row 0: 1180591620717411303424 is a int, which is no number"),
    ],
    ids=[
        "type",
        "later batch",
        "float after ints",
        "after None",
        "no list",
        "no text",
        "long",
        "object",
        "first",
        "several types",
        "huge",
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_row(rows: list[Any], message: str) -> None:
    with pytest.raises(FeedFailed, match=message):
        list(batches_of_rows(rows))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"x": 1}, {"y": 1}], r"row 1 has the columns \['y'\], the rows before it have \['x'\]"),
        ([{"x": 1}, {"x": 1, "y": 1}], r"row 1 has the columns \['x', 'y'\], the rows before it have \['x'\]"),
        ([(1, 2), (1,)], r"row 1 has the columns \['_1'\], the rows before it have \['_1', '_2'\]"),
        (
            [{"x": 1}] * 1024 + [{"x": 1, "y": 1}],
            r"row 1024 has the columns \['x', 'y'\], the rows before it have \['x'\]",
        ),
        ([{"x": 1}] * 1024 + [{}], r"row 1024 has the columns \[\], the rows before it have \['x'\]"),
        ([(1,), 2], r"row 1 has the columns \['value'\], the rows before it have \['_1'\]"),
        ([{1: 0.5}, {1: 1.5}], r"row 0 is a dictionary with the key 1: keys are names of columns"),
        ([{"x": 0.5}, {1: 1.5, "x": 1}], r"row 1 has the columns \['1', 'x'\]"),
    ],
    ids=["another", "one more", "one less", "one more later", "none later", "no tuple", "no name", "no name later"],
)
def test_a_row_with_other_columns_is_named(rows: list[Any], message: str) -> None:
    with pytest.raises(FeedFailed, match=message):
        list(batches_of_rows(rows))


@pytest.mark.parametrize("place", [0, 1, 700])
def test_the_row_that_differs_from_most_others_is_named_at_any_position(place: int) -> None:
    rows: list[tuple[Any, int]] = [(float(number), number) for number in range(1000)]
    rows[place] = ("oops", place)
    with pytest.raises(FeedFailed, match=rf"^column '_1', row {place}: 'oops' is a str, not double$"):
        list(batches_of_rows(rows))
