"""Every exception of tfos_nb.

::

    TfosError
    ├── PlanError(ValueError)              what is asked for cannot be; nothing of it was started
    ├── RendezvousTimeout(TimeoutError)    some nodes never came to the rendezvous; they are named
    ├── NodeFailed(RuntimeError)           main raised, or its process died, on a node
    ├── FeedFailed(RuntimeError)           a row could not be read from Spark or could not be fed
    ├── FeedTimeout(TimeoutError)          TensorFlow took no row for too long
    └── ClusterClosed(RuntimeError)        used after it was closed or stopped

This module imports nothing but Python's own, so that every other one may import it.
"""

from __future__ import annotations

import sys

__all__ = [
    "ClusterClosed",
    "FeedFailed",
    "FeedTimeout",
    "NodeFailed",
    "PlanError",
    "RendezvousTimeout",
    "TfosError",
]


SPARK_ENDED = "Spark has ended"
"""How the message begins of a cluster that ended since its Spark did: nothing can be run again in that session."""


class TfosError(Exception):
    """Base of every error that tfos_nb raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Show the message alone in IPython, what happened in red: the frames in between are ours, not the user's."""
        first, *rest = f"{type(self).__name__}: {self}".splitlines()
        return [f"\x1b[31m{first}\x1b[39m" if _has_colors() else first, *rest]


def _has_colors() -> bool:
    """Whether there is a shell that shows tracebacks in colors."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and str(shell.colors).casefold() != "nocolor"


class PlanError(TfosError, ValueError):
    """What is asked for cannot be. Nothing was started; a cluster that runs has done nothing of it."""


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
        How many more nodes failed after this one, because of it or like it.
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

    def counting(self, others: int) -> NodeFailed:
        """Return the same error that tells how many nodes failed after it."""
        self.others = others
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
    """A row could not be read from Spark, or has no place in a tensor."""


class FeedTimeout(TfosError, TimeoutError):
    """For longer than ``feed_timeout`` no row was taken while rows were waiting, and no node did anything else."""


class ClusterClosed(TfosError, RuntimeError):
    """The cluster is closed, stopped or ended: it takes no more calls."""
