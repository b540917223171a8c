"""``reservation``: the rendezvous of TensorFlowOnSpark. Here it is the driver's door; the names are kept.

Its server took pickles from whoever connected. The door takes messages under TLS and a token, and a program has no need
to speak with it: a cluster is stopped by ``cluster.native.stop()``, and a feed ended by ``DataFeed.terminate()``.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from tfos_nb.errors import PlanError

__all__ = ["BUFSIZE", "MAX_RETRIES", "TFOS_SERVER_HOST", "TFOS_SERVER_PORT", "Client", "Reservations", "Server"]

TFOS_SERVER_HOST = "TFOS_SERVER_HOST"
TFOS_SERVER_PORT = "TFOS_SERVER_PORT"
BUFSIZE = 1024
MAX_RETRIES = 3


class Reservations:
    """Who has come, of so many.

    Parameters
    ----------
    required : int
        How many are to come.
    """

    def __init__(self, required: int) -> None:
        self.required = required
        self._lock = threading.Lock()
        self._found: list[Any] = []

    def add(self, meta: Any) -> None:
        """Note one."""
        with self._lock:
            self._found.append(meta)

    def done(self) -> bool:
        """Whether all have come."""
        with self._lock:
            return len(self._found) >= self.required

    def get(self) -> list[Any]:
        """Return those that have come."""
        with self._lock:
            return list(self._found)

    def remaining(self) -> int:
        """Return how many are missing."""
        with self._lock:
            return self.required - len(self._found)


class Server:
    """Refuses to open an unprotected port."""

    def __init__(self, count: int) -> None:
        _refuse("Server")


class Client:
    """Refuses to connect to an unprotected port."""

    def __init__(self, server_addr: Any) -> None:
        _refuse("Client")


def _refuse(name: str) -> NoReturn:
    raise PlanError(
        f"reservation.{name} spoke pickle on an open port, and has no counterpart: a cluster's port is protected. "
        "To stop a cluster: cluster.native.stop(); to end its feed: DataFeed.terminate() in the program"
    )
