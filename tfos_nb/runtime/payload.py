"""The user's function on its way to the executors: what it takes along, and what cannot travel.

The function, its arguments and whatever of the notebook they refer to are pickled by value on the driver. The bytes
travel inside Spark's own task closure and are unpickled in the node's process alone.
"""

from __future__ import annotations
import __future__

import contextlib
import dis
import functools
import importlib
import inspect
import io
import linecache
import logging
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfos_nb.errors import PlanError

__all__ = ["pack", "taken_along", "unpack"]

logger = logging.getLogger(__name__)

_BIG = 64 * 1024 * 1024

_NEVER_TRAVEL = {
    ("pyspark", "SparkSession"): "it lives on the driver alone",
    ("pyspark", "SparkContext"): "it lives on the driver alone",
    ("pyspark", "DataFrame"): "feed it with --data {name}, or cluster.train({name})",
    ("pyspark", "RDD"): "feed it with --data {name}, or cluster.train({name})",
    ("pyspark", "PipelinedRDD"): "feed it with --data {name}, or cluster.train({name})",
    ("pyspark", "Broadcast"): "use its .value",
    ("_thread", "lock"): "make it inside the function",
    ("_thread", "RLock"): "make it inside the function",
    ("threading", "Thread"): "start it inside the function",
    ("socket", "socket"): "open it inside the function",
    ("tfos_nb", "Cluster"): "it lives on the driver alone",
}


def pack(main: Callable[..., Any], args: Any, sources: Mapping[str, str] | None = None) -> bytes:
    """Pickle ``main`` and ``args`` by value.

    Parameters
    ----------
    main : callable
        Takes ``(args, ctx)``.
    args : object
        Handed to ``main`` as it is.
    sources : mapping of str to str, optional
        Source text by file name, so that a traceback on a node shows the lines of a notebook's cell.

    Raises
    ------
    PlanError
        Naming what cannot travel and where it is, before anything starts.
    """
    _check_signature(main)
    if not callable(main):
        raise PlanError(f"main is a {type(main).__name__}, not a function that takes (args, ctx)")
    function = _innermost(main)
    with taken_along(function):
        culprit = next(_culprits(function, args), None)
        if culprit is not None:
            raise PlanError(culprit)
        data = _dumps(main, args)
    if len(data) > _BIG:
        logger.warning(
            "%s and what it refers to take %d MiB, which every node receives: read big data on the nodes, or feed it",
            _name_of(main),
            len(data) >> 20,
        )
    return pickle.dumps((data, dict(sources or _sources_of(function))))


def _innermost(main: Any) -> Any:
    """Return the user's own function inside partials, and inside the callable objects of this package."""
    while True:
        if isinstance(main, functools.partial):
            main = main.func
        elif _package_of(type(main)) == _package_of(_innermost) and hasattr(main, "__wrapped__"):
            main = main.__wrapped__
        else:
            return main


def _package_of(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


def _check_signature(main: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(main)
    except (TypeError, ValueError):  # no function of Python's own: only the call can tell
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise PlanError(f"{_name_of(main)}{signature} is called as {_name_of(main)}(args, ctx): give it both") from None


def _cloudpickle() -> Any:
    """Return the one inside PySpark, which both sides have."""
    return importlib.import_module("pyspark.cloudpickle")


def _dumps(main: Callable[..., Any], args: Any) -> bytes:
    cloudpickle = _cloudpickle()
    try:
        data: bytes = cloudpickle.dumps((main, args))
    except Exception as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PlanError(f"{_name_of(main)} or its args cannot travel to the nodes: {what}") from error
    return data


@contextlib.contextmanager
def taken_along(main: Callable[..., Any]) -> Iterator[None]:
    """Take the function's own module along by value, unless it is installed: the nodes need not have a user's file.

    That holds for what is pickled inside the block.
    """
    cloudpickle = _cloudpickle()
    module = sys.modules.get(getattr(main, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    known = module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value()
    if module is None or known or not file or _is_installed(module.__name__, file):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_installed(name: str, file: str) -> bool:
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names or package == __name__.partition(".")[0]:  # this package: nodes have it
        return True
    return "site-packages" in file or "dist-packages" in file


def unpack(payload: bytes) -> tuple[Callable[..., Any], Any]:
    """Undo :func:`pack`, in the node's process."""
    # The bytes come from Spark's task closure through an inherited pipe, never from a socket.
    data, sources = pickle.loads(payload)  # noqa: S301
    for filename, text in sources.items():
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    main, args = pickle.loads(data)  # noqa: S301
    function = _innermost(main)
    code = getattr(function, "__code__", None)
    if code is not None and code.co_flags & __future__.annotations.compiler_flag:
        # AutoGraph looks for this name to compile annotations as the function's module did; pickling leaves it behind.
        function.__globals__.setdefault("annotations", __future__.annotations)
    return main, args


def _name_of(main: Callable[..., Any]) -> str:
    function = _innermost(main)
    return getattr(function, "__name__", type(function).__name__)


def _sources_of(main: Callable[..., Any]) -> dict[str, str]:
    """Find the text of a function that no file holds, such as one typed into a notebook."""
    code = getattr(main, "__code__", None)
    if code is None:
        return {}
    lines = linecache.getlines(code.co_filename)
    return {code.co_filename: "".join(lines)} if lines else {}


def _culprits(main: Callable[..., Any], args: Any) -> Iterator[str]:
    seen: set[int] = set()
    yield from _in_value(args, "args", "args", seen)
    yield from _in_function(main, seen)


def _in_function(function: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(function, types.MethodType):
        function = function.__func__
    code = getattr(function, "__code__", None)
    if code is None or id(function) in seen or not _by_value(function):
        return
    seen.add(id(function))
    owner = _name_of(function)
    for name, value in _referred(function, code):
        yield from _in_value(value, name, f"{owner} refers to {name}", seen)


def _referred(function: Any, code: types.CodeType) -> Iterator[tuple[str, Any]]:
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents
    for name in sorted(_global_names(code)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _global_names(code: types.CodeType) -> set[str]:
    names = {op.argval for op in dis.get_instructions(code) if op.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _by_value(function: Any) -> bool:
    """Whether cloudpickle takes the function along, rather than the name of its module."""
    cloudpickle = _cloudpickle()
    module = getattr(function, "__module__", None)
    known = module in sys.modules and module not in cloudpickle.list_registry_pickle_by_value()
    return module in (None, "__main__") or not known


def _in_value(value: Any, name: str, where: str, seen: set[int]) -> Iterator[str]:
    reason = _why_not(value)
    if reason is not None:
        kind = type(value).__name__
        verb = "which cannot travel to the nodes"
        yield f"{where}, {_article(kind)} {kind}, {verb}: {reason.format(name=name)}"
    elif isinstance(value, (types.FunctionType, types.MethodType)):
        yield from _in_function(value, seen)
    elif isinstance(value, dict) and len(value) <= 1000:
        for key, item in value.items():
            yield from _in_value(item, name, f"{where}[{key!r}]", seen)
    elif isinstance(value, (list, tuple, set)) and len(value) <= 1000:
        for item in value:
            yield from _in_value(item, name, where, seen)
    elif hasattr(value, "__dict__") and type(value).__name__ == "Namespace":
        for key, item in vars(value).items():
            yield from _in_value(item, key, f"{where}.{key}", seen)


def _why_not(value: Any) -> str | None:
    if isinstance(value, io.IOBase):
        return "open the file inside the function"
    if isinstance(value, (types.GeneratorType, types.CoroutineType)):
        return "make it inside the function"
    for cls in type(value).__mro__:
        reason = _NEVER_TRAVEL.get((cls.__module__.partition(".")[0], cls.__name__))
        if reason is not None:
            return reason
    return None


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" or word in ("RDD", "RLock") else "a"
