"""Turn a cell's text into the function that runs on the nodes.

The cell is run in the user's namespace as IPython would run it. It has a file name that ``linecache`` knows, and the
line numbers of the notebook's cell. So tracebacks, here and from the nodes, show the user's own lines.
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

from tfos_nb.errors import PlanError, TfosError
from tfos_nb.magics.arguments import nearest

__all__ = ["CellProgram", "CellSyntaxError", "ParsedCell", "parse_cell"]

_WANTED = "def main(args, ctx):"

Main = Callable[[Any, Any], Any]


class CellSyntaxError(TfosError):
    """The cell is no Python. Shown as IPython shows a syntax error of any cell."""

    def __init__(self, error: SyntaxError, lines: list[str]) -> None:
        super().__init__(str(error))
        self.error = error
        self._lines = lines

    def _render_traceback_(self) -> list[str]:
        return self._lines


@dataclass(frozen=True)
class CellProgram:
    """What a cell gives to the nodes.

    Attributes
    ----------
    function : callable
        The function that takes (args, ctx).
    note : str
        What the user should know of the choice; empty if there was none.
    """

    function: Main
    note: str = ""


@dataclass(frozen=True)
class ParsedCell:
    """A cell that is Python and has been asked for its function, but has not run."""

    shell: InteractiveShell
    tree: ast.Module
    filename: str
    chosen: str
    note: str

    @property
    def names(self) -> set[str]:
        """The functions and classes that the cell defines."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return {node.name for node in self.tree.body if isinstance(node, kinds)}

    def run(self) -> CellProgram:
        """Run the cell in the user's namespace and take its function.

        Raises
        ------
        Exception
            Whatever the cell raises, with the user's own traceback.
        """
        code = self.shell.compile(self.tree, self.filename, "exec")  # type: ignore[arg-type]  # a tree is fine
        try:
            exec(code, self.shell.user_global_ns, self.shell.user_ns)  # noqa: S102 - a cell is there to be run
        except Exception as error:
            _show_only_the_cell(self.shell, error)
            raise
        function = self.shell.user_ns[self.chosen]
        return CellProgram(function, self.note)


def parse_cell(shell: InteractiveShell, text: str, fn: str | None = None) -> ParsedCell:
    """Read a cell and choose its function, before anything runs.

    Parameters
    ----------
    shell : InteractiveShell
        The user's shell: its input transformations, its compiler, its namespace.
    text : str
        The cell without its first line; empty if the function is outside it.
    fn : str, optional
        The function's name, in the cell or in the namespace.

    Raises
    ------
    CellSyntaxError
        If the cell is no Python.
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
    """Move the source down to the lines that it has in the notebook: the magic's own line is above it."""
    blank = len(text) - len(text.lstrip("\n"))  # IPython's transformation drops leading blank lines
    return "\n" * (1 + blank) + source


def _register(shell: InteractiveShell, source: str) -> str:
    """Give the cell a file name under which tracebacks, here and on a node, find its lines.

    IPython's own name for it would be ``/tmp/ipykernel_123/456.py``, which says nothing on a node: a node's traceback
    is Python's, and has no IPython to translate the name.
    """
    history = shell.history_manager  # IPython 9 counts execution_count up before the cell runs, older ones after
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
    """Check that the function that --fn names is there, or will be when the cell has run."""
    inside = {node.name: node for node in functions}
    if fn in inside:
        node = inside[fn]
        if isinstance(node, ast.AsyncFunctionDef) or not (_takes_two(node.args) or node.decorator_list):
            raise PlanError(f"--fn {fn}: it is {_signature(node)}, and it is called with (args, ctx)")
        return fn
    if fn in _assigned(tree):
        return fn
    if fn not in namespace:
        kinds = types.FunctionType, partial
        own = (name for name, value in namespace.items() if isinstance(value, kinds) and not name.startswith("_"))
        known = [*inside, *(name for name in own if not hasattr(builtins, name))]  # IPython has an open of its own
        here = f"; the cell has {', '.join(inside)}" if inside else ""
        raise PlanError(f"--fn {fn}: no such function{nearest(fn, known) or here}")
    value = namespace[fn]
    if not callable(value):
        raise PlanError(f"--fn {fn}: not a function but of type {type(value).__name__}")
    try:
        inspect.signature(value).bind(None, None)
    except TypeError:
        raise PlanError(f"--fn {fn}: it is {fn}{inspect.signature(value)}, and it is called with (args, ctx)") from None
    except ValueError:
        pass  # a function in C without a signature: whoever names it knows
    return fn


def _assigned(tree: ast.Module) -> set[str]:
    """Names that the cell gives to something at its top level: ``main = partial(train, 3)``, ``from x import main``."""
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
    """Whether exactly two positional arguments must be given, and nothing by keyword."""
    required = len(_names(arguments)) - len(arguments.defaults)
    return required == 2 and all(default is not None for default in arguments.kw_defaults)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{kind}{node.name}({ast.unparse(node.args)})"


def _show_only_the_cell(shell: InteractiveShell, error: Exception) -> None:
    """Let IPython render the traceback from the user's first frame on, without the magic's frames above it."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    if isinstance(error, SyntaxError):  # of a module that the cell imports: IPython has its own way
        return
    render = partial(shell.InteractiveTB.structured_traceback, type(error), error, frames, tb_offset=0)
    try:
        error._render_traceback_ = render  # type: ignore[attr-defined]  # IPython asks the exception for it
    except AttributeError:
        return  # an exception with __slots__ is shown with our frames
