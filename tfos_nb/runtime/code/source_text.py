"""Send the source text of the user's functions with them, because tracebacks show it and AutoGraph compiles it.

A function from a notebook or from a user's module is pickled by value: its bytecode, without its source lines. The
executors have no file with these lines.

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
    """Source text that is sent with a pickled value.

    Parameters
    ----------
    files : dict of str to str
        Source text of the functions that are pickled by value, by file name.
    modules : dict of str to UserModule
        The user's modules, by name, that these functions import, or to which the pickled value refers.
    """

    files: dict[str, str] = field(default_factory=dict)
    modules: dict[str, UserModule] = field(default_factory=dict)


def dumps(value: Any) -> tuple[bytes, SourceTexts]:
    """Pickle a value with PySpark's cloudpickle, which driver and executors have.

    Returns
    -------
    tuple of (bytes, SourceTexts)
        The bytes for :func:`pickle.loads`, and the texts for :func:`remember`.
    """
    with io.BytesIO() as file:
        pickler = _pickler()(file)
        pickler.dump(value)
        data = file.getvalue()
    files = {name: text for name in pickler.files if (text := "".join(linecache.getlines(name)))}
    within = [(text, pickler.files[name]) for name, text in files.items()]
    try:
        modules = gather(sorted(pickler.modules), within)
    except Exception:  # from a custom importer; the executors may have the modules, so this is not an error yet
        logger.warning("your modules that a function needs could not be read, so they are not sent", exc_info=True)
        modules = {}
    return data, SourceTexts(files, modules)


@functools.cache
def _pickler() -> Any:
    base: Any = importlib.import_module("pyspark.cloudpickle").CloudPickler

    class Pickler(base):  # type: ignore[misc]  # PySpark's copy has no types
        """Pickler that records the files of functions pickled by value, and the modules of objects pickled by name."""

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
    """Make source texts available to this process' tracebacks and AutoGraph, and modules available to imports."""
    _help_autograph()
    for name, text in texts.files.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    provide(texts.modules)


@functools.cache
def _help_autograph() -> None:
    """Patch AutoGraph so that it compiles functions that were pickled by value, which have no module here."""
    when_imported("tensorflow.python.autograph.pyct.parser", _find_lambdas_by_lines)
    when_imported("tensorflow.python.autograph.pyct.inspect_utils", _postpone_annotations)


def _find_lambdas_by_lines(parser: types.ModuleType) -> None:
    """Let AutoGraph's parser find the lines of a lambda whose module does not exist; ``linecache`` has them."""
    parser.inspect = _Inspect("inspect")  # type: ignore[attr-defined]


def _postpone_annotations(inspect_utils: types.ModuleType) -> None:
    """Let AutoGraph compile functions as with ``from __future__ import annotations``.

    Otherwise it evaluates the annotations, and cloudpickle does not send the names that only annotations use.
    """
    found = inspect_utils.getfutureimports
    inspect_utils.getfutureimports = lambda entity: (*{*found(entity), "annotations"},)  # type: ignore[attr-defined]


class _Inspect(types.ModuleType):
    """Replacement for :mod:`inspect` whose ``getmodule`` always returns a module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    @staticmethod
    def getmodule(thing: Any) -> types.ModuleType:
        """Return an object's module, or an empty module if it has none."""
        return inspect.getmodule(thing) or types.ModuleType(str(getattr(thing, "__module__", "")))
