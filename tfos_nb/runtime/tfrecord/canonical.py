"""Rewrite records of unusual form with protobuf, or report that they are invalid.

Protobuf allows forms that few writers use: unpacked numbers, a list in several parts, a duplicate key, a value before
its key, unknown fields. Such a record is parsed and serialized again by protobuf, for the fast parser.
"""

from __future__ import annotations

import functools
from typing import Any

from tfos_nb.runtime.tfrecord.fields import RecordType

__all__ = ["NotThatMessage", "canonical"]

_LABELS = {"optional": 1, "repeated": 3}
_TYPES = {"float": 2, "int64": 3, "string": 9, "message": 11, "bytes": 12}
# tensorflow/core/example/feature.proto and example.proto: (label, type, name, number).
_MESSAGES: dict[str, tuple[tuple[str, str, str, int], ...]] = {
    "BytesList": (("repeated", "bytes", "value", 1),),
    "FloatList": (("repeated", "float", "value", 1),),
    "Int64List": (("repeated", "int64", "value", 1),),
    "Feature": (
        ("optional", "BytesList", "bytes_list", 1),
        ("optional", "FloatList", "float_list", 2),
        ("optional", "Int64List", "int64_list", 3),
    ),
    "FeatureList": (("repeated", "Feature", "feature", 1),),
    "Features": (("repeated", "Features.FeatureEntry", "feature", 1),),
    "FeatureLists": (("repeated", "FeatureLists.FeatureListEntry", "feature_list", 1),),
    "Example": (("optional", "Features", "features", 1),),
    "SequenceExample": (("optional", "Features", "context", 1), ("optional", "FeatureLists", "feature_lists", 2)),
}
_ENTRIES = {"Features": ("FeatureEntry", "Feature"), "FeatureLists": ("FeatureListEntry", "FeatureList")}


class NotThatMessage(Exception):
    """The bytes are not a message of the requested type."""


def canonical(record: bytes, record_type: RecordType) -> bytes:
    """Return the same message serialized in the form that the fast parser reads.

    Numbers are packed, keys are sorted and unique, and nested unknown fields are removed.

    Raises
    ------
    NotThatMessage
        If the bytes are not a message of this type, or have an unknown field at the top level.
    """
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    message = _classes()[record_type.value]()
    try:
        message.ParseFromString(record)
    except DecodeError:
        raise NotThatMessage(f"it is not a valid {record_type.value}") from None
    strange = [field.field_number for field in UnknownFieldSet(message)]
    if strange == [2] and record_type is RecordType.EXAMPLE:
        raise NotThatMessage("it is a SequenceExample, not an Example")
    if strange:
        raise NotThatMessage(f"it is not a valid {record_type.value}: the message has a field {strange[0]}")
    message.DiscardUnknownFields()
    return bytes(message.SerializeToString(deterministic=True))


@functools.lru_cache(maxsize=1)
def _classes() -> dict[str, Any]:
    """Return the message classes by name.

    They are defined in a separate descriptor pool, because TensorFlow may register messages of the same names.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="tfos_nb/example.proto", package="tfos_nb", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for label, kind, field, number in fields:
            _add_field(message, label, kind, field, number)
        if name == "Feature":
            message.oneof_decl.add(name="kind")
            for one in message.field:
                one.oneof_index = 0
        if name in _ENTRIES:
            entry, value = _ENTRIES[name]
            inside = message.nested_type.add(name=entry)
            inside.options.map_entry = True
            _add_field(inside, "optional", "string", "key", 1)
            _add_field(inside, "optional", value, "value", 2)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tfos_nb.{name}")) for name in _MESSAGES}


def _add_field(message: Any, label: str, kind: str, name: str, number: int) -> None:
    field = message.field.add(name=name, number=number, label=_LABELS[label], type=_TYPES.get(kind, _TYPES["message"]))
    if kind not in _TYPES:
        field.type_name = f".tfos_nb.{kind}"
