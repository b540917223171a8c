"""All exceptions of tfos_nb.

::

    TfosError
    ├── PlanError(ValueError)              the request is not possible; nothing was started
    ├── RendezvousTimeout(TimeoutError)    some nodes never came to the rendezvous; they are named
    ├── NodeFailed(RuntimeError)           main raised, or its process died, on a node
    ├── FeedFailed(RuntimeError)           a row could not be read from Spark or could not be fed
    ├── FeedTimeout(TimeoutError)          TensorFlow took no row for too long
    ├── ClusterClosed(RuntimeError)        the cluster was used after it was closed or stopped
    └── MissingPackage(ImportError)        a call needs a package that is not installed here

This module imports only Python's standard library, so that every other module may import it.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

__all__ = [
    "ClusterClosed",
    "FeedFailed",
    "FeedTimeout",
    "MissingPackage",
    "NodeFailed",
    "PlanError",
    "RendezvousTimeout",
    "TfosError",
]


SPARK_ENDED = "Spark has ended"
"""Start of the message of a cluster that ended because Spark ended: that session can run nothing again."""


class TfosError(Exception):
    """Base of every error that tfos_nb raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Show only the message in IPython, its summary in red: the frames of the traceback are not the user's."""
        first, *rest = f"{type(self).__name__}: {self}".splitlines()
        return [f"\x1b[31m{first}\x1b[39m" if _has_colors() else first, *rest]


def current_shell(modules: Mapping[str, ModuleType] | None = None) -> Any:
    """Return IPython's shell; None if there is none. IPython is not imported for this."""
    ipython = (sys.modules if modules is None else modules).get("IPython")
    get_ipython = getattr(ipython, "get_ipython", None)
    return get_ipython() if callable(get_ipython) else None


def _has_colors() -> bool:
    """Whether an IPython shell shows tracebacks in colors."""
    shell = current_shell()
    return shell is not None and str(shell.colors).casefold() != "nocolor"


class PlanError(TfosError, ValueError):
    """The request is not possible. Nothing was started, and a running cluster was not changed."""


class RendezvousTimeout(TfosError, TimeoutError):
    """Some nodes never reserved.

    Attributes
    ----------
    missing : tuple of str
        The nodes that never came, as ``"worker:1"``.
    """

    def __init__(self, message: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class NodeFailed(TfosError, RuntimeError):
    """A node's ``main`` raised, or its process died.

    Attributes
    ----------
    node : str
        The node, as ``"worker:1"``.
    host : str
        The host that it ran on.
    executor : str
        Spark's name of the executor that it ran on.
    exit_code : int or None
        The exit code of the process, if it ended by itself.
    signal : str or None
        The signal that ended it, as ``"SIGKILL"``.
    remote_traceback : str
        The traceback on the node; empty if the process died without one.
    others : int
        How many more nodes failed after this one, because of it or for the same reason.
    """

    def __init__(
        self,
        cause: str,
        *,
        node: str,
        host: str = "",
        executor: str = "",
        exit_code: int | None = None,
        signal: str | None = None,
        remote_traceback: str = "",
        log_tail: str = "",
        others: int = 0,
    ) -> None:
        self.cause = cause
        self.node = node
        self.host = host
        self.executor = executor
        self.exit_code = exit_code
        self.signal = signal
        self.remote_traceback = remote_traceback
        self.log_tail = log_tail
        self.others = others
        super().__init__(self._text())

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how it is made again, for pickle and copy: other arguments than Exception's are keywords here."""
        return functools.partial(type(self), self.cause, **self.details), ()

    @property
    def details(self) -> dict[str, Any]:
        """The arguments besides the cause that make the same error."""
        names = ("node", "host", "executor", "exit_code", "signal", "remote_traceback", "log_tail", "others")
        return {name: getattr(self, name) for name in names}

    def counting(self, others: int) -> NodeFailed:
        """Return the same error with the number of nodes that failed after it."""
        self.others = others
        self.args = (self._text(),)
        return self

    def because(self, reason: str) -> NodeFailed:
        """Return the same error with what the cluster manager says of the node's executor."""
        if reason not in self.cause:
            self.cause = f"{self.cause}. {reason}"
            self.args = (self._text(),)
        return self

    def _text(self) -> str:
        where = f" on {self.host}" if self.host else ""
        where += f" (executor {self.executor})" if self.executor else ""
        lines = [f"{self.node}{where}: {self.cause}"]
        if self.others:
            lines[0] += f" ({self.others} more failed after it)"
        if self.remote_traceback:
            lines.append(self.remote_traceback.rstrip())
        elif self.log_tail:
            lines.append(f"The last lines that {self.node} wrote:")
            lines.append(self.log_tail.rstrip())
        return "\n".join(lines)


class FeedFailed(TfosError, RuntimeError):
    """A row could not be read from Spark, or cannot become a tensor."""


class FeedTimeout(TfosError, TimeoutError):
    """For longer than ``feed_timeout``, no node took a waiting row, computed, reported or saved."""


class ClusterClosed(TfosError, RuntimeError):
    """The cluster is closed, stopped or ended: it takes no more calls."""


class MissingPackage(TfosError, ImportError):
    """A call needs an optional package that is not installed in this Python."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``"1 node"``, ``"2 nodes"``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def with_article(noun: str) -> str:
    """Return a noun, such as the name of a type, with its article: ``"a list"``, ``"an int"``, ``"an RDD"``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' or noun in ('RDD', 'RLock') else 'a'} {noun}"


def either(names: Sequence[str]) -> str:
    """Return quoted names as a choice.

    Examples
    --------
    >>> either(["fail", "skip", "fill"])
    "'fail', 'skip' or 'fill'"
    """
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last


def near(name: object, names: Iterable[str]) -> str:
    """Return the hint of an error to the most similar name, ``"; did you mean 'NAME'?"``; empty if none is similar.

    Examples
    --------
    >>> near("lable", ["label", "pixels"])
    "; did you mean 'label'?"
    """
    found = difflib.get_close_matches(str(name), list(names), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def absent_column(what: str, name: object, columns: Sequence[str]) -> PlanError:
    """Return the error to raise where an argument names a column that a DataFrame does not have.

    Examples
    --------
    >>> print(absent_column("keep", "lable", ["label", "pixels"]))
    keep: no column 'lable'; did you mean 'label'?; there are label, pixels
    """
    return PlanError(f"{what}: no column {name!r}{near(name, columns)}; there are {', '.join(columns)}")


def check_count(field: str, value: object, least: int) -> None:
    """Raise PlanError if a value is not a whole number, or is less than ``least``."""
    if type(value) is not int or value < least:
        raise PlanError(f"{field} must be a whole number, {least} or more, got {value!r}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint like that of :func:`near` for a word that a user has typed: in any case, and without quotes.

    Examples
    --------
    >>> nearest("Train_fd", ["train_df", "test_df"])
    '; did you mean train_df?'
    """
    by_small_letters = {name.casefold(): name for name in sorted(known)}
    close = difflib.get_close_matches(word.casefold(), by_small_letters, n=1, cutoff=0.6)
    return f"; did you mean {by_small_letters[close[0]]}?" if close else ""
