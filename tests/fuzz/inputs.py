"""Inputs that a stranger or a broken peer may send: bytes of any kind, and messages that are nearly valid.

Messages are made from the registry, so a new class of messages is tested without a change here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import math
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
from hypothesis import settings
from hypothesis import strategies as st

import tfos_nb
from tfos_nb.runtime.control import wire

__all__ = [
    "KINDS",
    "MESSAGES",
    "bytes_of_any_kind",
    "data",
    "examples",
    "extension",
    "messages",
    "mutated",
    "of_type",
    "packed_message",
    "parts",
]

_USUAL = 50


def examples(count: int) -> settings:
    """Return settings for ``make test``: half of ``count``, always the same; for ``fuzz``: many more, always new."""
    profile = settings.default
    assert profile is not None
    many = profile.max_examples > _USUAL
    tried = count * profile.max_examples // _USUAL if many else -(-count // 2)
    return settings(profile, max_examples=tried, deadline=None, derandomize=not many)


def _registry() -> dict[str, type]:
    """Import every module that has messages, and return them all."""
    root = Path(tfos_nb.__file__).parent
    for file in sorted(root.rglob("*.py")):
        if re.search(r"^@message", file.read_text(), re.MULTILINE):
            module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
            importlib.import_module(module)
    return {name: kind for name, kind in wire._REGISTRY.items() if kind.__module__.startswith("tfos_nb.")}


MESSAGES = _registry()
KINDS = sorted(MESSAGES.values(), key=lambda kind: kind.__name__)

whole_numbers = st.sampled_from([0, 1, -1, 2, 63, 64, 2**31, 2**63 - 1, 2**64 - 1, -(2**63)]) | st.integers(
    -(2**63), 2**64 - 1
)
numbers = st.floats(width=64) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1e308])
texts = st.text(max_size=12) | st.sampled_from(["worker:0", "worker:1", "worker:99", "chief:0", "", "\udcff", "a\nb\0"])
raw = st.binary(max_size=24)
scalars = st.none() | st.booleans() | whole_numbers | numbers | texts | raw
data = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(-3, 3), inner, max_size=3)
    ),
    max_leaves=6,
)


@functools.cache
def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of a field's type, including unusual ones."""
    origin, inner = typing.get_origin(hint), [of_type(one) for one in typing.get_args(hint) if one is not ...]
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: whole_numbers, float: numbers | st.integers(-3, 3), str: texts, bytes: raw, bool: st.booleans(),
        type(None): st.none(), Any: data, object: data,
    }  # fmt: skip
    if hint in simple:
        return simple[hint]
    if origin in (typing.Union, types.UnionType):
        return st.one_of(inner)
    if origin is dict:
        return st.dictionaries(*inner, max_size=3)
    if origin is list:
        return st.lists(*inner, max_size=3)
    if isinstance(hint, enum.EnumMeta):
        return st.sampled_from(list(hint))
    if origin is tuple:
        return st.lists(*inner, max_size=3).map(tuple) if ... in typing.get_args(hint) else st.tuples(*inner)
    return messages(hint)


def messages(kind: type) -> st.SearchStrategy[Any]:
    """Return messages of a class whose fields have the right types and any values."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: of_type(hints[field.name]) for field in dataclasses.fields(kind)})


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a field's type, without the code of the wire module."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if origin is tuple and ... not in inner:
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin in (list, tuple):
        return isinstance(value, origin) and all(fits(one, inner[0]) for one in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def parts(value: Any) -> list[Any]:
    """Return every message in some data, including the data itself."""
    if dataclasses.is_dataclass(value):
        held = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return [value, *(part for one in held for part in parts(one))]
    if isinstance(value, dict):
        return [part for pair in value.items() for one in pair for part in parts(one)]
    if isinstance(value, (list, tuple)):
        return [part for one in value for part in parts(one)]
    return []


def extension(code: int, content: Any) -> bytes:
    """Encode a msgpack extension that neither end would send."""
    return bytes(msgpack.packb(msgpack.ExtType(code, wire.encode(content))))


def packed_message(name: str, fields: Any) -> bytes:
    """Encode a message with any fields."""
    return extension(1, [name, fields])


# --- bytes ----------------------------------------------------------------------------------------

LENGTHS = [
    *(head + b"\xff\xff\xff\xff" for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb")),
    b"\xdc\xff\xff",
    b"\xc9\x7f\xff\xff\xff\x01",
    b"\xc9\x00\x00\x00\x08\x03",
    b"\xdd\x00\x00\x10\x00",
    b"\xc7\x02\x02",
    b"\xd6\xff",
    b"\x91",
]
"""Beginnings that declare a length: far more than there is, or something nested."""

_Change = Callable[[bytes], bytes]


@st.composite
def _change(draw: st.DrawFn, size: int) -> _Change:
    """Draw one change of some bytes."""
    at = draw(st.integers(0, size))
    other = draw(st.integers(0, size))
    first, last = sorted((at, other))
    piece = draw(st.binary(max_size=6) | st.sampled_from(LENGTHS))
    bit = 1 << draw(st.integers(0, 7))

    def flipped(data: bytes) -> bytes:
        return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :] if at < len(data) else data

    return draw(
        st.sampled_from(
            [
                flipped,
                lambda data: data[:at],  # cut off
                lambda data: data[at:],
                lambda data: data[:first] + data[last:],  # a part is missing
                lambda data: data[:at] + piece + data[at:],  # an additional part
                lambda data: data[:at] + piece + data[at + len(piece) :],  # another part, of the same length
                lambda data: data[:last] + data[first:last] + data[last:],  # a part twice
                lambda data: data[:first] + data[first:last][::-1] + data[last:],  # a part reversed, such as a length
            ]
        )
    )


@st.composite
def mutated(draw: st.DrawFn, originals: st.SearchStrategy[bytes]) -> bytes:
    """Draw valid bytes, changed in one to four places."""
    changed = draw(originals)
    for _ in range(draw(st.integers(1, 4))):
        changed = draw(_change(len(changed)))(changed)
    return changed


any_message = st.sampled_from(KINDS).flatmap(messages)
bytes_of_any_kind = (
    st.binary(max_size=120)
    | st.lists(st.sampled_from(LENGTHS) | st.binary(max_size=4), max_size=12).map(b"".join)
    | mutated(any_message.map(wire.encode) | data.map(wire.encode))
)
"""Noise, declared lengths in one another, and messages with mutated bytes."""
