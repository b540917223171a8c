"""Completion of the magics' lines: options, their choices, and the variables that fit.

IPython's own completion is for Python, and would offer builtins after ``--data``. If a DataFrame, a cluster or the like
must follow and no variable fits, the text typed so far is offered. Then nothing changes, and IPython's completers,
which inspect every variable, are not called. If a file or a free word follows, nothing is offered here, and IPython's
completers run.
"""

from __future__ import annotations

import argparse
import functools
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell

import tfos_nb
from tfos_nb.magics import parsers
from tfos_nb.magics.arguments import LineParser, is_data
from tfos_nb.magics.clusters import clusters_of
from tfos_nb.runtime.control.plan import InputMode

__all__ = ["LineCompleter", "install", "remove"]

_FIRST = 1000
"""Priority higher than that of IPython's completers: when this one has answered, the slow ones are not called."""

_IDENTIFIER = "tfos_nb"

_LINE = re.compile(r"\s*(%{0,2}tfos_\w+)(\s.*)$")
_FUNCTION = re.compile(r"^def\s+(\w+)", re.MULTILINE)
_NO_VARIABLES = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


@dataclass(frozen=True)
class _Place:
    """Text to complete: the words before it, the fragment, the cell's text, and the user's visible variables."""

    words: tuple[str, ...]
    fragment: str
    cell: str
    names: Mapping[str, Any]


class LineCompleter:
    """Complete the lines of the magics.

    Parameters
    ----------
    shell : InteractiveShell
        The shell whose variables are offered.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    def offers(self, context: CompletionContext) -> tuple[list[str], str]:
        """Return the completions at the cursor, and the fragment that they replace."""
        found = _LINE.match(context.text_until_cursor)
        if found is None or (found[1].startswith("%%") and context.cursor_line):
            return [], ""
        magic = found[1] if found[1].startswith("%") else f"%{found[1]}"  # IPython accepts line magics without %
        parser = parsers.ALL.get(magic)
        if parser is None:
            return [], ""
        words = found[2].split()
        fragment = "" if found[2][-1].isspace() else words.pop()
        cell = context.full_text.partition("\n")[2] if magic.startswith("%%") else ""
        place = _Place(tuple(words), fragment, cell, self._visible())
        offered, fragment = _offer(parser, place)
        if offered is None:
            return [], fragment
        return [word for word in offered if word.startswith(fragment)] or [fragment], fragment

    def _visible(self) -> dict[str, Any]:
        hidden = getattr(self._shell, "user_ns_hidden", {})
        return {
            name: value
            for name, value in list(self._shell.user_ns.items())
            if name[:1] != "_" and not (name in hidden and hidden[name] is value)
        }


def _offer(parser: LineParser, place: _Place) -> tuple[list[str] | None, str]:
    """Return all possible words, whatever the fragment is, and the fragment; None instead if any word is possible."""
    options = parser.options()
    option, equals, value = place.fragment.partition("=")
    if equals and option in options:
        return _values(options[option].dest, parser, place), value
    if place.fragment.startswith("-"):
        return _options(parser, place.words), place.fragment
    before = options.get(place.words[-1]) if place.words else None
    if before is not None and before.nargs != 0:
        return _values(before.dest, parser, place), place.fragment
    action = _due(parser, place.words)
    offered = _values(action.dest, parser, place) if action is not None else None
    if place.fragment:
        return offered, place.fragment
    return (offered or []) + _options(parser, place.words), place.fragment


def _options(parser: LineParser, words: Iterable[str]) -> list[str]:
    """Return the long names of the options that the line does not have yet."""
    used = {word.partition("=")[0] for word in words}
    return [
        max(action.option_strings, key=len)
        for action in parser.arguments()
        if action.option_strings and (action.nargs == "+" or not used & set(action.option_strings))
    ]


def _due(parser: LineParser, words: tuple[str, ...]) -> argparse.Action | None:
    """Return the next positional argument; None if there is no other."""
    options = parser.options()
    placed, skip = 0, False
    for word in words:
        if skip:
            skip = False
        elif word in options:
            skip = options[word].nargs != 0
        elif not word.startswith("-"):
            placed += 1
    positional = [action for action in parser.arguments() if not action.option_strings]
    return positional[placed] if placed < len(positional) else None


def _values(dest: str, parser: LineParser, place: _Place) -> list[str] | None:
    values = _VALUES.get(dest)
    if dest == "variable" and parser.magic == "%tfos_plan":  # it can show the plan of an existing cluster
        values = _clusters
    return values(place) if values is not None else None


def _data(place: _Place) -> list[str]:
    kinds: dict[type, bool] = {}  # there are many variables and few types
    for value in place.names.values():
        if type(value) not in kinds:
            kinds[type(value)] = is_data(value)
    return sorted(name for name, value in place.names.items() if kinds[type(value)])


def _rows(place: _Place) -> list[str]:
    """Return what a cluster can be fed: with --detach the functions that read rows."""
    return _functions(place) if {"--detach", "--detach-on-executor"} & {*place.words} else _data(place)


def _detached(_: _Place) -> list[str]:
    return sorted({place.name for place in tfos_nb.clusters()})


def _clusters(place: _Place) -> list[str]:
    return sorted(clusters_of(place.names))


def _nodes(place: _Place) -> list[str]:
    clusters = clusters_of(place.names)
    running = [cluster for cluster in clusters.values() if not cluster.snapshot().status.ended]
    nodes = [str(node) for cluster in running or clusters.values() for node in cluster.plan.nodes]
    return list(dict.fromkeys(nodes))


def _functions(place: _Place) -> list[str]:
    functions = (types.FunctionType, functools.partial)
    known = [name for name, value in place.names.items() if isinstance(value, functions)]
    return sorted({*known, *_FUNCTION.findall(place.cell)})


def _variables(place: _Place) -> list[str]:
    others = {*_data(place), *_clusters(place)}
    return sorted(
        name for name, value in place.names.items() if name not in others and not isinstance(value, _NO_VARIABLES)
    )


def _modes(_: _Place) -> list[str]:
    return [mode.value for mode in InputMode]


_VALUES: dict[str, Callable[[_Place], list[str]]] = {
    "data": _rows,
    "validation": _rows,
    "df": _data,
    "cluster": _clusters,
    "detached": _detached,
    "node": _nodes,
    "fn": _functions,
    "args": _variables,
    "input_mode": _modes,
}
"""Functions that return the possible values of an argument, by the argument's name in the parser."""


def _matcher(completer: LineCompleter) -> Any:
    def match(context: CompletionContext) -> SimpleMatcherResult:
        offered, fragment = completer.offers(context)
        return SimpleMatcherResult(
            completions=[SimpleCompletion(text=word, type="param") for word in offered],
            suppress=True,
            do_not_suppress=set(),
            ordered=True,
            matched_fragment=fragment,
        )

    mark: Any = context_matcher(identifier=_IDENTIFIER, priority=_FIRST)
    return mark(match)


def install(shell: InteractiveShell) -> None:
    """Add the completion of the magics' lines to a shell."""
    if shell.Completer is not None:
        remove(shell)
        shell.Completer.custom_matchers.append(_matcher(LineCompleter(shell)))


def remove(shell: InteractiveShell) -> None:
    """Remove the completion from a shell."""
    if shell.Completer is not None:
        matchers = shell.Completer.custom_matchers
        matchers[:] = [matcher for matcher in matchers if getattr(matcher, "matcher_identifier", "") != _IDENTIFIER]
