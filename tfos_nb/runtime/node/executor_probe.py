"""Check an executor: its Python, its missing modules, and whether it reaches the driver.

The check runs in a separate Spark task, not in a node. ``%tfos_doctor`` runs it.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

__all__ = ["GREETING", "PROBE_SCHEMA", "PROBE_SECONDS", "Probe"]

PROBE_SCHEMA = "python string, version string, missing string, unreachable string"

GREETING = b"tfos_nb"
"""Bytes that the driver's port sends to each client."""

PROBE_SECONDS = 20.0
"""Time limit of the check; a Python worker may have to be started for it."""

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Probe:
    """Task that looks for modules and connects to the driver.

    Parameters
    ----------
    host, port : str, int
        Where the driver listens.
    modules : tuple of str
        What a node needs.
    """

    host: str
    port: int
    modules: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row with the columns of ``PROBE_SCHEMA``."""
        for _ in batches:
            pass
        row = {
            "python": sys.executable,
            "version": f"{sys.version_info.major}.{sys.version_info.minor}",
            "missing": " ".join(name for name in self.modules if importlib.util.find_spec(name) is None),
            "unreachable": self.unreachable(),
        }
        yield pa.RecordBatch.from_pydict({name: pa.array([value], pa.string()) for name, value in row.items()})

    def unreachable(self) -> str:
        """Return why the driver cannot be reached; empty if it can."""
        try:
            with socket.create_connection((self.host, self.port), _CONNECT_SECONDS) as connection:
                heard = connection.recv(len(GREETING), socket.MSG_WAITALL)
        except OSError as error:
            return str(error) or type(error).__name__
        return "" if heard == GREETING else "another program answers there"
