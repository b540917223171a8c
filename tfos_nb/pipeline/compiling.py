"""Describe the arguments of Keras' ``compile`` on the driver: names, Keras' own descriptions, and the user's code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfos_nb.errors import PlanError, near
from tfos_nb.runtime.code.user_classes import own_objects, registered_object
from tfos_nb.runtime.models.keras_outputs import is_config

__all__ = ["check_names", "describe", "flavour"]

_SHORT = ("acc", "crossentropy", "ce")  # of metrics, whose meaning the loss tells


def describe(value: Any, kind: str, own: dict[str, Any]) -> Any:
    """Return the name of something of Keras, or Keras' description of it; of several outputs, in their containers.

    Parameters
    ----------
    value : object
        An optimizer, a loss or a metric, a list or a dictionary of these.
    kind : str
        Keras' module: ``optimizers``, ``losses`` or ``metrics``.
    own : dict
        The user's own code that it refers to is added here, by its name.

    Raises
    ------
    PlanError
        If it is none of these.
    """
    if isinstance(value, Mapping) and not is_config(value):
        return {key: describe(part, kind, own) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(part, kind, own) for part in value]
    if isinstance(value, str):
        found = registered_object(value) if ">" in value else None
        if found is not None:
            own.setdefault(value, found)
        return value
    if value is None or isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        value = value()
    if not _is_keras(value):
        if not callable(value):
            raise PlanError(
                f"{kind}: {value!r:.60}, a {type(value).__name__}, is not an object of Keras: give a name, an object "
                "of Keras "
                "or a function; of several outputs a list or a dictionary of these"
            )
        name = str(getattr(value, "__name__", type(value).__name__))
        own[name] = value
        return name
    own.update({name: code for name, code in own_objects(value).items() if name not in own})
    return importlib.import_module(f"{flavour(value)}.{kind}").serialize(value)


def check_names(model: Any, what: str, given: Any, kinds: Sequence[str], own: Mapping[str, Any]) -> None:
    """Refuse names that Keras does not know, as far as it is loaded here; otherwise the nodes tell.

    Raises
    ------
    PlanError
        Naming the first one.
    """
    loaded = [flavour(model)] if _is_keras(model) else ["keras", "tf_keras"]
    modules = [importlib.import_module(f"{name}.{kind}") for name in loaded if name in sys.modules for kind in kinds]
    for name in _names(given) if modules else ():
        if name in own or registered_object(name) is not None:
            continue
        if not any(_knows(module, name) for module in modules):
            names = [said for module in modules for said in dir(module) if not said.startswith("_")]
            names += [said.lower() for said in names]
            registered = ": it is not registered here, so import the module that registers it" * (">" in name)
            raise PlanError(
                f"{what}: Keras has no {name!r}{registered or near(name, dict.fromkeys(names))}; give an object of "
                "your own itself, not its name"
            )


def _names(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, (list, tuple)):
        for part in given:
            yield from _names(part)
    elif isinstance(given, Mapping) and not is_config(given):
        for part in given.values():
            yield from _names(part)


def _is_keras(value: Any) -> bool:
    names = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    return bool(names & {"keras", "tf_keras"}) or str(getattr(value, "__module__", "")).partition(".")[0] in (
        "keras",
        "tf_keras",
    )


def _knows(module: Any, name: str) -> bool:
    """Return whether a Keras module knows a name, without creating the object: that could take the driver's GPU."""
    plain = name.replace("_", "").lower()
    if plain in (said.replace("_", "").lower() for said in dir(module)):
        return True
    if module.__name__.endswith("metrics") and name in _SHORT:
        return True
    try:
        return module.__name__.endswith("losses") and callable(module.get(name))  # mse, kld
    except ValueError:
        return False


def flavour(value: Any) -> str:
    """Return which Keras something is of: ``keras`` or ``tf_keras``."""
    names = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    module = str(getattr(value, "__module__", ""))
    return "tf_keras" if "tf_keras" in names or module.startswith("tf_keras") else "keras"
