"""Nested outputs and inputs of models: dictionaries, lists and tuples of tensors, flattened in one order and named.

A dictionary is walked in the order of its sorted keys, as ``tf.nest`` does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Path", "flattened", "leaves", "names_of", "packed"]

Path = tuple[str | int, ...]


def leaves(structure: Any) -> list[tuple[Path, Any]]:
    """Return the tensors of a structure, each with the keys and places that lead to it."""
    return list(_walk(structure, ()))


def _walk(structure: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(structure, Mapping):
        for key in sorted(structure):
            yield from _walk(structure[key], (*path, key))
    elif isinstance(structure, (list, tuple)) and not hasattr(structure, "dtype"):
        for place, part in enumerate(structure):
            yield from _walk(part, (*path, place))
    else:
        yield path, structure


def flattened(structure: Any) -> list[Any]:
    """Return the tensors of a structure."""
    return [leaf for _, leaf in leaves(structure)]


def packed(structure: Any, tensors: Sequence[Any]) -> Any:
    """Return tensors in the form of a structure; a list becomes a tuple, since ``tf.data`` makes a tensor of a list."""
    waiting = iter(tensors)

    def build(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: build(part[key]) for key in sorted(part)}
        if isinstance(part, (list, tuple)) and not hasattr(part, "dtype"):
            return tuple(build(inner) for inner in part)
        return next(waiting)

    return build(structure)


def names_of(paths: Sequence[Path], otherwise: Sequence[str]) -> list[str]:
    """Name tensors by the keys that lead to them, and those that no key leads to by the names in ``otherwise``.

    ``{"a": x, "b": [y, z]}`` gives ``a``, ``b_0``, ``b_1``. A name that occurs twice gets its place behind it.
    """
    names = []
    for path, own in zip(paths, otherwise, strict=True):
        first = next((place for place, key in enumerate(path) if isinstance(key, str)), None)
        names.append(own if first is None else "_".join(map(str, path[first:])))
    twice = {name for name in names if names.count(name) > 1}
    return [f"{name}_{index}" if name in twice else name for index, name in enumerate(names)]
