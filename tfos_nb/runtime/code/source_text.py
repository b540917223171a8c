"""The text of the user's functions, which goes with them: tracebacks show it, and AutoGraph compiles from it.

A function that was typed into a notebook, or that is of a module of the user's, travels by value: its code, and none of
its lines. Where it arrives no file has them.

::

    dumps(value) ──▶ bytes, SourceTexts ──▶ remember(texts), then pickle.loads
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import linecache
import logging
import types
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.runtime.code.on_import import when_imported
from tfos_nb.runtime.code.user_modules import UserModule, gather, is_installed, provide

__all__ = ["SourceTexts", "dumps", "remember"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceTexts:
    """What goes along.

    Parameters
    ----------
    files : dict of str to str
        By the names of their files, the texts from which the functions that go by value were compiled.
    modules : dict of str to UserModule
        The user's modules that are named: these functions import them, or something in the value is in them.
    """

    files: dict[str, str] = field(default_factory=dict)
    modules: dict[str, UserModule] = field(default_factory=dict)


def dumps(value: Any) -> tuple[bytes, SourceTexts]:
    """Pickle by PySpark's cloudpickle, which both sides have; what :func:`pickle.loads` takes, and the texts to it."""
    with io.BytesIO() as file:
        pickler = _pickler()(file)
        pickler.dump(value)
        data = file.getvalue()
    files = {name: text for name in pickler.files if (text := "".join(linecache.getlines(name)))}
    within = [(text, pickler.files[name]) for name, text in files.items()]
    try:
        modules = gather(sorted(pickler.modules), within)
    except Exception:  # a custom importer; it does not matter if the executors have the modules
        logger.warning("your modules that a function needs could not be read, so they are not sent", exc_info=True)
        modules = {}
    return data, SourceTexts(files, modules)


@functools.cache
def _pickler() -> Any:
    base: Any = importlib.import_module("pyspark.cloudpickle").CloudPickler

    class Pickler(base):  # type: ignore[misc]  # PySpark's copy has no types
        """Notes where the functions come from that it takes along, and the modules of what it takes by name."""

        def __init__(self, file: io.BytesIO) -> None:
            super().__init__(file)
            self.files: dict[str, str] = {}
            self.modules: set[str] = set()

        def reducer_override(self, thing: Any) -> Any:
            reduced = super().reducer_override(thing)
            if isinstance(thing, types.ModuleType):
                self.modules.add(thing.__name__)
            elif reduced is NotImplemented:
                if isinstance(thing, (types.FunctionType, type)):
                    self.modules.add(str(thing.__module__))
            elif isinstance(thing, types.FunctionType) and not is_installed(thing.__code__.co_filename):
                self.files[thing.__code__.co_filename] = thing.__globals__.get("__package__") or ""
            return reduced

    return Pickler


def remember(texts: SourceTexts) -> None:
    """Have this process find texts by the names of their files, for its tracebacks and for AutoGraph, and modules."""
    _help_autograph()
    for name, text in texts.files.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    provide(texts.modules)


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
