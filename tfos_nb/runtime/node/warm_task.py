"""What a short task does for the cluster to come: it begins to warm its host, or looks how far that is.

It holds its slot for as long as it takes to start a process, and to import in Spark's Python worker what a task that
feeds needs; what the process imports (:mod:`tfos_nb.runtime.node.warm_process`), it imports beside Spark.
"""

from __future__ import annotations

import importlib
import socket
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from tfos_nb.runtime.control.processes import path_variable
from tfos_nb.runtime.node.process import environment_of
from tfos_nb.runtime.node.spark_task import executor_process
from tfos_nb.runtime.node.warm_process import ServerTerms, WarmProcess, can_fork, state_on_this_host

__all__ = ["WARMTH_SCHEMA", "WarmTask"]

WARMTH_SCHEMA = "host string, state string"
"""What a task gives: its host, and ``cold``, ``importing``, ``warm``, or why it cannot be."""


@dataclass(frozen=True)
class WarmTask:
    """Begins to warm the host that it runs on, if it is cold; or only looks.

    Parameters
    ----------
    token : str
        The application's.
    idle : float
        Seconds after which a process that nobody has used ends; 0 to look alone.
    env : mapping of str to str
        What every node gets in its environment.
    """

    token: str = field(repr=False)
    idle: float
    env: Mapping[str, str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Give one row."""
        deque(batches, maxlen=0)
        try:
            state = self._warmed()
            if self.idle:
                _import_for_feeding()
        except OSError as error:
            state = f"{type(error).__name__}: {error}"
        row = {"host": socket.gethostname(), "state": state}
        yield pa.RecordBatch.from_pydict({name: pa.array([value], pa.string()) for name, value in row.items()})

    def _warmed(self) -> str:
        if not can_fork():
            return "cannot be warmed: this system does not tell of the end of another's process"
        env = {**environment_of(tempfile.gettempdir(), self.env), "PYTHONPATH": path_variable()}
        state = state_on_this_host(env, self.token)
        if state != "cold" or not self.idle:
            return state
        WarmProcess.of_the_application(env, ServerTerms(self.token, executor_process(), self.idle)).close()
        return state_on_this_host(env, self.token)


def _import_for_feeding() -> None:
    """Import what feeds rows, which Spark's worker keeps for the tasks to come."""
    importlib.import_module("tfos_nb.runtime.feed.feed_task")
