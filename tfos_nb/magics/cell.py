"""Turn a cell's text into the function that runs on the nodes.

The cell is run in the user's namespace, as IPython would run it. It gets a file name that ``linecache`` knows, and the
line numbers of the notebook's cell. So tracebacks in the kernel and from the nodes show the user's own lines.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tfos_nb.errors import PlanError, TfosError, nearest

__all__ = ["CellProgram", "CellSyntaxError", "ParsedCell", "parse_cell"]

_WANTED = "def main(args, ctx):"

Main = Callable[[Any, Any], Any]


class CellSyntaxError(TfosError):
    """The cell has a syntax error. It is shown like the syntax error of any other cell in IPython."""

    def __init__(self, error: SyntaxError, lines: list[str]) -> None:
        super().__init__(str(error))
        self.error = error
        self._lines = lines

    def _render_traceback_(self) -> list[str]:
        return self._lines


@dataclass(frozen=True)
class CellProgram:
    """The function of a cell that runs on the nodes.

    Attributes
    ----------
    function : callable
        The function that takes (args, ctx).
    note : str
        A note for the user about the choice of the function; empty if only one was possible.
    """

    function: Main
    note: str = ""


@dataclass(frozen=True)
class ParsedCell:
    """A cell that was parsed and whose function was chosen, but that has not run."""

    shell: InteractiveShell
    tree: ast.Module
    filename: str
    chosen: str
    note: str

    @property
    def names(self) -> set[str]:
        """Names of the functions and classes that the cell defines."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return {node.name for node in self.tree.body if isinstance(node, kinds)}

    def run(self) -> CellProgram:
        """Run the cell in the user's namespace and return its function.

        Raises
        ------
        Exception
            Any exception of the cell, with the user's own traceback.
        """
        code = self.shell.compile(self.tree, self.filename, "exec")  # type: ignore[arg-type]  # a tree is fine
        try:
            exec(code, self.shell.user_global_ns, self.shell.user_ns)  # noqa: S102 - running a cell is the purpose
        except Exception as error:
            _show_only_the_cell(self.shell, error)
            raise
        function = self.shell.user_ns[self.chosen]
        return CellProgram(function, self.note)


def parse_cell(shell: InteractiveShell, text: str, fn: str | None = None) -> ParsedCell:
    """Parse a cell and choose its function, before anything runs.

    Parameters
    ----------
    shell : InteractiveShell
        The user's shell. Its input transformations, compiler and namespace are used.
    text : str
        The cell without its first line; empty if the function is outside it.
    fn : str, optional
        Name of the function, in the cell or in the namespace.

    Raises
    ------
    CellSyntaxError
        If the cell has a syntax error.
    PlanError
        If it has no function that takes (args, ctx).
    """
    source = _at_its_lines(shell.transform_cell(text), text)  # type: ignore[no-untyped-call]
    filename = _register(shell, source)
    try:
        tree = shell.transform_ast(shell.compile.ast_parse(source, filename))  # type: ignore[no-untyped-call]
    except SyntaxError as error:
        lines = shell.SyntaxTB.structured_traceback(SyntaxError, error, [])  # type: ignore[arg-type]
        raise CellSyntaxError(error, lines) from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if fn is None:
        chosen, note = _choose(functions)
    else:
        chosen, note = _find(fn, functions, tree, shell.user_ns), ""
    return ParsedCell(shell, tree, filename, chosen, note)


def _at_its_lines(source: str, text: str) -> str:
    """Prepend blank lines to the source, so that its line numbers are those of the cell with the magic's line."""
    blank = len(text) - len(text.lstrip("\n"))  # IPython's transformation drops leading blank lines
    return "\n" * (1 + blank) + source


def _register(shell: InteractiveShell, source: str) -> str:
    """Register the cell's source under a file name that tracebacks in the kernel and on a node show; return the name.

    IPython's own name would be ``/tmp/ipykernel_123/456.py``. On a node, which has no IPython to translate the name, it
    would mean nothing to the user.
    """
    history = shell.history_manager  # IPython 9 increments execution_count before the cell runs, older ones after it
    count = len(history.input_hist_parsed) - 1 if history is not None else shell.execution_count
    name = f"Cell In[{count}]"
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)  # without a time, linecache keeps it
    getattr(shell.compile, "_filename_map", {})[name] = count  # IPython then writes "Cell In[4], line 3" itself
    return name


def _choose(functions: list[ast.FunctionDef | ast.AsyncFunctionDef]) -> tuple[str, str]:
    if not functions:
        raise PlanError(f"the cell has no function for the nodes: write {_WANTED} or name one with --fn")
    fitting = [node for node in functions if isinstance(node, ast.FunctionDef) and _takes_two(node.args)]
    named = [node for node in fitting if _names(node.args)[:2] == ["args", "ctx"]]
    names = [node.name for node in named or fitting]
    if not names:
        told = ", ".join(_signature(node) for node in functions)
        raise PlanError(f"no function of the cell takes (args, ctx): {told}. Write {_WANTED} or name one with --fn")
    note = f"runs {names[-1]}, the last of {', '.join(names)}" if len(names) > 1 else ""
    return names[-1], note


def _find(
    fn: str, functions: list[ast.FunctionDef | ast.AsyncFunctionDef], tree: ast.Module, namespace: dict[str, Any]
) -> str:
    """Check that the function that --fn names exists, or will exist when the cell has run; return its name."""
    inside = {node.name: node for node in functions}
    if fn in inside:
        node = inside[fn]
        if isinstance(node, ast.AsyncFunctionDef) or not (_takes_two(node.args) or node.decorator_list):
            raise PlanError(f"--fn {fn}: it must take (args, ctx), got {_signature(node)}")
        return fn
    if fn in _assigned(tree):
        return fn
    if fn not in namespace:
        kinds = types.FunctionType, partial
        own = (name for name, value in namespace.items() if isinstance(value, kinds) and not name.startswith("_"))
        known = [*inside, *(name for name in own if not hasattr(builtins, name))]  # IPython adds its own open
        here = f"; the cell has {', '.join(inside)}" if inside else ""
        raise PlanError(f"--fn {fn}: no such function{nearest(fn, known) or here}")
    value = namespace[fn]
    if not callable(value):
        raise PlanError(f"--fn {fn}: not a function but of type {type(value).__name__}")
    try:
        inspect.signature(value).bind(None, None)
    except TypeError:
        raise PlanError(f"--fn {fn}: it must take (args, ctx), got {fn}{inspect.signature(value)}") from None
    except ValueError:
        pass  # a function in C without a signature cannot be checked
    return fn


def _assigned(tree: ast.Module) -> set[str]:
    """Return the names that the cell assigns or imports at its top level, as in ``main = partial(train, 3)``."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _names(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]


def _takes_two(arguments: ast.arguments) -> bool:
    """Return whether a function needs exactly two positional arguments and no keyword arguments."""
    required = len(_names(arguments)) - len(arguments.defaults)
    return required == 2 and all(default is not None for default in arguments.kw_defaults)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{kind}{node.name}({ast.unparse(node.args)})"


def _show_only_the_cell(shell: InteractiveShell, error: Exception) -> None:
    """Let IPython show the traceback from the user's first frame on, without the magic's frames above it."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    if isinstance(error, SyntaxError):  # in a module that the cell imports: IPython shows these in its own way
        return
    render = partial(shell.InteractiveTB.structured_traceback, type(error), error, frames, tb_offset=0)
    try:
        error._render_traceback_ = render  # type: ignore[attr-defined]  # IPython asks the exception for it
    except AttributeError:
        return  # an exception with __slots__ is shown with the magic's frames
