"""Doing something to a module when the user's program imports it, and not before."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["OnImport", "when_imported"]


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
