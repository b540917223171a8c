"""Send the user's own modules with a function, such as files beside the notebook, which the executors do not have.

::

    gather(names, texts) ──▶ {module: its text} ──▶ provide(modules)
    on the driver            in the payload          where the function is unpickled

Installed modules are not sent, and neither are extension modules and data files. If an executor has a module with the
same text, for example in a shared folder, it imports that one. Then the module also finds files beside it.
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
_MOST = 16 << 20  # maximum characters of all texts that are sent


@dataclass(frozen=True)
class UserModule:
    """Source text of a module.

    Parameters
    ----------
    file : str
        Path on the driver. Empty for a package without an ``__init__.py``.
    text : str
        Source text. Empty for a package without an ``__init__.py``.
    package : bool
        Whether it is a package.
    """

    file: str
    text: str
    package: bool


def is_installed(file: str) -> bool:
    """Return whether a file belongs to Python's standard library or to an installed package."""
    return any(part in file for part in _PACKAGES) or file.startswith(sysconfig.get_paths()["stdlib"])


def gather(names: Iterable[str], texts: Iterable[tuple[str, str]]) -> dict[str, UserModule]:
    """Return the user's modules that are named or imported by texts, and the user's modules that those import.

    No module is imported for this, because a module that a function imports may not be importable yet. If the texts
    exceed 16 MiB, a warning is logged and the remaining modules are left out.

    Parameters
    ----------
    names : iterable of str
        Names of modules.
    texts : iterable of (str, str)
        Source texts, each with the name of its package for relative imports.

    Returns
    -------
    dict of str to UserModule
        By name, with the packages that contain them.
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
        module = _read(name)
        if module is None:
            continue
        room -= len(module.text)
        if room < 0:
            logger.warning(
                "the modules of yours that a function needs have more than %d MiB of text: %s and those after it are "
                "not sent. Install them on the executors, or send them with sc.addPyFile",
                _MOST >> 20,
                name,
            )
            break
        found[name] = module
        package = name if module.package else name.rpartition(".")[0]
        waiting += [*_parents(name), *_imported(module.text, package)]
    return found


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _imported(text: str, package: str) -> Iterator[str]:
    """Yield the names of modules that a text may import. For ``from a import b`` these are ``a`` and ``a.b``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python showed its warnings when it first compiled the text
            tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a cell with magics, or bytes that are no text
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
    except ImportError:  # beyond the top-level package; Python raises this again when the function runs
        return ""


def _read(name: str) -> UserModule | None:
    """Return a module of the user; None for an installed module, or one without Python source."""
    spec = _spec(name)
    if spec is None:
        return None
    package = spec.submodule_search_locations is not None
    file = spec.origin if spec.has_location else None
    if file is None:  # a namespace package: one or several folders
        folders = [*(spec.submodule_search_locations or ())]
        return UserModule("", "", True) if folders and not any(map(is_installed, folders)) else None
    if not file.endswith(".py") or is_installed(file):
        return None
    text = _text(name, spec)
    return UserModule(file, text, package) if text is not None else None


def _text(name: str, spec: importlib.machinery.ModuleSpec) -> str | None:
    try:
        text: str | None = spec.loader.get_source(name)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, SyntaxError, UnicodeError):  # no loader, no file, or not decodable
        return None
    return text


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module without importing anything; None if it is not found."""
    known: importlib.machinery.ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
    if known is not None:
        return known
    parent = name.rpartition(".")[0]
    within = _spec(parent) if parent else None
    if parent and (within is None or within.submodule_search_locations is None):
        return None
    return _in_folders(name, (within.submodule_search_locations if within is not None else None) or sys.path)


def _in_folders(name: str, path: Iterable[str]) -> importlib.machinery.ModuleSpec | None:
    """Find a module in folders, like Python's ``PathFinder``, which however needs the parent package imported."""
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
    """Make modules importable in this process, with their text on the driver."""
    if not modules:
        return
    finder = next((one for one in sys.meta_path if isinstance(one, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.take(modules)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Import hook that imports modules from their texts."""

    def __init__(self) -> None:
        self._modules: dict[str, UserModule] = {}

    def take(self, modules: Mapping[str, UserModule]) -> None:
        """Add modules. If a text has changed, all are imported again, because others may refer to its old objects."""
        if any(self._modules.get(name, module) != module for name, module in modules.items()):
            for name in self._modules:
                sys.modules.pop(name, None)
        self._modules.update(modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of an added module: the one of other hooks if its text is the same, otherwise a new one."""
        module = self._modules.get(fullname)
        if module is None:
            return None
        there = self._by_others(fullname, path, target)
        if there is not None and _text(fullname, there) == module.text:
            return there
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=module.file, is_package=module.package)
        spec.has_location = bool(module.file)
        if module.package:  # submodules that were not sent may exist on this host
            folders = there.submodule_search_locations if there is not None else None
            spec.submodule_search_locations = [*filter(None, [os.path.dirname(module.file)]), *(folders or ())]
        return spec

    def _by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        others = (one for one in sys.meta_path if one is not self and hasattr(one, "find_spec"))
        return next(filter(None, (one.find_spec(fullname, path, target) for one in others)), None)

    def is_package(self, fullname: str) -> bool:
        """Return whether a module is a package."""
        return self._modules[fullname].package

    def get_source(self, fullname: str) -> str:
        """Return a module's text, for tracebacks, ``inspect`` and AutoGraph."""
        return self._modules[fullname].text

    def get_code(self, fullname: str) -> CodeType:
        """Return a module's code, compiled under its file name on the driver."""
        module = self._modules[fullname]
        code: CodeType = compile(module.text, module.file or f"<{fullname}>", "exec", dont_inherit=True)
        return code
