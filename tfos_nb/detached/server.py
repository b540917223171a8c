"""Server of a detached cluster's process: it answers the calls of this user's kernels."""

from __future__ import annotations

import logging
import os
import socketserver
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tfos_nb.detached.messages import Answer, Call, Raised, check_peer, raised
from tfos_nb.runtime.control.processes import read_frame, write_frame

__all__ = ["CallServer", "StopRequests"]

logger = logging.getLogger(__name__)


class StopRequests:
    """Requests to stop, of several kernels.

    The second request of one kernel ends the cluster at once. So a kernel that asks for the first time, while another
    has asked already, must not count as a second request.

    Parameters
    ----------
    request_stop : callable
        The cluster's.
    """

    def __init__(self, request_stop: Callable[[], str]) -> None:
        self._request_stop = request_stop
        self._lock = threading.Lock()
        self._clients: set[str] = set()
        self._said = ""

    def ask(self, client: str) -> str:
        """Ask for a stop; return what happens now."""
        with self._lock:
            first, is_new = not self._clients, client not in self._clients
            self._clients.add(client)
            if first or not is_new:
                self._said = self._request_stop()
            return self._said


class _Handler(socketserver.StreamRequestHandler):
    """One connection: a call and its answer."""

    server: CallServer

    def handle(self) -> None:
        check_peer(self.connection)
        call = read_frame(self.rfile)
        if isinstance(call, Call):
            write_frame(self.wfile, self.server.answer(call))


class CallServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answer calls on a unix socket, each in a thread of its own.

    Parameters
    ----------
    path : str
        The socket's path, in a directory that only this user can enter.
    methods : mapping of str to callable
        The methods by name. They take the call's arguments by name.
    stop : StopRequests
        Gets the calls of ``request_stop``.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: str, methods: Mapping[str, Callable[..., Any]], stop: StopRequests) -> None:
        self._methods, self._stop = methods, stop
        super().__init__(path, _Handler)
        os.chmod(path, 0o600)

    def start(self) -> None:
        """Answer from now on, in a daemon thread."""
        threading.Thread(target=self.serve_forever, name="tfos_nb calls", daemon=True).start()

    def answer(self, call: Call) -> Answer | Raised:
        """Make a call; return its answer."""
        try:
            if call.method == "request_stop":
                return Answer(self._stop.ask(call.client))
            return Answer(self._methods[call.method](**call.arguments))
        except Exception as error:  # noqa: BLE001 - the kernel raises it
            return raised(error)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a connection: a kernel that has gone while it waited is none."""
        logger.debug("a call could not be answered", exc_info=True)
