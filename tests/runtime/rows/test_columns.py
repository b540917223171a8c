"""Arrow's buffers become dense arrays; a column that cannot be converted is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.rows.columns import Column, arrays_of, columns_of, first_lengths

NUMBERS = [
    pa.int8(), pa.int16(), pa.int32(), pa.int64(),
    pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
    pa.float16(), pa.float32(), pa.float64(),
]  # fmt: skip


def arrays(batch: pa.RecordBatch, **fill: Any) -> dict[str, np.ndarray[Any, Any]]:
    return arrays_of(batch, columns_of(batch.schema, first_lengths(batch)).values(), fill)


def one(values: Any, kind: pa.DataType | None = None, fill: Any = None) -> np.ndarray[Any, Any]:
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    return arrays(pa.RecordBatch.from_arrays([array], ["c"]), c=fill)["c"]


def address_of(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_every_number_keeps_its_type(kind: pa.DataType) -> None:
    values = np.array([0, 1, 100], kind.to_pandas_dtype())
    for array in (one(pa.array(values)), one(pa.array([5, *values]).cast(kind).slice(1))):
        assert array.dtype == values.dtype
        assert array.tolist() == values.tolist()


def test_booleans_become_booleans() -> None:
    array = one([True, False, True, True])
    assert (array.dtype, array.tolist()) == (np.dtype(bool), [True, False, True, True])
    assert one(pa.array([False] * 9 + [True, True]).slice(9)).tolist() == [True, True]  # bits, not bytes


@pytest.mark.parametrize("make", [pa.list_, pa.large_list], ids=["list", "large list"])
@pytest.mark.parametrize("kind", [pa.float32(), pa.int64(), pa.bool_()], ids=str)
def test_lists_of_one_length_become_one_array(make: Any, kind: pa.DataType) -> None:
    values = [[0, 1, 1], [1, 0, 1]]
    array = one(pa.array(values, make(pa.int64())).cast(make(kind)))
    assert array.shape == (2, 3)
    assert array.dtype == kind.to_pandas_dtype()
    assert array.astype(int).tolist() == values


def test_fixed_size_lists_become_one_array() -> None:
    array = one([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
    assert (array.shape, array.tolist()) == ((3, 2), [[1, 2], [3, 4], [5, 6]])


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.list_(pa.int32())),
        pa.large_list(pa.list_(pa.int32(), 3)),
        pa.list_(pa.large_list(pa.int32()), 2),
        pa.list_(pa.list_(pa.int32(), 3), 2),
    ],
    ids=str,
)
def test_nested_lists_of_any_list_type_become_one_array(kind: pa.DataType) -> None:
    values = np.arange(24).reshape(4, 2, 3)
    whole = pa.array(values.tolist(), kind)
    assert one(whole).tolist() == values.tolist()
    assert one(whole.slice(1, 2)).tolist() == values[1:3].tolist()


def test_three_levels_of_lists_become_an_image() -> None:
    images = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    array = one(images.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8()))))
    np.testing.assert_array_equal(array, images)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_text_becomes_bytes(kind: pa.DataType) -> None:
    assert one(["a", "", "grün"], kind).tolist() == [b"a", b"", "grün".encode()]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()], ids=str)
def test_bytes_stay_bytes(kind: pa.DataType) -> None:
    array = one([b"a\x00b", b"", b"\xff"], kind)
    assert (array.dtype, array.tolist()) == (np.dtype(object), [b"a\x00b", b"", b"\xff"])


def test_lists_of_text_become_one_array_of_bytes() -> None:
    assert one([["a", "b"], ["c", "d"]]).tolist() == [[b"a", b"b"], [b"c", b"d"]]


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.int64()], ids=str)
def test_numbers_are_not_copied(kind: pa.DataType, shape: tuple[int, ...], offset: int) -> None:
    values = np.arange(10 * np.prod(shape, dtype=int), dtype=kind.to_pandas_dtype())
    leaf = pa.array(values)
    column = leaf
    for length in reversed(shape):
        column = pa.FixedSizeListArray.from_arrays(column, length).cast(pa.list_(column.type))
    array = one(column.slice(offset))
    size = int(np.prod(shape, dtype=int))
    assert array.tolist() == values.reshape(10, *shape)[offset:].tolist()
    assert address_of(array) == leaf.buffers()[1].address + offset * size * values.itemsize


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.0, None], pa.float32()),
        ([[1.0, 2.0], None], pa.list_(pa.float32())),
        ([[1.0, 2.0], [None, 3.0]], pa.list_(pa.float32())),
        ([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
        ([[[1.0], [2.0]], [[1.0], None]], pa.list_(pa.list_(pa.float32()))),
        ([None, "a"], pa.string()),
        ([True, None], pa.bool_()),
    ],
    ids=str,
)
def test_a_null_at_any_level_is_named_with_what_to_do(values: list[Any], kind: pa.DataType) -> None:
    with pytest.raises(FeedFailed, match=r"column 'c' has a null.*df\.dropna\(subset=\['c'\]\).*fill=\{'c': 0\}"):
        one(values, kind)


@pytest.mark.parametrize(
    ("values", "kind", "fill", "filled"),
    [
        ([1.0, None], pa.float32(), 0, [1.0, 0.0]),
        ([1, None], pa.int8(), -1, [1, -1]),
        ([1, None], pa.int8(), 2.0, [1, 2]),
        ([None, True], pa.bool_(), False, [False, True]),
        (["a", None], pa.string(), "?", [b"a", b"?"]),
        ([b"a", None], pa.binary(), b"?", [b"a", b"?"]),
        ([[1, 2], None], pa.list_(pa.int32()), 7, [[1, 2], [7, 7]]),
        ([None, [1, 2], [3, None]], pa.list_(pa.int32()), 7, [[7, 7], [1, 2], [3, 7]]),
        ([None, [1, 2], [3, None]], pa.large_list(pa.int32()), 7, [[7, 7], [1, 2], [3, 7]]),
        ([[1, 2], None, [None, 3]], pa.list_(pa.int32(), 2), 7, [[1, 2], [7, 7], [7, 3]]),
        ([[[1], [2]], [[1], None], None], pa.list_(pa.list_(pa.int32())), 7, [[[1], [2]], [[1], [7]], [[7], [7]]]),
        ([["a"], None], pa.list_(pa.string()), "?", [[b"a"], [b"?"]]),
    ],
    ids=str,
)
def test_a_fill_replaces_nulls_at_any_level(values: Any, kind: pa.DataType, fill: Any, filled: Any) -> None:
    array = one(values, kind, fill)
    assert array.tolist() == filled
    assert array.dtype == columns_of(pa.schema([("c", kind)]), {})["c"].dtype


@pytest.mark.parametrize(
    ("kind", "fill"),
    [(pa.int32(), 0.5), (pa.int8(), 1000), (pa.int32(), "x"), (pa.bool_(), 0), (pa.string(), 0)],
    ids=str,
)
def test_a_fill_that_does_not_fit_is_named(kind: pa.DataType, fill: Any) -> None:
    with pytest.raises(FeedFailed, match=rf"fill=\{{'c': {fill!r}\}}: column 'c' holds {kind}"):
        one([None], kind, fill)


def test_a_fill_for_another_column_does_not_hide_a_null() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, None], "b": [1, None]})
    with pytest.raises(FeedFailed, match="column 'b' has a null"):
        arrays(batch, a=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [[1, 2, 3], [4, 5]],
            r"holds a list of 2 values where the first row's has 3 \(\[4, 5\], 2 rows into a block\).*Pad or cut",
        ),
        ([[1], []], "a list of 0 values where the first row's has 1"),
        ([[], [1]], "a list of 1 values where the first row's has 0"),
        ([[[1], [2]], [[3], [4, 5]]], "a list of 2 values where the first row's has 1"),
    ],
    ids=str,
)
def test_a_list_of_another_length_is_named(values: Any, message: str) -> None:
    with pytest.raises(FeedFailed, match=message):
        one(values)


def test_lists_of_different_lengths_are_refused_even_if_the_sum_fits() -> None:
    with pytest.raises(FeedFailed, match="a list of 3 values where the first row's has 2"):
        one([[1, 2], [1, 2, 3], [1]])  # six values in three rows, but not 3 x 2


@pytest.mark.parametrize(
    "kind",
    [pa.int64(), pa.float32(), pa.bool_(), pa.string(), pa.list_(pa.float32()), pa.list_(pa.float32(), 3)],
    ids=str,
)
def test_a_batch_without_rows_has_the_shape_of_the_others(kind: pa.DataType) -> None:
    columns = columns_of(pa.schema([("c", kind)]), {"c": (3,)} if hasattr(kind, "value_type") else {}).values()
    empty = arrays_of(pa.RecordBatch.from_arrays([pa.array([], kind)], ["c"]), columns)
    [column] = columns
    assert empty["c"].shape == (0, *column.shape)
    assert empty["c"].dtype == column.dtype


def test_lists_without_values_make_an_array_without_values() -> None:
    assert one([[], []], pa.list_(pa.int32())).shape == (2, 0)


@pytest.mark.parametrize(
    ("values", "kind", "lengths"),
    [
        ([1, 2], pa.int32(), None),
        ([[1, 2]], pa.list_(pa.int32()), (2,)),
        ([None, [1, 2]], pa.list_(pa.int32()), (2,)),
        ([[None, [1, 2, 3]]], pa.list_(pa.list_(pa.int32())), (2, 3)),
        ([[1, 2]], pa.list_(pa.int32(), 2), (2,)),
        ([None], pa.list_(pa.int32(), 2), (2,)),
        ([None], pa.list_(pa.int32()), (0,)),
        ([], pa.list_(pa.int32()), (0,)),
        ([[]], pa.list_(pa.list_(pa.int32())), (0, 0)),
    ],
    ids=str,
)
def test_lengths_are_those_of_the_first_list_that_is_not_null(values: Any, kind: pa.DataType, lengths: Any) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(values, kind)], ["c"])
    assert first_lengths(batch) == ({} if lengths is None else {"c": lengths})


def test_lengths_are_those_of_the_slice_and_not_of_earlier_rows() -> None:
    whole = pa.RecordBatch.from_pydict({"c": [[1], [1, 2], [1, 2]]})
    assert first_lengths(whole.slice(1)) == {"c": (2,)}


@pytest.mark.parametrize(
    "kind",
    [
        pa.date32(),
        pa.timestamp("us"),
        pa.decimal128(10, 2),
        pa.struct([("a", pa.int32())]),
        pa.map_(pa.string(), pa.int32()),
        pa.null(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.list_(pa.date32()),
    ],
    ids=str,
)
def test_a_column_without_a_tensor_is_named_with_what_to_do(kind: pa.DataType) -> None:
    with pytest.raises(FeedFailed, match="column 'when' is .*no tensor: leave it out, or cast it"):
        columns_of(pa.schema([("x", pa.int32()), ("when", kind)]), {})


def test_only_the_selected_columns_are_checked() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, 2], "b": [None, [1]], "c": ["x", None]})
    assert list(arrays_of(batch, [Column("a", np.dtype(np.int64), ())])) == ["a"]


@pytest.mark.parametrize("names", [["b", "c"], ["a", "a"]], ids=str)
def test_a_missing_or_repeated_column_is_named_and_not_replaced_by_another(names: list[str]) -> None:
    """Arrow returns index -1 for such a column, which would select the last one."""
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=names)
    with pytest.raises(FeedFailed, match="column 'a' does not exist, or exists more than once; the columns are "):
        arrays_of(batch, [Column("a", np.dtype(np.int64), ())])


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        ([1, 2], [0.5], "column 'c' is double here, and was int64 in the first rows"),
        ([1], ["a"], "column 'c' is string here, and was int64"),
        ([[1, 2]], [3], "column 'c' is int64 here, and was int64 in lists of 2"),
        ([1], [[1, 2]], r"column 'c' is list<.*> here, and was int64"),
        (["a"], [1], "column 'c' is int64 here, and was bytes"),
    ],
    ids=str,
)
def test_rows_of_another_type_than_the_first_are_named(first: Any, later: Any, message: str) -> None:
    batch = pa.RecordBatch.from_pydict({"c": first})
    columns = columns_of(batch.schema, first_lengths(batch)).values()
    with pytest.raises(FeedFailed, match=message):
        arrays_of(pa.RecordBatch.from_pydict({"c": later}), columns)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(0, 8), st.lists(st.integers(0, 3), max_size=3))
def test_any_dense_column_equals_numpys_array(data: st.DataObject, rows: int, shape: list[int]) -> None:
    kind = data.draw(st.sampled_from(NUMBERS), label="type")
    values = np.arange(rows * int(np.prod(shape, dtype=int))).astype(kind.to_pandas_dtype()).reshape(rows, *shape)
    arrow = kind
    for length in reversed(shape):
        arrow = data.draw(
            st.sampled_from([pa.list_(arrow), pa.large_list(arrow), pa.list_(arrow, length)]), label="list"
        )
    batch = pa.RecordBatch.from_arrays(
        [pa.array(values.tolist(), pa.float64() if arrow == pa.float16() else arrow)], ["c"]
    )
    if arrow == pa.float16():
        batch = pa.RecordBatch.from_arrays([pa.array(values)], ["c"])
    start = data.draw(st.integers(0, rows), label="slice")
    columns = [Column("c", values.dtype, tuple(shape))]
    array = arrays_of(batch.slice(start), columns)["c"]
    assert array.shape == values[start:].shape
    assert array.dtype == values.dtype
    assert array.tolist() == values[start:].tolist()
