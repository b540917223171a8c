"""Any received bytes are data, or a message of the registry with fields of its types, or are refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tracemalloc
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.conftest import ENVIRONMENT
from tests.fuzz.inputs import (
    KINDS,
    LENGTHS,
    MESSAGES,
    any_message,
    bytes_of_any_kind,
    data,
    examples,
    extension,
    fits,
    messages,
    packed_message,
    parts,
)
from tfos_nb.runtime.control import wire

DTYPES = ["<f4", "|b1", "O", "|O", "V9", "a5", "f4,f4", "(2,2)f4", "(9999999,9999999)f4", "<M8[25s]", "<U0"]
DTYPES += ["<U536870911", "|V2147483647", "<f4\0", "\udcff", "", "i4," * 2000]
PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, dict, np.ndarray, msgpack.Timestamp)
EXECUTES = {
    "exec", "compile", "marshal.loads", "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork",
    "subprocess.Popen", "socket.connect", "ctypes.dlopen", "code.__new__", "os.remove", "os.rename",
}  # fmt: skip


class Watch:
    """Records the interpreter's audit events while it is on. A hook cannot be removed again."""

    def __init__(self) -> None:
        self._on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: Any) -> None:
        writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if self._on and (event in EXECUTES or writes):
            self.seen.append(event)

    @contextmanager
    def on(self) -> Iterator[None]:
        self.seen.clear()
        self._on = True
        try:
            yield
        finally:
            self._on = False


@pytest.fixture(scope="module")
def watch() -> Watch:
    for kind in KINDS:  # their annotations are evaluated once, by typing
        wire._types_of(kind)
        wire._enums_of(kind)
    return Watch()


def decoded(arrived: bytes) -> tuple[bool, Any]:
    """Decode; return whether that was possible, and the result. Only a ValueError may say that it is impossible."""
    try:
        return True, wire.decode(arrived)
    except ValueError:
        return False, None


def check_right(came: Any) -> None:
    """Check that every message has the fields of its class, with their types, and that all else is plain data."""
    for part in parts(came):
        kind = type(part)
        assert MESSAGES[kind.__name__] is kind
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            assert fits(getattr(part, field.name), hints[field.name]), (part, field.name)
    assert isinstance(came, PLAIN) or type(came) in KINDS


@examples(700)
@given(arrived=bytes_of_any_kind)
def test_bytes_are_data_or_a_valid_message_or_a_value_error_and_run_no_code(watch: Watch, arrived: bytes) -> None:
    """With noise, mutated messages and wrong lengths, decode raises no other error and returns no invalid message."""
    with watch.on():
        taken, came = decoded(arrived)
    assert watch.seen == []
    if taken:
        check_right(came)


@examples(4)
@given(chosen=st.data())
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_with_any_values_of_its_types_is_decoded_unchanged(kind: type, chosen: st.DataObject) -> None:
    """The check of types refuses no valid value, such as NaN, half a surrogate pair or a number of 64 bits."""
    message = chosen.draw(messages(kind))
    assert repr(wire.decode(wire.encode(message))) == repr(message)


@examples(12)
@given(chosen=st.data(), other=data)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if dataclasses.fields(kind)], ids=lambda kind: kind.__name__)
def test_a_field_of_another_type_is_refused(kind: type, chosen: st.DataObject, other: Any) -> None:
    """A field gets any data. If the data is not of the field's type, the message is refused."""
    message = chosen.draw(messages(kind))
    field = chosen.draw(st.sampled_from(dataclasses.fields(kind)))
    fields = {one.name: getattr(message, one.name) for one in dataclasses.fields(kind)} | {field.name: other}
    taken, _ = decoded(packed_message(kind.__name__, fields))
    assert taken == fits(other, typing.get_type_hints(kind)[field.name])


@examples(60)
@given(message=any_message, chosen=st.data())
def test_a_message_with_a_missing_or_an_additional_field_is_refused(message: Any, chosen: st.DataObject) -> None:
    name, fields = type(message).__name__, dataclasses.fields(message)
    values = {field.name: getattr(message, field.name) for field in fields}
    assert not decoded(packed_message(name, values | {chosen.draw(st.sampled_from(["x", "self", "__class__"])): 1}))[0]
    needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    for one in needed:
        assert not decoded(packed_message(name, {key: value for key, value in values.items() if key != one}))[0]


@examples(60)
@given(
    name=st.text(max_size=20) | st.sampled_from(["object", "Popen", "os.system", "__import__", "Record"]), fields=data
)
def test_a_message_with_an_unregistered_name_is_refused(name: str, fields: Any) -> None:
    if name not in wire._REGISTRY:
        assert not decoded(packed_message(name, fields))[0]


a_dtype = st.sampled_from(DTYPES)
a_shape = st.lists(st.sampled_from([0, 1, 2, -1, 2**31, 2**62]), max_size=3)
some_bytes = st.integers(0, 4).map(lambda count: bytes(4 * count)) | st.binary(max_size=16)


@example("a5", [0], b"")
@example("<f4", [-1], bytes(4))
@example("(2,2)f4", [1], bytes(16))
@examples(200)
@given(
    dtype=a_dtype | a_dtype | st.text(max_size=8) | data,
    shape=a_shape | a_shape | data,
    content=some_bytes | some_bytes | data,
)
def test_an_array_has_the_named_type_and_shape_or_is_refused(dtype: Any, shape: Any, content: Any) -> None:
    """It never has objects and never more data than was sent."""
    taken, came = decoded(extension(3, [dtype, shape, content]))
    if taken:
        assert isinstance(came, np.ndarray)
        assert (came.dtype.str, list(came.shape), came.tobytes()) == (dtype, list(shape), content)
        assert not came.dtype.hasobject


@examples(40)
@given(heads=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=600), rest=st.binary(max_size=8))
def test_declared_lengths_allocate_no_memory_that_was_not_sent(heads: list[bytes], rest: bytes) -> None:
    """Nested arrays declare four thousand million items: memory depends on the bytes that arrived."""
    arrived = b"".join(heads) + rest
    tracemalloc.start()
    try:
        decoded(arrived)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def in_one_another(code: int, depth: int) -> bytes:
    inner = b"\x90"
    for _ in range(depth):
        inner = msgpack.packb(msgpack.ExtType(code, inner))
    return inner


@pytest.mark.parametrize("depth", [21, 150, 300, 5000])
def test_a_message_that_is_nested_too_deeply_is_refused_and_the_process_lives(depth: int) -> None:
    """It runs in a process of its own: a level takes 44 KiB of the stack, and two hundred levels killed the process."""
    script = "import sys; from tfos_nb.runtime.control import wire; wire.decode(sys.stdin.buffer.read())"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        input=in_one_another(2, depth),
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 1, ended.returncode
    assert b"ValueError: too deeply nested" in ended.stderr


def test_everything_that_can_be_encoded_can_be_decoded_at_any_depth() -> None:
    """A user's result that is nested too deeply is refused where it is encoded, and does not kill the driver."""
    result: tuple[Any, ...] = ()
    with pytest.raises(wire.NotData, match="nested more than 20 levels deep"):
        for _ in range(30):
            assert wire.decode(wire.encode_result(result)) == result
            result = (result,)
    assert repr(result).count("(") == 21, "and not sooner"
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    assert wire.decode(wire.encode_result(deep)) == deep
