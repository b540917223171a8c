"""The text of the user's functions, which goes with them: tracebacks show it, and AutoGraph compiles from it.

A function that was typed into a notebook, or that is of a module of the user's, travels by value: its code, and none of
its lines. Where it arrives no file has them.

::

    dumps(value) ──▶ bytes, {file name: text} ──▶ remember(texts), then pickle.loads
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import linecache
import sysconfig
import types
from collections.abc import Mapping
from typing import Any

from tfos_nb.runtime.on_import import when_imported

__all__ = ["dumps", "remember"]

_INSTALLED = ("site-packages", "dist-packages")


def dumps(value: Any) -> tuple[bytes, dict[str, str]]:
    """Pickle by PySpark's cloudpickle, which both sides have.

    Returns
    -------
    bytes
        What :func:`pickle.loads` takes.
    dict of str to str
        By the names of their files, the texts from which the functions that go by value were compiled.
    """
    with io.BytesIO() as file:
        pickler = _pickler()(file)
        pickler.dump(value)
        return file.getvalue(), {name: text for name in pickler.files if (text := "".join(linecache.getlines(name)))}


@functools.cache
def _pickler() -> Any:
    base: Any = importlib.import_module("pyspark.cloudpickle").CloudPickler

    class Pickler(base):  # type: ignore[misc]  # PySpark's copy has no types
        """Notes where the functions come from that it takes along."""

        def __init__(self, file: io.BytesIO) -> None:
            super().__init__(file)
            self.files: dict[str, None] = {}

        def reducer_override(self, thing: Any) -> Any:
            reduced = super().reducer_override(thing)
            if isinstance(thing, types.FunctionType) and reduced is not NotImplemented:
                name = thing.__code__.co_filename
                if not _is_installed(name):
                    self.files[name] = None
            return reduced

    return Pickler


def _is_installed(file: str) -> bool:
    return any(part in file for part in _INSTALLED) or file.startswith(sysconfig.get_paths()["stdlib"])


def remember(texts: Mapping[str, str]) -> None:
    """Have this process find texts by the names of their files, for its tracebacks and for AutoGraph."""
    _help_autograph()
    for name, text in texts.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


@functools.cache
def _help_autograph() -> None:
    """Have AutoGraph compile what has come by value: not all that it asks for is there, and it can do without."""
    when_imported("tensorflow.python.autograph.pyct.parser", _look_no_further)
    when_imported("tensorflow.python.autograph.pyct.inspect_utils", _leave_annotations)


def _look_no_further(parser: types.ModuleType) -> None:
    """Lambdas: it wants their module, for nothing else than to find their lines, which it has."""
    parser.inspect = _Inspect("inspect")  # type: ignore[attr-defined]


def _leave_annotations(inspect_utils: types.ModuleType) -> None:
    """Annotations: it would have them evaluated, and the names in them are not among those that the code needs."""
    found = inspect_utils.getfutureimports
    inspect_utils.getfutureimports = lambda entity: (*{*found(entity), "annotations"},)  # type: ignore[attr-defined]


class _Inspect(types.ModuleType):
    """Python's ``inspect``, to which no function is without a module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    @staticmethod
    def getmodule(thing: Any) -> types.ModuleType:
        """Return a function's module, or one of nothing: its names would only lead to sources that its loader has."""
        return inspect.getmodule(thing) or types.ModuleType(str(getattr(thing, "__module__", "")))
