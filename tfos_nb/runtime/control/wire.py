"""Encode messages as bytes and decode them: msgpack of registered frozen dataclasses only.

Received bytes are never unpickled. A class that may be sent is registered with :func:`message`. An unregistered name,
an object array or an unknown extension is refused on receipt.

The results of the user's ``main`` use the same encoding, so a result is data: None, booleans, numbers, text, bytes,
lists, tuples, dictionaries and NumPy arrays.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

if typing.TYPE_CHECKING:
    import numpy as np

__all__ = ["MAX_MESSAGE_BYTES", "NotData", "decode", "encode", "encode_result", "expect", "message"]

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""The largest message that either end accepts: large enough for a result with big arrays."""

_MESSAGE, _TUPLE, _ARRAY = 1, 2, 3
_DTYPE = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9]*[a-zA-Z]+\])?")
_PLAIN: tuple[Any, ...] = (bool, int, float, str, bytes, list, dict)
_MOST_NESTED = 20  # levels of nested messages, tuples and arrays: msgpack uses 44 KiB of the C stack for each
_FIRST_BUFFER = 4096  # bytes; it grows. Allocating msgpack's default of 256 KiB takes 15 us for each level
_UNICODE_ERRORS = "surrogatepass"  # a file's name, and so a traceback, may contain half a surrogate pair

_T = TypeVar("_T")
_REGISTRY: dict[str, type] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}  # fields of each registered class


class NotData(TypeError):
    """A value that cannot be sent as data; the message names it."""


def message(cls: type[_T]) -> type[_T]:
    """Register a frozen dataclass as a message (class decorator)."""
    _REGISTRY[cls.__name__] = cls
    _FIELDS[cls] = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    return cls


def encode(value: Any) -> bytes:
    """Encode a message or plain data.

    Raises
    ------
    NotData
        If something in it is neither.

    Examples
    --------
    >>> decode(encode({"loss": 0.5, "sizes": (1, 2)}))
    {'loss': 0.5, 'sizes': (1, 2)}
    """
    return _encode(value, 0)


def _encode(value: Any, depth: int) -> bytes:
    if depth > _MOST_NESTED:
        raise NotData(f"tuples or messages nested more than {_MOST_NESTED} levels deep cannot be sent: make them lists")
    try:
        packed: bytes = msgpack.packb(
            value,
            default=functools.partial(_default, depth=depth + 1),
            strict_types=True,
            unicode_errors=_UNICODE_ERRORS,
            buf_size=_FIRST_BUFFER,
        )
    except OverflowError:
        raise NotData("an integer of more than 64 bits cannot be sent: send it as text") from None
    except NotData:
        raise
    except (
        TypeError,
        ValueError,
    ) as error:  # _default's value is not data, or the nesting is too deep
        raise NotData(f"the value cannot be sent as data: {error}") from None
    return packed


def decode(data: bytes) -> Any:
    """Decode what :func:`encode` made.

    Raises
    ------
    ValueError
        If the bytes are not such an encoding, or a message's field has a value of another type.
    """
    return _decode(data, 0)


def expect(kind: type[_T], data: Any) -> _T:
    """Decode a message of this class.

    Raises
    ------
    ValueError
        If it is anything else.
    """
    found = decode(bytes(data)) if data is not None else None
    if type(found) is not kind:
        raise ValueError(f"expected a {kind.__name__}, got a {type(found).__name__}")
    return found


def _decode(data: bytes, depth: int) -> Any:
    if depth > _MOST_NESTED:
        raise ValueError("too deeply nested")
    hook = functools.partial(_ext_hook, depth=depth + 1)
    try:
        return msgpack.unpackb(data, ext_hook=hook, strict_map_key=False, unicode_errors=_UNICODE_ERRORS)
    except TypeError as error:  # an extension with wrong content
        raise ValueError(f"not an encoding of this version: {error}") from None


def encode_result(value: Any) -> bytes:
    """Encode what ``main`` returned.

    Raises
    ------
    NotData
        If it is not data; the message says which part of the result is not, and what to do.
    """
    try:
        _check_result(value, "the result")
    except RecursionError:
        raise NotData("the result contains itself, or is nested too deeply") from None
    data = encode(value)
    if len(data) > MAX_MESSAGE_BYTES // 2:
        raise NotData(
            f"the result takes {len(data) >> 20} MiB, more than {MAX_MESSAGE_BYTES >> 21}: "
            "write it to a file and return its path"
        )
    return data


def _default(value: Any, depth: int) -> Any:
    kind = type(value)
    if (names := _FIELDS.get(kind)) is not None:
        fields = {name: getattr(value, name) for name in names}
        return msgpack.ExtType(_MESSAGE, _encode([kind.__name__, fields], depth))
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, _encode(list(value), depth))
    if _is_array(value) and _has_plain_type(value):
        return msgpack.ExtType(_ARRAY, _encode([value.dtype.str, list(value.shape), value.tobytes()], depth))
    if _is_number(value) and not value.dtype.hasobject:
        return value.item()
    for plain in _PLAIN:  # subclasses, such as collections.defaultdict
        if isinstance(value, plain):
            return plain(value)
    raise NotData(f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent as data")


def _is_array(value: Any) -> bool:
    """Whether it is a NumPy array. There is none before NumPy is imported, which a supervisor does without."""
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)


def _is_number(value: Any) -> bool:
    """Whether it is one of NumPy's numbers."""
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic)


def _has_plain_type(array: np.ndarray[Any, Any]) -> bool:
    """Whether the type's short name describes it fully: not for objects, named fields, or types such as bfloat16."""
    import numpy as np

    return not array.dtype.hasobject and np.dtype(array.dtype.str) == array.dtype


def _ext_hook(code: int, data: bytes, depth: int) -> Any:
    content = _decode(data, depth)
    if code == _TUPLE:
        return tuple(content)
    if code == _ARRAY:
        return _array(*content)
    if code == _MESSAGE:
        return _message(*content)
    raise ValueError(f"extension {code} is not known")


def _array(dtype: str, shape: list[int], raw: bytes) -> np.ndarray[Any, Any]:
    import numpy as np

    if not _DTYPE.fullmatch(dtype):  # NumPy accepts more: structures, and obsolete names
        raise ValueError(f"{dtype[:50]!r} is not a type of an array")
    array: np.ndarray[Any, Any] = np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
    if array.dtype.str != dtype or list(array.shape) != shape:
        raise ValueError(f"{dtype!r} and {shape} do not describe an array of these bytes")
    return array


def _message(name: str, fields: dict[str, Any]) -> Any:
    if name not in _REGISTRY:
        raise ValueError(f"{name!r} is not a message of this version")
    for field, kind in _enums_of(_REGISTRY[name]).items():
        if field in fields:
            fields[field] = kind(fields[field])
    made = _REGISTRY[name](**fields)
    for field, fits in _types_of(_REGISTRY[name]).items():
        if not fits(getattr(made, field)):
            raise ValueError(f"the field {field} of a {name} has a value of another type")
    return made


@functools.cache
def _enums_of(cls: type) -> dict[str, type[enum.Enum]]:
    """Return the fields of a message whose values are sent as those of an enumeration."""
    hints = typing.get_type_hints(cls)
    return {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, enum.Enum)}


@functools.cache
def _types_of(cls: type) -> dict[str, Callable[[Any], bool]]:
    """Return for each field of a message a function that checks a value's type."""
    hints = typing.get_type_hints(cls)
    return {field.name: _fits(hints[field.name]) for field in dataclasses.fields(cls)}


def _fits(hint: Any) -> Callable[[Any], bool]:
    """Return a function that checks whether a value is of a type; supports the types of messages' fields."""
    origin, inner = typing.get_origin(hint), [_fits(one) for one in typing.get_args(hint) if one is not ...]
    if hint in (Any, object):
        return lambda value: True
    if origin in (typing.Union, types.UnionType):
        return lambda value: any(fits(value) for fits in inner)
    if origin is dict:
        return lambda value: type(value) is dict and all(map(inner[0], value)) and all(map(inner[1], value.values()))
    if origin is tuple and ... not in typing.get_args(hint):
        return lambda value: (
            type(value) is tuple
            and len(value) == len(inner)
            and all(fits(one) for fits, one in zip(inner, value, strict=True))
        )
    if origin in (list, tuple):
        return lambda value: type(value) is origin and all(map(inner[0], value))
    kinds = (float, int) if hint is float else (hint,)
    return lambda value: type(value) in kinds


def _check_result(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_result(key, f"a key of {path}")
            _check_result(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_result(item, f"{path}[{index}]")
    elif _is_array(value):
        if value.dtype.hasobject:
            raise NotData(f"{path} is an array of Python objects: convert it to a numeric dtype")
        if not _has_plain_type(value):
            raise NotData(f"{path} is an array of {value.dtype}: convert it, for example with .astype('float32')")
    elif not isinstance(value, (type(None), bool, int, float, str, bytes)) and not _is_number(value):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise NotData(
            f"{path} is a {kind}: a result is data (numbers, text, lists, dictionaries, NumPy arrays). "
            "Convert a tensor with .numpy(), save a model with ctx.save(model)"
        )
