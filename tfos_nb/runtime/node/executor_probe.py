"""One look from an executor: its Python, what that lacks, and whether it reaches the driver.

A task of its own, not a node: ``%tfos_doctor`` sends it.
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
"""What the driver's port says to whoever connects."""

PROBE_SECONDS = 20.0
"""How long the executors' look may take; a Python worker may have to be started for it."""

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Probe:
    """Looks for modules and connects to the driver.

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
        """Give one row."""
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
        """Say why the driver cannot be reached; nothing if it can."""
        try:
            with socket.create_connection((self.host, self.port), _CONNECT_SECONDS) as connection:
                heard = connection.recv(len(GREETING), socket.MSG_WAITALL)
        except OSError as error:
            return str(error) or type(error).__name__
        return "" if heard == GREETING else "something else answers there"
