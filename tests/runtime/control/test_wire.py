"""Data and messages are decoded as they were encoded, and everything else is refused."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import os
import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tfos_nb.runtime.control import lifecycle, reports, wire
from tfos_nb.runtime.feed import messages

bounded = settings(deadline=None, max_examples=60)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
keys = st.text(max_size=5) | st.integers(-9, 9) | st.tuples(st.integers(0, 9), st.booleans())
data = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)
dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(sizes=(64, 128))
    | hnp.datetime64_dtypes()
    | hnp.unicode_string_dtypes(min_len=1, max_len=8)
    | hnp.byte_string_dtypes(min_len=1, max_len=8)
)


def there_and_back(value: Any) -> Any:
    return wire.decode(wire.encode(value))


@bounded
@given(data)
def test_data_survive_encoding_and_decoding(value: Any) -> None:
    came = wire.decode(wire.encode_result(value))
    assert came == value
    assert repr(came) == repr(value)  # 1 is not True, and a tuple is not a list


@bounded
@given(hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)), st.booleans())
def test_arrays_survive_encoding_and_are_writable_after_decoding(array: np.ndarray[Any, Any], turned: bool) -> None:
    array = array.T if turned else array  # no longer contiguous
    came = wire.decode(wire.encode_result(array))
    assert came.dtype == array.dtype
    assert came.shape == array.shape
    assert came.tobytes() == array.tobytes()
    assert came.flags.writeable


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0])
def test_floats_keep_their_bits(value: float) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_half_a_surrogate_pair_survives() -> None:
    assert there_and_back("a file's name: \udcff") == "a file's name: \udcff"


class Colour(str, enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (Colour.RED, "red"),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    ],
)
def test_results_that_resemble_data_are_converted_to_plain_data(value: Any, plain: Any) -> None:
    came = wire.decode(wire.encode_result(value))
    assert came == plain
    assert type(came) is type(plain)


MESSAGES = [
    lifecycle.NodeJob("worker:1", "c", 0, "1", "host", 1, ("0",), 2, {"A": "b"}, ("/a",), {"fed": 1}, b"c", "t"),
    lifecycle.Reservation("worker:1", "host", 1, "0", 0, 77, ("0", "1")),
    lifecycle.Refused("worker:1", "host", "no TensorFlow"),
    lifecycle.Start({"worker": ["a:1", "b:2"]}),
    lifecycle.NodeUp("worker:1", 7, "2", "3", lifecycle.FeedPlace("/s", "host", 1, b"c"), "note"),
    lifecycle.MainStarted("worker:1"),
    lifecycle.MainReturned("worker:1", b"\x01"),
    lifecycle.MainRaised("worker:1", "ValueError", "Traceback", True),
    lifecycle.NodeEnded("worker:1", None, "SIGKILL", "tail", 5),
    lifecycle.Stop("why", 1.0),
    lifecycle.EndNode(),
    messages.FeedBegins(1, 3, True),
    messages.FeedSchema(1, b"s", {"x": (28, 28)}),
    messages.FeedEnds(1, 9, 2, 17, 8, 9),
    messages.NoMoreFeeds(),
    messages.PassDone("worker:1", 1, 2, 3),
    messages.OpenPartition(1, 2, b"s", {"x": (3,)}),
    messages.Places({"worker:1": lifecycle.FeedPlace("/s", "host", 1, b"c")}, "why"),
    messages.ClaimRows(1, 2, 64, 16, 8, 5000, ("worker:1",)),
    messages.Claimed([72, 80], ["worker:1", "worker:0"]),
    messages.PartitionDone(1, 2, 3, True),
    messages.PartitionFailed(1, 2, "why"),
    reports.Heartbeat("worker:1", 1.0, 2, (reports.StepReport(1, metrics={"loss": 0.5}),), reports.FeedStatus(1, 2, 3)),
    reports.LogLines("worker:1", ("a", "b")),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_encoding_and_decoding(message: Any) -> None:
    assert there_and_back(message) == message
    assert type(message).__dataclass_params__.frozen


@dataclasses.dataclass(frozen=True)
class Stranger:
    name: str


class Wicked:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


@pytest.mark.parametrize(
    "value", [Stranger("a"), Wicked(), object(), {1, 2}, print, Stranger, np.array([Wicked()]), [{"deep": Wicked()}]]
)
def test_an_object_that_is_neither_message_nor_data_is_not_sent(value: Any) -> None:
    with pytest.raises(wire.NotData):
        wire.encode(value)


def an_extension(code: int, content: Any) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, wire.encode(content))))


@pytest.mark.parametrize(
    "arrived",
    [
        pytest.param(pickle.dumps(Wicked()), id="a pickle"),
        pytest.param(pickle.dumps({"a": 1}), id="a harmless pickle"),
        pytest.param(an_extension(1, ["Stranger", {"name": "a"}]), id="a class that is no message"),
        pytest.param(an_extension(1, ["EndNode", {"too": "much"}]), id="a message with other fields"),
        pytest.param(an_extension(1, 7), id="a message that is a number"),
        pytest.param(an_extension(3, ["O", [1], b"12345678"]), id="an array of objects"),
        pytest.param(an_extension(3, ["<f4", [3], b"1234"]), id="an array of another size"),
        pytest.param(an_extension(3, ["nonsense", [1], b"1234"]), id="an array of no type"),
        pytest.param(an_extension(3, ["<f4", [-1], b"1234"]), id="an array of no shape"),
        pytest.param(an_extension(3, ["f4,f4", [0], b""]), id="an array of structures"),
        pytest.param(an_extension(1, ["Stop", {"reason": "why", "grace": "soon"}]), id="text for a number"),
        pytest.param(an_extension(1, ["Start", {"cluster_spec": {"worker": "a:1"}}]), id="text for a list of texts"),
        pytest.param(
            an_extension(
                1, ["Heartbeat", {"node": "n", "cpu_percent": 0.5, "memory_bytes": 1, "reports": ({},), "feed": None}]
            ),
            id="a dictionary for a message",
        ),
        pytest.param(an_extension(2, 7), id="a tuple that is a number"),
        pytest.param(an_extension(99, []), id="an unknown extension"),
        pytest.param(wire.encode([1, 2, 3])[:-1], id="too short"),
        pytest.param(wire.encode([1, 2, 3]) + b"\x00", id="too long"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no msgpack"),
    ],
)
def test_an_invalid_encoding_is_refused_when_it_arrives(arrived: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - only the type matters; the text is msgpack's
        wire.decode(arrived)


@bounded
@given(st.binary(max_size=200))
def test_any_bytes_are_either_decoded_or_refused(arrived: bytes) -> None:
    try:
        came = wire.decode(arrived)
    except ValueError:
        return
    assert type(came).__module__ in (
        "builtins",
        "numpy",
        "msgpack.ext",
        *(type(known).__module__ for known in MESSAGES),
    )


@pytest.mark.parametrize(
    ("value", "culprit"),
    [
        ({"model": object()}, r"the result\['model'\] is a builtins.object.*ctx\.save\(model\)"),
        ([1, {"a": (2, {3})}], r"the result\[1\]\['a'\]\[1\] is a builtins.set"),
        ({frozenset(): 1}, "a key of the result is a builtins.frozenset"),
        (np.array([object()]), "the result is an array of Python objects"),
        (np.zeros(2, [("a", "i4"), ("b", "f8")]), r"the result is an array of \[\('a'.*astype"),
        ({"x": 2**64}, "an integer of more than 64 bits"),
        (np.datetime64("2020-01-01"), "cannot be sent as data"),
        (1j, "the result is a builtins.complex"),
    ],
)
def test_a_result_that_is_not_data_is_named_with_its_position(value: Any, culprit: str) -> None:
    with pytest.raises(wire.NotData, match=culprit):
        wire.encode_result(value)


def test_an_array_of_bfloat16_is_refused_and_not_turned_into_bytes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(wire.NotData, match=r"the result\['w'\] is an array of bfloat16.*astype"):
        wire.encode_result({"w": np.zeros(3, ml_dtypes.bfloat16)})


def test_a_result_that_contains_itself_is_refused() -> None:
    result: list[Any] = []
    result.append(result)
    with pytest.raises(wire.NotData, match="contains itself"):
        wire.encode_result(result)


def test_a_result_that_is_too_big_says_what_to_do() -> None:
    with pytest.raises(wire.NotData, match="the result takes 128 MiB, more than 128: write it to a file"):
        wire.encode_result(np.zeros(wire.MAX_MESSAGE_BYTES // 2, np.uint8))
