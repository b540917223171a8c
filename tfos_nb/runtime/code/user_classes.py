"""Find the user's own classes and functions that a Keras model needs. The model's file has only their names.

::

    own_objects      of a model, a loss or an optimizer: those that Keras' configuration of it names
    own_objects_of   of a function that builds a model: those to which it refers, directly or through others

They are returned by their names in the file: ``PACKAGE>NAME`` if registered with ``register_keras_serializable``.
"""

from __future__ import annotations

import dis
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfos_nb.runtime.code.user_modules import is_installed

__all__ = ["own_objects", "own_objects_of", "registered_object"]

logger = logging.getLogger(__name__)

_FLAVOURS = ("keras", "tf_keras")
_DEEP = 4  # attributes are searched to this depth: enough for the regularizer of a layer in a wrapper
_PLAIN = (str, bytes, int, float, bool, type(None))


def registered_object(name: str) -> Any:
    """Return the object registered under a name with ``register_keras_serializable``; None if there is none."""
    for flavour in _FLAVOURS:
        if flavour in sys.modules:
            found = importlib.import_module(f"{flavour}.saving").get_registered_object(name)
            if found is not None:
                return found
    return None


def own_objects(thing: Any) -> dict[str, Any]:
    """Return the user's own classes and functions that a Keras object needs, by their names in its file.

    Parameters
    ----------
    thing : keras.Model, keras.losses.Loss, keras.optimizers.Optimizer or other object of Keras
        The object, which is not changed.
    """
    live = dict(_live(thing))
    found: dict[str, Any] = {_registered_name(code): code for code in live.values() if isinstance(code, type)}
    for name, module in _named(_description(thing)):
        bare = name.rpartition(">")[2]
        value = registered_object(name) or live.get(bare) or getattr(sys.modules.get(module), bare, None)
        if _is_own(value):
            found[name] = value
    return found


def _description(thing: Any) -> Any:
    """Return Keras' configuration of an object; None if Keras cannot make one. Saving the object then raises why."""
    flavour = next((name for name in _FLAVOURS if name in {_root(cls) for cls in type(thing).__mro__}), "keras")
    if flavour not in sys.modules:
        return None
    try:
        return importlib.import_module(f"{flavour}.saving").serialize_keras_object(thing)
    except Exception:  # whatever the user's get_config raises
        logger.debug("Keras cannot describe a %s", type(thing).__name__, exc_info=True)
        return None


def _named(description: Any) -> Iterator[tuple[str, str]]:
    """Yield the names in a configuration that are not Keras' own, each with its module."""
    if isinstance(description, (list, tuple)):
        for part in description:
            yield from _named(part)
    if not isinstance(description, Mapping):
        return
    module, kind = str(description.get("module") or ""), description.get("class_name")
    if isinstance(kind, str) and module.partition(".")[0] not in _FLAVOURS:
        name = description.get("config") if kind == "function" else description.get("registered_name") or kind
        if isinstance(name, str) and not name.startswith("__"):
            yield name, module
    for part in description.values():
        yield from _named(part)


def _live(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and objects of the user's classes and functions in the attributes of a Keras object."""
    seen: set[int] = set()
    waiting = [(thing, 0)]
    layers = getattr(thing, "_flatten_layers", lambda **_: ())(include_self=False, recursive=True)
    waiting += [(layer, 0) for layer in layers]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType) and _is_own(value):
            yield value.__name__, value
        if _root(type(value)) not in _FLAVOURS and _is_keras_class(type(value)):
            yield type(value).__name__, type(value)
        if depth < _DEEP:
            waiting += [(part, depth + 1) for part in _held(value)]


def _held(value: Any) -> list[Any]:
    """Return the values of a collection, or of the attributes of a Keras object."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    is_keras = any(_root(cls) in _FLAVOURS for cls in type(value).__mro__)
    return list(vars(value).values()) if is_keras and hasattr(value, "__dict__") else []


def own_objects_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the user's Keras classes, and registered functions, to which a function refers.

    References through the user's other functions, classes and modules are followed.

    Parameters
    ----------
    function : callable
        Function that builds a model. It is not called.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        name = _registered_name(value)
        if _is_own(value) and (_is_keras_class(value) or registered_object(name) is value):
            found[name] = value
        waiting += _referred(value)
    return found


def _referred(value: Any) -> list[Any]:
    """Return the callables to which a function, a partial or a class of the user refers."""
    if isinstance(value, type):
        methods = [getattr(part, "__func__", part) for part in vars(value).values()] if _is_own(value) else []
        return [*value.__bases__, *(part for method in methods for part in _referred(method))]
    wrapped = getattr(value, "func", None) or getattr(value, "__func__", None) or getattr(value, "__wrapped__", None)
    if not isinstance(value, types.FunctionType):
        return [wrapped] if callable(wrapped) else []
    if not _is_own(value):
        return []
    cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    names = _names(value.__code__)
    given = [value.__globals__[name] for name in names if name in value.__globals__]
    modules = [part for part in given if isinstance(part, types.ModuleType) and _is_own_module(part)]
    modules += [sys.modules[name] for name in names if name in sys.modules and _is_own_module(sys.modules[name])]
    inside = [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
    return [part for part in (*cells, *given, *inside, wrapped) if callable(part)]


def _names(code: types.CodeType) -> set[str]:
    names = {op.argval for op in dis.get_instructions(code) if isinstance(op.argval, str)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises for an empty cell
    except ValueError:
        return False
    return True


def _is_own_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    return bool(file) and not is_installed(file) and module.__name__.partition(".")[0] != "tfos_nb"


def _is_own(value: Any) -> bool:
    """Return whether a value is a class or function of the user, or of an installed package that registered it."""
    if not isinstance(value, (type, types.FunctionType)):
        return False
    root = _root(value)
    module = sys.modules.get(str(value.__module__))
    file = getattr(module, "__file__", None) or ""
    if root in (*_FLAVOURS, "tensorflow", "builtins", "numpy", "pyspark"):
        return False
    return (
        root == "__main__" or not file or not is_installed(file) or registered_object(_registered_name(value)) is value
    )


def _is_keras_class(value: Any) -> bool:
    return isinstance(value, type) and any(_root(cls) in _FLAVOURS for cls in value.__mro__)


def _registered_name(value: Any) -> str:
    """Return the name of a class or function in a model's file."""
    for flavour in _FLAVOURS:
        if flavour in sys.modules and isinstance(value, (type, types.FunctionType)):
            name = str(importlib.import_module(f"{flavour}.saving").get_registered_name(value))
            if name != value.__name__:
                return name
    return str(getattr(value, "__name__", type(value).__name__))


def _root(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]
