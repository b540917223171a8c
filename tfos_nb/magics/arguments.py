"""Parse the lines of all magics: split words, report errors in one line, and look up the user's variables.

A parser never prints and never exits: a line with an error raises :class:`~tfos_nb.errors.PlanError`.
"""

from __future__ import annotations

import argparse
import builtins
import keyword
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from tfos_nb.errors import PlanError, nearest, with_article

__all__ = [
    "LineParser",
    "assignment",
    "check_identifier",
    "find_data",
    "find_reader",
    "find_variable",
    "is_data",
    "seconds",
    "split_line",
    "whole",
]

_HELP = ("-h", "--help", "-help", "-?")


class LineParser(argparse.ArgumentParser):
    """Argument parser for one magic. It raises an error where argparse would print and exit.

    Parameters
    ----------
    magic : str
        The magic as the user writes it: ``"%tfos_stop"``.
    usage : str
        The arguments after it: ``"[NAME] [--now]"``.
    description : str
        Description of the magic.
    """

    def __init__(self, magic: str, usage: str, description: str) -> None:
        self.magic = magic
        self.line = f"{magic} {usage}".strip()
        super().__init__(
            prog=magic,
            usage=self.line.replace("%", "%%"),  # argparse writes %% as %
            description=description,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=100),
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )

    def understand(self, line: str) -> argparse.Namespace:
        """Parse a line and return its arguments.

        Raises
        ------
        PlanError
            If the line is not valid. The message is one line.
        """
        words = split_line(line)
        self._refuse_strange(words)
        try:
            found, rest = self.parse_known_intermixed_args(words)
        except argparse.ArgumentError as error:
            raise PlanError(_say(error)) from None
        if rest:
            raise PlanError(self._say_unknown(rest, found))
        return found

    def require(self, found: argparse.Namespace, name: str, metavar: str) -> str:
        """Return an argument that the line must have; raise PlanError if it is missing."""
        value = getattr(found, name)
        if value is None:
            raise PlanError(f"{self.magic}: {metavar} is missing; write {self.line}")
        return str(value)

    def document(self) -> str:
        """Return the text that the magic's ``?`` shows."""
        return self.format_help()

    def options(self) -> dict[str, argparse.Action]:
        """Return all options, by the names that they have on the line."""
        return {option: action for action in self._actions for option in action.option_strings}

    def arguments(self) -> list[argparse.Action]:
        """Return all arguments, positional ones and options, in the order of the help."""
        return list(self._actions)

    def error(self, message: str) -> NoReturn:
        """Raise a PlanError with the message that argparse would print."""
        raise PlanError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raise a PlanError where argparse would end the process."""
        raise PlanError(message or f"the line ended with {status}")

    def _refuse_strange(self, words: list[str]) -> None:
        """Refuse words that would be mistaken for a NAME: comments, and options that begin with an en or em dash."""
        for word in words:
            if word.startswith("#"):
                raise PlanError(f"{word}: a magic's line cannot have a comment; write it below")
            if word.startswith(("\N{EN DASH}", "\N{EM DASH}")):
                option = "--" + word.lstrip("-\N{EN DASH}\N{EM DASH}").partition("=")[0]
                raise PlanError(f"{word}: options begin with --{nearest(option, self.options())}")

    def _say_unknown(self, rest: list[str], found: argparse.Namespace) -> str:
        for word in rest:
            if word.startswith("-"):
                option = word.partition("=")[0]
                if option in _HELP:
                    return f"{option}: no such option; {self.magic}? shows them all"
                return f"{option}: no such option{nearest('--' + option.lstrip('-'), self.options())}"
        name = getattr(found, "variable", None)
        if name is None:
            return f"{rest[0]}: {self.magic} does not take this argument; write {self.line}"
        return f"{rest[0]}: the line has a NAME already ({name}); options begin with --"


def _say(error: argparse.ArgumentError) -> str:
    """Return our message for an error of argparse: the option, what was given, and what it accepts."""
    option = error.argument_name or ""
    message = error.message or "it cannot be understood"
    if message.startswith("expected"):
        return f"{option}: a value is missing"
    if message.startswith("ignored explicit argument"):
        return f"{option}: it takes no value"
    if message.startswith("not allowed with argument "):
        return f"{option}: not together with {message.split()[-1]}; leave one of them out"
    return f"{option} {message}"


def split_line(line: str) -> list[str]:
    """Split a line into words, with the quoting rules of a shell."""
    try:
        return shlex.split(line)
    except ValueError:
        raise PlanError("the line has an opening quote or backslash without its end: add the end") from None


def whole(text: str) -> int:
    """Convert text to a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number") from None


def seconds(text: str) -> float:
    """Convert text to a number of seconds, more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds, more than 0")
    return value


def assignment(text: str) -> tuple[str, str]:
    """Split KEY=VALUE into the key and the value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text}: must be KEY=VALUE")
    return key, value


def check_identifier(name: str, metavar: str = "NAME") -> None:
    """Refuse a name that is not a valid variable name, or would hide one of Python's built-in names."""
    if not name.isidentifier() or keyword.iskeyword(name):
        better = "".join(char if char.isalnum() else "_" for char in name)
        hint = f"; {better} is one" if better.isidentifier() and not keyword.iskeyword(better) else ""
        raise PlanError(f"{name}: {metavar} must be a valid variable name{hint}")
    if hasattr(builtins, name):
        raise PlanError(f"{name}: {metavar} would hide Python's own {name}; use another name")


def is_data(value: object) -> bool:
    """Return whether a value can be fed: a DataFrame (classic or Connect), an RDD, or a stream. Imports no Spark."""
    # check the type, because an instance of Spark's Column has an attribute of any name
    kind = type(value)
    return kind is not type and any(hasattr(kind, method) for method in ("mapInArrow", "mapPartitions", "foreachBatch"))


def find_variable(option: str, name: str, namespace: Mapping[str, Any], known: Iterable[str] | None = None) -> Any:
    """Return the value of a user's variable.

    Raises
    ------
    PlanError
        If no variable has that name. The message may suggest one of ``known``, by default all the user's variables.
    """
    if name not in namespace:
        own = (other for other, value in namespace.items() if not (other.startswith("_") or callable(value)))
        names = own if known is None else known  # IPython adds open, exit and quit to the user's names
        raise PlanError(f"{option} {name}: no such variable{nearest(name, names)}")
    return namespace[name]


def find_reader(name: str, namespace: Mapping[str, Any], option: str = "--data") -> Any:
    """Return the function that reads a detached cluster's rows; raise PlanError for rows of this kernel."""
    value = find_variable(option, name, namespace, [])
    if callable(value) and not is_data(value):
        return value
    raise PlanError(
        f"{option} {name}: with --detach a function that reads the rows, such as def {name}(spark): return "
        f"spark.read.parquet(path), since a {type(value).__name__} of this kernel's Spark does not outlive the kernel"
    )


def find_data(name: str, namespace: Mapping[str, Any], option: str = "--data") -> Any:
    """Return the DataFrame, RDD or stream that a line names; raise PlanError for any other value."""
    sources = [other for other, value in namespace.items() if is_data(value) and not other.startswith("_")]
    value = find_variable(option, name, namespace, sources)
    if is_data(value):
        return value
    kind = type(value)
    if kind.__module__.startswith("pandas") and kind.__name__ == "DataFrame":
        raise PlanError(f"{option} {name}: a pandas DataFrame; spark.createDataFrame({name}) makes one of Spark's")
    raise PlanError(f"{option} {name}: must be a Spark DataFrame or RDD, got {with_article(kind.__name__)}")
