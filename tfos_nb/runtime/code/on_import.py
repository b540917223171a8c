"""Run a function when a module is imported, and delay the import of a module until it is used."""

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

# The only modules of Keras that import scikit-learn: https://keras.io/api/utils/sklearn_wrappers/
_WRAPPERS = ("keras.wrappers", "keras._tf_keras.keras.wrappers")


def when_imported(name: str, then: Callable[[ModuleType], Any]) -> bool:
    """Call a function with a module: now if the module is imported already, otherwise when it is first imported.

    Returns
    -------
    bool
        Whether the function was called now.
    """
    if name in sys.modules:
        then(sys.modules[name])
        return True
    sys.meta_path.insert(0, OnImport(name, then))
    return False


class OnImport(importlib.abc.MetaPathFinder):
    """Import hook that calls a function when a module is first imported, and then removes itself.

    Parameters
    ----------
    name : str
        Name of the module.
    then : callable
        Called with the module, after the module's code has run.

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
        """Find the module by the other hooks, and make its loader call the function after it has run the module."""
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
    """Delay Keras' import of scikit-learn until its wrappers are used. Must be called before TensorFlow is imported.

    Otherwise ``import tensorflow`` also imports scikit-learn if it is installed, which takes a fifth of its time.
    """
    finder = WhenUsed(_WRAPPERS)
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


@dataclass(frozen=True)
class WhenUsed(importlib.abc.MetaPathFinder):
    """Import hook that runs a module's code only when an attribute of the module is first read.

    :class:`importlib.util.LazyLoader` does this too, but also for attributes such as ``__file__``. AutoGraph reads
    those of all modules (``inspect.getmodule``), so its first function would run every lazy module.

    Parameters
    ----------
    names : tuple of str
        Names of the modules.

    Examples
    --------
    >>> sys.meta_path.insert(0, WhenUsed(("keras.wrappers",)))  # doctest: +SKIP
    """

    names: tuple[str, ...]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module on the path, with a loader that delays its code."""
        if fullname not in self.names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec


class _LateLoader(importlib.abc.Loader):
    """Loader that creates a module without running its code."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader
        self._lock = threading.RLock()

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module. The import system sets its ``__name__``, ``__file__`` and so on."""
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing; :meth:`load` runs the code later."""

    def load(self, module: ModuleType) -> None:
        """Run the module's code, if it has not run yet."""
        with self._lock:
            if isinstance(module, _LateModule):
                object.__setattr__(module, "__class__", ModuleType)
                module.__loader__ = self._loader
                if module.__spec__ is not None:
                    module.__spec__.loader = self._loader
                self._loader.exec_module(module)


class _LateModule(ModuleType):
    """Module whose code has not run. It runs on ``dir()``, or when an attribute without leading ``__`` is read."""

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
