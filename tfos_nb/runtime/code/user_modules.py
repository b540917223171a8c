"""Modules of the user's that go along with a function: the files beside the notebook, which no executor has.

::

    gather(names, texts) ──▶ {module: its text} ──▶ provide(modules)
    on the driver            in the payload          where the function is unpickled

What is installed stays behind, and so does what is no Python text (extension modules, data files). Where the same text
is found as modules are, in a shared folder or an installed package, that one is taken, with what lies beside it.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import pkgutil
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

__all__ = ["UserModule", "gather", "is_installed", "provide"]

logger = logging.getLogger(__name__)

_PACKAGES = ("site-packages", "dist-packages")
_THERE = {"__main__", __name__.partition(".")[0], "pyspark", "py4j", *sys.stdlib_module_names}
_MOST = 16 << 20  # bytes of text that go along


@dataclass(frozen=True)
class UserModule:
    """A module's text.

    Parameters
    ----------
    file : str
        Where it was on the driver.
    text : str
        What was in it; nothing, if it is a package without an ``__init__.py``.
    package : bool
        Whether it has modules inside.
    """

    file: str
    text: str
    package: bool


def is_installed(file: str) -> bool:
    """Whether a file is Python's own, or came with a package that the executors have to have."""
    return any(part in file for part in _PACKAGES) or file.startswith(sysconfig.get_paths()["stdlib"])


def gather(names: Iterable[str], texts: Iterable[tuple[str, str]]) -> dict[str, UserModule]:
    """Find the user's modules of these names, what texts import of the user's, and what all these import of it.

    Nothing is imported for it: what a text imports inside a function need not be there yet.

    Parameters
    ----------
    names : iterable of str
        Modules'.
    texts : iterable of (str, str)
        Each with the package that it is in, from which its relative imports count.
    """
    found: dict[str, UserModule] = {}
    seen: set[str] = set()
    waiting = [*names]
    for text, package in texts:
        waiting += _imported(text, package)
    room = _MOST
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] in _THERE:
            continue
        seen.add(name)
        carried = _read(name)
        if carried is None:
            continue
        room -= len(carried.text)
        if room < 0:
            logger.warning(
                "the modules of yours that go along with a function have more than %d MiB of text: %s and those after "
                "it stay here. Install them on the executors, or ship them by sc.addPyFile",
                _MOST >> 20,
                name,
            )
            break
        found[name] = carried
        package = name if carried.package else name.rpartition(".")[0]
        waiting += [*_parents(name), *_imported(carried.text, package)]
    return found


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _imported(text: str, package: str) -> Iterator[str]:
    """Name what a text may import; of ``from a import b`` b may be a module too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python has told of them, when it compiled the text
            tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a cell with magics in it, or no text at all
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names for name in (alias.name, *_parents(alias.name)))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            if base:
                yield from (base, *_parents(base), *(f"{base}.{alias.name}" for alias in node.names))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:  # it reaches beyond its package, which Python will say
        return ""


def _read(name: str) -> UserModule | None:
    """Return a module of the user's; None for any other, and for what is no text."""
    spec = _spec(name)
    if spec is None:
        return None
    package = spec.submodule_search_locations is not None
    file = spec.origin if spec.has_location else None
    if file is None:  # a package without an __init__.py is a folder, or several
        folders = [*(spec.submodule_search_locations or ())]
        return UserModule("", "", True) if folders and not any(map(is_installed, folders)) else None
    if not file.endswith(".py") or is_installed(file):
        return None
    text = _text(name, spec)
    return UserModule(file, text, package) if text is not None else None


def _text(name: str, spec: importlib.machinery.ModuleSpec) -> str | None:
    try:
        text: str | None = spec.loader.get_source(name)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, SyntaxError, UnicodeError):  # no loader, no file, or no text
        return None
    return text


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find a module without importing anything."""
    known: importlib.machinery.ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
    if known is not None:
        return known
    parent = name.rpartition(".")[0]
    within = _spec(parent) if parent else None
    if parent and (within is None or within.submodule_search_locations is None):
        return None
    return _in_folders(name, (within.submodule_search_locations if within is not None else None) or sys.path)


def _in_folders(name: str, path: Iterable[str]) -> importlib.machinery.ModuleSpec | None:
    """Find a module as Python's ``PathFinder`` does, which has to have imported the packages that it is in."""
    folders: list[str] = []
    for entry in path:
        finder: Any = pkgutil.get_importer(entry or os.getcwd())
        spec: importlib.machinery.ModuleSpec | None = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        folders += (spec.submodule_search_locations or ()) if spec is not None else ()
    if not folders:
        return None
    several = importlib.machinery.ModuleSpec(name, None, is_package=True)
    several.submodule_search_locations = folders
    return several


def provide(modules: Mapping[str, UserModule]) -> None:
    """Have this process import modules as they were on the driver."""
    if not modules:
        return
    finder = next((one for one in sys.meta_path if isinstance(one, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.take(modules)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports modules from the texts that it has been given."""

    def __init__(self) -> None:
        self._modules: dict[str, UserModule] = {}

    def take(self, modules: Mapping[str, UserModule]) -> None:
        """Take source texts; when one has changed, all are imported again: the others may refer to its old objects."""
        if any(self._modules.get(name, carried) != carried for name, carried in modules.items()):
            for name in self._modules:
                sys.modules.pop(name, None)
        self._modules.update(modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find one that has been taken."""
        carried = self._modules.get(fullname)
        if carried is None:
            return None
        there = self._by_others(fullname, path, target)
        if there is not None and _text(fullname, there) == carried.text:
            return there
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=carried.file, is_package=carried.package)
        spec.has_location = bool(carried.file)
        if carried.package:  # what did not come along may be there
            folders = there.submodule_search_locations if there is not None else None
            spec.submodule_search_locations = [*filter(None, [os.path.dirname(carried.file)]), *(folders or ())]
        return spec

    def _by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        others = (one for one in sys.meta_path if one is not self and hasattr(one, "find_spec"))
        return next(filter(None, (one.find_spec(fullname, path, target) for one in others)), None)

    def is_package(self, fullname: str) -> bool:
        """Whether it has modules inside."""
        return self._modules[fullname].package

    def get_source(self, fullname: str) -> str:
        """Return its text: tracebacks, ``inspect`` and AutoGraph ask for it."""
        return self._modules[fullname].text

    def get_code(self, fullname: str) -> CodeType:
        """Compile it under the name of the file that it was in."""
        carried = self._modules[fullname]
        code: CodeType = compile(carried.text, carried.file or f"<{fullname}>", "exec", dont_inherit=True)
        return code
