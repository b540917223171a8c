"""``TFManager``: the class of a program's ``ctx.mgr``, under TensorFlowOnSpark's name."""  # noqa: N999 - its name

from __future__ import annotations

import logging
from typing import Any, NoReturn

from tfos_nb.errors import PlanError

__all__ = ["NodeManager", "TFManager", "connect", "start"]

logger = logging.getLogger(__name__)


class NodeManager:
    """``ctx.mgr``: the node's queues and a few values, all in the node's own process.

    Parameters
    ----------
    native : tfos_nb.runtime.program.context.NodeContext
        This package's own ``ctx`` of the node.
    """

    def __init__(self, native: Any) -> None:
        self.native = native
        self._values: dict[str, Any] = {"state": "running"}

    def get(self, key: str) -> Any:
        """Return the value of a key, or None. The value of ``"state"`` is running, terminating or stopped."""
        if key == "state" and self._values["state"] == "running" and self.native.should_stop:
            return "stopped"
        return self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        """Store a value, only for this node."""
        self._values[key] = value

    def get_queue(self, name: str) -> _Rows | _Results | _Errors | None:
        """Return the queue of that name, which gives or takes one item at a time; None if there is none."""
        if name == "output":
            return _Results(self.native)
        if name == "error":
            return _Errors()
        return _Rows(self.native, name) if name in self.native.queue_names else None


class _Rows:
    """Queue of rows, one by one. It is slow: :class:`tfos_nb.compat.TFNode.DataFeed` takes many at a time."""

    def __init__(self, native: Any, name: str) -> None:
        self._feed = native.get_data_feed(True, name)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next row; None at the end."""
        rows = self._feed.next_batch(1)
        return rows[0] if rows else None

    def task_done(self) -> None:
        """Do nothing: a row is done when it has been taken."""

    join = task_done


class _Results:
    """Queue of results, one by one."""

    def __init__(self, native: Any) -> None:
        self._feed = native.get_data_feed(False)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Send the result of the next row."""
        self._feed.batch_results([item])


class _Errors:
    """Queue of a program's errors, which are written to the node's log."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Log a traceback."""
        logger.error("%s", item)


class TFManager:
    """Empty class, kept for programs that use its name."""


def start(authkey: bytes, queues: Any, mode: str = "local") -> NoReturn:
    """Raise PlanError: a node needs no manager process."""
    _refuse()


def connect(address: Any, authkey: bytes) -> NoReturn:
    """Raise PlanError: a node's queues are in its own process."""
    _refuse()


def _refuse() -> NoReturn:
    raise PlanError(
        "tfos_nb has no manager process and no port of one: use a program's queues, ctx.mgr or ctx.get_data_feed()"
    )
