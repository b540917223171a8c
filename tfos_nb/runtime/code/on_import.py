"""Doing something to a module when the user's program imports it, and not before; importing one when it is used."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
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
    """Has modules run their code when something of theirs is first asked for.

    :class:`importlib.util.LazyLoader` does so too, and also when a module is asked for its file or its name: AutoGraph
    asks all of ``sys.modules`` for these (``inspect.getmodule``), and with its first function each module would run.

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
            spec.loader = _LateLoader(spec.loader)
        return spec


class _LateLoader(importlib.abc.Loader):
    """Makes a module that runs its code later."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader
        self._lock = threading.RLock()

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Make it; the import system gives it its file and its name."""
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing yet."""

    def load(self, module: ModuleType) -> None:
        """Run its code, once."""
        with self._lock:
            if isinstance(module, _LateModule):
                object.__setattr__(module, "__class__", ModuleType)
                module.__loader__ = self._loader
                if module.__spec__ is not None:
                    module.__spec__.loader = self._loader
                self._loader.exec_module(module)


class _LateModule(ModuleType):
    """A module whose code has not run: it has only what the import system gives it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._run()
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        self._run()
        return sorted(self.__dict__)

    def _run(self) -> None:
        loader = self.__spec__.loader if self.__spec__ is not None else None
        if isinstance(loader, _LateLoader):
            loader.load(self)
