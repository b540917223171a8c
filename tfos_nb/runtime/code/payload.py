"""Pickle the user's function for the executors, and explain what cannot be pickled.

The function, its arguments and all objects of the notebook that they refer to are pickled by value on the driver. The
bytes are sent in Spark's own task closure, and are unpickled only in the node's process.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import io
import itertools
import logging
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tfos_nb.errors import PlanError, with_article
from tfos_nb.runtime.code import source_text

__all__ = ["DETACHED", "FED", "Sent", "pack", "pack_reader", "pickled_by_value", "unpack"]

logger = logging.getLogger(__name__)

_BIG = 64 * 1024 * 1024
_MANY = 1000  # larger collections are not searched for objects that cannot be pickled
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")


@dataclass(frozen=True)
class Sent:
    """Where a function is sent, and what to do instead of sending Spark's objects with it.

    Attributes
    ----------
    refused : str
        End of the name of an object: it cannot be sent there.
    session : str
        Advice for a SparkSession.
    rows : str
        Advice for a DataFrame or RDD, whose name replaces ``{name}``.
    inside : str
        Where else to make any other object.
    """

    refused: str
    session: str
    rows: str
    inside: str = "main"


FED = Sent(
    ", which cannot be sent to the nodes",
    "it exists only on the driver",
    "feed it with --data {name}, or cluster.train({name})",
)
"""``main`` of a cluster of this process."""

DETACHED = replace(
    FED,
    rows="a detached cluster reads its rows itself. Write them to files, as with df.write.parquet(path), and give a "
    "function that reads these as data= (--data), or to cluster.train: lambda spark: spark.read.parquet(path)",
)
"""``main`` of a detached cluster."""

_READER = Sent(
    ", which cannot be sent to the cluster's process",
    "use the session that the function is given",
    "make it inside the function, from the session that the function is given, as in "
    "lambda spark: spark.read.parquet(path). If it is not in files yet, write it before, as with "
    "{name}.write.parquet(path)",
    "the function",
)
_SESSION, _ROWS = "{session}", "{rows}"

_NOT_SENT = {
    ("pyspark", "SparkSession"): _SESSION,
    ("pyspark", "SparkContext"): _SESSION,
    ("pyspark", "DataFrame"): _ROWS,
    ("pyspark", "RDD"): _ROWS,
    ("pyspark", "PipelinedRDD"): _ROWS,
    ("pyspark", "Broadcast"): "use its .value",
    ("pyspark", "Column"): "use it on the driver, before the rows are fed",
    ("_thread", "lock"): "make it inside the function",
    ("_thread", "RLock"): "make it inside the function",
    ("threading", "Thread"): "start it inside the function",
    ("socket", "socket"): "open it inside the function",
    ("tfos_nb", "Cluster"): "it exists only on the driver",
}


def pack(main: Callable[..., Any], args: Any, sources: Mapping[str, str] | None = None, sent: Sent = FED) -> bytes:
    """Pickle ``main`` and ``args`` by value.

    Parameters
    ----------
    main : callable
        Takes ``(args, ctx)``.
    args : object
        First argument of ``main``.
    sources : mapping of str to str, optional
        More source text by file name, in addition to that of the pickled functions. Tracebacks on a node show it.
    sent : Sent, optional
        What to advise in an error.

    Raises
    ------
    PlanError
        If ``main`` is no function of two parameters, or refers to an object that cannot be pickled. The message names
        the object and where it is.
    """
    _check_signature(main)
    if not callable(main):
        raise PlanError(f"main must be a function that takes (args, ctx), got a {type(main).__name__}")
    function = _innermost(main)
    _check_plain(function)
    with pickled_by_value(function):
        data, found = _checked_dumps(main, args, sent)
    if len(data) > _BIG:
        logger.warning(
            "%s and what it refers to take %d MiB, which every node receives: read large data on the nodes, or feed "
            "them",
            name_of(main),
            len(data) >> 20,
        )
    return pickle.dumps((data, replace(found, files={**found.files, **(sources or {})})))


def pack_reader(read: Callable[[Any], Any]) -> bytes:
    """Pickle a function of one argument by value; :func:`unpack` returns it as ``main``.

    Raises
    ------
    PlanError
        If it refers to an object that cannot be pickled.
    """
    function = _innermost(read)
    _check_plain(function)
    with pickled_by_value(function):
        return pickle.dumps(_checked_dumps(read, None, _READER))


def check_takes_session(what: str, read: Callable[..., Any]) -> None:
    """Raise PlanError if a function cannot be called with a SparkSession alone; ``what`` names the argument."""
    if wrong := _called_wrongly(read, "spark"):
        raise PlanError(f"{what}: {wrong}: give it this one parameter")


def _innermost(main: Any) -> Any:
    """Return the user's function inside ``functools.partial`` objects and callable objects of this package."""
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
    if wrong := _called_wrongly(main, "args", "ctx"):
        raise PlanError(f"{wrong}: give it these two parameters")


def _called_wrongly(function: Callable[..., Any], *names: str) -> str:
    """Return how a function is called, if it does not take arguments of these names by position; else empty."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable without a signature, such as a C function: only a call can tell
        return ""
    try:
        signature.bind(*names)
    except TypeError:
        name = name_of(function)
        return f"{name}{signature} is called as {name}({', '.join(names)})"
    return ""


def _check_plain(function: Any) -> None:
    """Raise PlanError if a call of the function runs none of its lines, because it is async or a generator."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
    name = name_of(function)
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise PlanError(f"{name} is async, and a node calls it as {name}(args, ctx): write a plain def")
    if inspect.isgeneratorfunction(called):
        raise PlanError(
            f"{name} is a generator (it has a yield), so calling it runs nothing: return the result instead"
        )


def _cloudpickle() -> Any:
    """Return PySpark's copy of cloudpickle, which driver and executors have."""
    return importlib.import_module("pyspark.cloudpickle")


def _checked_dumps(main: Callable[..., Any], args: Any, sent: Sent) -> tuple[bytes, source_text.SourceTexts]:
    culprit = next(_culprits(main, args, sent), None)
    if culprit is not None:
        raise PlanError(culprit)
    try:
        return source_text.dumps((main, args))
    except Exception as error:
        told = f"{name_of(main)} or its args{sent.refused}: {_first_line(error)}"
        raise PlanError(_blame(main, args, sent) or told) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _blame(main: Callable[..., Any], args: Any, sent: Sent) -> str:
    """Return a message about the innermost named object that cannot be pickled; empty if there is none."""
    parts = [_Part("args", "args", args), _Part("main", "main", main)]
    found: tuple[_Part, str] | None = None
    seen: set[int] = set()
    while parts:
        part = parts.pop(0)
        reason = _why_unpicklable(part.value)
        if reason and id(part.value) not in seen:
            seen.add(id(part.value))
            found, parts = (part, reason), list(_parts(part))
    if found is None or found[0].value is main:
        return ""
    part, reason = found
    kind = type(part.value).__name__
    told = f"{part.where}, {with_article(kind)}{sent.refused}: {reason}"
    return f"{told}. Make it inside {sent.inside}"


def _why_unpicklable(value: Any) -> str:
    try:
        _cloudpickle().dumps(value)
    except Exception as error:  # noqa: BLE001 - the user's objects may raise anything when they are pickled
        return _first_line(error)
    return ""


@contextlib.contextmanager
def pickled_by_value(main: Callable[..., Any]) -> Iterator[None]:
    """Pickle a function's module by value inside the block, unless the module is installed.

    The nodes do not have the files of the user's modules.
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
    if package in sys.stdlib_module_names or package == __name__.partition(".")[0]:  # the nodes have this package
        return True
    return "site-packages" in file or "dist-packages" in file


def unpack(payload: bytes) -> tuple[Callable[..., Any], Any]:
    """Return ``main`` and ``args`` from the result of :func:`pack`, in the node's process."""
    # Unpickling is safe here: the bytes come from Spark's task closure through an inherited pipe, or, to the process of
    # a detached cluster, from a kernel of the same user, whom its socket admits alone.
    data, found = pickle.loads(payload)  # noqa: S301
    source_text.remember(found)
    main, args = pickle.loads(data)  # noqa: S301
    return main, args


def name_of(main: Callable[..., Any]) -> str:
    function = _innermost(main)
    return getattr(function, "__name__", type(function).__name__)


class _Part(NamedTuple):
    """Object that is pickled: the user's name for it, its place in words, and the object."""

    name: str
    where: str
    value: Any


def _culprits(main: Any, args: Any, sent: Sent) -> Iterator[str]:
    """Yield a message for each object of a type that cannot be pickled, depth first: where it is and what to do."""
    seen: set[int] = set()
    waiting = [_Part("main", "main", main), _Part("args", "args", args)]
    while waiting:
        part = waiting.pop()
        reason = _why_not(part.value)
        if reason is not None:
            kind = type(part.value).__name__
            advice = reason.format(session=sent.session, rows=sent.rows).format(name=part.name)
            yield f"{part.where}, {with_article(kind)}{sent.refused}: {advice}"
        elif id(part.value) not in seen:
            seen.add(id(part.value))
            waiting += reversed([*_parts(part)])


def _parts(part: _Part) -> Iterator[_Part]:
    """Yield the named objects that are pickled with an object."""
    name, where, value = part
    if isinstance(value, functools.partial):
        return _parts_of_partial(value)
    if isinstance(value, types.MethodType):
        owner = _Part("self", f"{name_of(value)} refers to self", value.__self__)
        return iter((owner, _Part(name, where, value.__func__)))
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, (dict, list, tuple, set)) and len(value) <= _MANY:
        return _parts_of_collection(part)
    if isinstance(value, type):
        return _attributes(vars(value), where) if _by_value(value) else iter(())
    if _package_of(type(value)) == _package_of(_parts):
        return iter([_Part(name, where, value.__wrapped__)] if hasattr(value, "__wrapped__") else ())
    if hasattr(value, "__dict__") and _is_the_users(type(value)):
        return itertools.chain(_attributes(vars(value), where), [_Part(name, where, type(value))])
    return iter(())


def _parts_of_collection(part: _Part) -> Iterator[_Part]:
    name, where, value = part
    if isinstance(value, dict):
        return (_Part(name, f"{where}[{key!r}]", item) for key, item in value.items())
    return (_Part(name, where, item) for item in value if type(item) not in _PLAIN)


def _parts_of_partial(value: functools.partial[Any]) -> Iterator[_Part]:
    whole = f"partial({name_of(value.func)}, …)"
    for number, item in enumerate(value.args, 1):
        yield _Part("df", f"argument {number} of {whole}", item)
    for key, item in value.keywords.items():
        yield _Part(key, f"{key} of {whole}", item)
    yield _Part("main", "main", value.func)


def _parts_of_function(function: types.FunctionType) -> Iterator[_Part]:
    if not _by_value(function):
        return
    code, owner = function.__code__, name_of(function)
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, value in [*_referred(function, code), *given.items()]:
        yield _Part(name, f"{owner} refers to {name}", value)


def _attributes(found: Mapping[str, Any], where: str) -> Iterator[_Part]:
    for name, value in list(found.items()):
        plain = getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
        if not name.startswith("__") and not isinstance(plain, (io.BytesIO, io.StringIO)):
            yield _Part(name, f"{where}.{name}", plain)


def _is_the_users(kind: type) -> bool:
    """Return whether a class is the user's and has Python's own pickling, so that its attributes are pickled."""
    if kind.__name__ == "Namespace":  # argparse.Namespace, the usual class of args
        return True
    own = all(getattr(kind, name, None) is getattr(object, name, None) for name in _PICKLING)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return own and (kind.__module__ == "__main__" or not _is_installed(kind.__module__, file))


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
    """Return whether cloudpickle pickles a function or class by value, and not by its module and name."""
    cloudpickle = _cloudpickle()
    module = getattr(function, "__module__", None)
    known = module in sys.modules and module not in cloudpickle.list_registry_pickle_by_value()
    return module in (None, "__main__") or not known


def _why_not(value: Any) -> str | None:
    if isinstance(value, io.IOBase):
        return "open the file inside the function"
    if isinstance(value, (types.GeneratorType, types.CoroutineType)):
        return "make it inside the function"
    for cls in type(value).__mro__:
        reason = _NOT_SENT.get((cls.__module__.partition(".")[0], cls.__name__))
        if reason is not None:
            return reason
    return None
