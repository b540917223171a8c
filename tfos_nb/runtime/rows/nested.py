"""Flatten, pack and name nested inputs and outputs of models: dictionaries, lists and tuples of tensors.

Dictionaries are processed in the order of their sorted keys, as in ``tf.nest``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Path", "flattened", "leaves", "names_of", "packed"]

Path = tuple[str | int, ...]


def leaves(structure: Any) -> list[tuple[Path, Any]]:
    """Return the tensors of a structure, each with its path of keys and indices.

    Examples
    --------
    >>> leaves({"b": ["y", "z"], "a": "x"})
    [(('a',), 'x'), (('b', 0), 'y'), (('b', 1), 'z')]
    """
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
    """Return the tensors of a structure as one list."""
    return [leaf for _, leaf in leaves(structure)]


def packed(structure: Any, tensors: Sequence[Any]) -> Any:
    """Return tensors nested like a structure. Lists become tuples, because ``tf.data`` converts a list to a tensor."""
    waiting = iter(tensors)

    def build(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: build(part[key]) for key in sorted(part)}
        if isinstance(part, (list, tuple)) and not hasattr(part, "dtype"):
            return tuple(build(inner) for inner in part)
        return next(waiting)

    return build(structure)


def names_of(paths: Sequence[Path], otherwise: Sequence[str]) -> list[str]:
    """Return a name for each path: its keys and indices from the first key on, joined by ``_``.

    A path without a key gets its name in ``otherwise``. If a name occurs twice, the index of the path is appended. No
    name is returned twice.

    Examples
    --------
    >>> names_of([("a",), ("b", 0), ("b", 1), (0,)], ["", "", "", "dense"])
    ['a', 'b_0', 'b_1', 'dense']
    >>> names_of([("a",), ("a",), ("a_1",)], ["", "", ""])
    ['a_0', 'a_1_0', 'a_1']
    """
    names = []
    for path, own in zip(paths, otherwise, strict=True):
        first = next((place for place, key in enumerate(path) if isinstance(key, str)), None)
        names.append(own if first is None else "_".join(map(str, path[first:])))
    twice = {name for name in names if names.count(name) > 1}
    taken = set(names) - twice
    for index, name in enumerate(names):
        if name in twice:
            names[index] = next(one for one in _numbered(f"{name}_{index}") if one not in taken)
            taken.add(names[index])
    return names


def _numbered(name: str) -> Iterator[str]:
    """Give a name, and then the name with one number after the other."""
    yield name
    yield from (f"{name}_{number}" for number in itertools.count())
