"""Doing something to a module when the user's program imports it, and not before; importing one when it is used."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__ = ["OnImport", "WhenUsed", "spare_scikit_learn", "when_imported"]

# All that Keras wants of scikit-learn is here, by both names of Keras: https://keras.io/api/utils/sklearn_wrappers/
_WRAPPERS = ("keras.wrappers", "keras._tf_keras.keras.wrappers")


def when_imported(name: str, then: Callable[[ModuleType], Any]) -> bool:
    """Call a function with a module: now if it is imported already, else when it first is. Whether it was now."""
    if name in sys.modules:
        then(sys.modules[name])
        return True
    sys.meta_path.insert(0, OnImport(name, then))
    return False


class OnImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when that is first imported, and is gone then.

    Parameters
    ----------
    name : str
        The module's.
    then : callable
        Takes the module, once its own code has run.

    Examples
    --------
    >>> sys.meta_path.insert(0, OnImport("keras", mend))  # doctest: +SKIP
    """

    def __init__(self, name: str, then: Callable[[ModuleType], Any]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as others would, and make its loader call the function afterwards."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, then = spec.loader.exec_module, self._then

        def exec_module(module: ModuleType) -> None:
            execute(module)
            then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def spare_scikit_learn() -> None:
    """Have Keras import scikit-learn when its wrappers are used. To be called before TensorFlow is imported.

    Else it does so at once where scikit-learn is installed: a fifth of the time that TensorFlow's import takes.
    """
    finder = WhenUsed(_WRAPPERS)
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


@dataclass(frozen=True)
class WhenUsed(importlib.abc.MetaPathFinder):
    """Has modules run their code when something of theirs is first asked for: :class:`importlib.util.LazyLoader`.

    Parameters
    ----------
    names : tuple of str
        The modules'.

    Examples
    --------
    >>> sys.meta_path.insert(0, WhenUsed(("keras.wrappers",)))  # doctest: +SKIP
    """

    names: tuple[str, ...]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as others would, with a loader that waits."""
        if fullname not in self.names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec
