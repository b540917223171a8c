"""``reservation``: the rendezvous of TensorFlowOnSpark. Here the driver's door replaces it; only the names are kept.

TensorFlowOnSpark's server took pickles from any client. The door takes messages over TLS, with a token. Programs do not
need to connect to it: stop a cluster with ``cluster.native.stop()``, and end a feed with ``DataFeed.terminate()``.
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
    """Record of the nodes that have registered.

    Parameters
    ----------
    required : int
        Number of expected nodes.
    """

    def __init__(self, required: int) -> None:
        self.required = required
        self._lock = threading.Lock()
        self._found: list[Any] = []

    def add(self, meta: Any) -> None:
        """Record a node."""
        with self._lock:
            self._found.append(meta)

    def done(self) -> bool:
        """Return whether all nodes have registered."""
        with self._lock:
            return len(self._found) >= self.required

    def get(self) -> list[Any]:
        """Return the nodes that have registered."""
        with self._lock:
            return list(self._found)

    def remaining(self) -> int:
        """Return the number of missing nodes."""
        with self._lock:
            return self.required - len(self._found)


class Server:
    """Class that raises PlanError, because TensorFlowOnSpark's server is an unprotected port."""

    def __init__(self, count: int) -> None:
        _refuse("Server")


class Client:
    """Class that raises PlanError, because TensorFlowOnSpark's client connects to an unprotected port."""

    def __init__(self, server_addr: Any) -> None:
        _refuse("Client")


def _refuse(name: str) -> NoReturn:
    raise PlanError(
        f"reservation.{name} used pickle on an open port, and has no counterpart here, where a cluster's port is "
        "protected. "
        "To stop a cluster: cluster.native.stop(); to end its feed: DataFeed.terminate() in the program"
    )
