"""Short task before a cluster: start to warm its host, or check whether it is warm.

It holds its slot only while it starts a process, and imports the modules of feeding tasks into Spark's Python worker.
The started process (:mod:`tfos_nb.runtime.node.warm_process`) does its own imports outside Spark.
"""

from __future__ import annotations

import importlib
import socket
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from tfos_nb.runtime.node.process import environment_to_warm
from tfos_nb.runtime.node.spark_task import executor_process
from tfos_nb.runtime.node.warm_process import ServerTerms, WarmProcess, can_fork, state_on_this_host

__all__ = ["WARMTH_SCHEMA", "WarmTask"]

WARMTH_SCHEMA = "host string, state string"
"""Columns of a task's answer: its host, and ``cold``, ``importing``, ``warm``, or why it cannot be warmed."""


@dataclass(frozen=True)
class WarmTask:
    """Task that starts to warm its host if it is cold, or only checks its state.

    Parameters
    ----------
    token : str
        The application's token.
    idle : float
        Seconds after which an unused process ends; 0 only checks the state.
    env : mapping of str to str
        Environment variables of every node.
    """

    token: str = field(repr=False)
    idle: float
    env: Mapping[str, str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row with the columns of ``WARMTH_SCHEMA``."""
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
        env = environment_to_warm(self.env)
        state = state_on_this_host(env, self.token)
        if state != "cold" or not self.idle:
            return state
        WarmProcess.of_the_application(env, ServerTerms(self.token, executor_process(), self.idle)).close()
        return state_on_this_host(env, self.token)


def _import_for_feeding() -> None:
    """Import the module that feeds rows. Spark's Python worker keeps it for later tasks."""
    importlib.import_module("tfos_nb.runtime.feed.feed_task")
