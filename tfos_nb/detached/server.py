"""Server of a detached cluster's process: it answers the calls of this user's kernels."""

from __future__ import annotations

import logging
import os
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from tfos_nb.detached.messages import Answer, AnswerWanted, Call, CallBegun, Raised, check_peer, raised
from tfos_nb.errors import PlanError
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.processes import read_frame, write_frame
from tfos_nb.state.cluster_state import ClusterStatus

__all__ = ["CallDesk", "CallServer", "StopRequests"]

logger = logging.getLogger(__name__)

_AT_ONCE = 1.0  # seconds within which the requests of two pages count as one
_NOT_BY_DOOR = ("train",)  # they take functions: nobody may run code here by a port
_ANSWERS_KEPT = 50  # that a kernel has got: it asks again if one was lost on its way
_CALLS_KEPT = 1000  # whose answers nobody has fetched, as after an interrupt


class StopRequests:
    """Requests to stop, of several kernels and pages.

    The second request to a cluster ends it at once. So the first request of a kernel must not count as a second one,
    although another has asked already; nor must a second page's that comes at the same moment.

    Parameters
    ----------
    cluster : Cluster
        The cluster.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._asked: dict[str, float] = {}
        self._stops = False  # the status says so a moment later

    def ask(self, client: str) -> str:
        """Ask for a stop; return what happens now. All pages are the client ``""``."""
        with self._lock:
            last, now = self._asked.get(client), time.monotonic()
            self._asked[client] = now
            is_new = last is None or (not client and now - last < _AT_ONCE)
            state = self._cluster.snapshot()
            if is_new and (self._stops or state.status is ClusterStatus.STOPPING) and not state.status.ended:
                return f"{state.name} is stopping already; ask again to end it at once"
            self._stops = True
            return str(self._cluster.request_stop())


class _Handler(socketserver.StreamRequestHandler):
    """One connection: a call and its answer."""

    server: CallServer

    def handle(self) -> None:
        check_peer(self.connection)
        call = read_frame(self.rfile)
        if not isinstance(call, Call):
            return
        answer = self.server.answer(call)
        try:
            write_frame(self.wfile, answer)
        except wire.NotData as error:
            write_frame(self.wfile, raised(error))


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
    request_queue_size = 128  # kernels that wait for an answer do not count

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


class CallDesk:
    """Answer calls that come through a door, whose thread must not wait: each is made in a thread of its own.

    Parameters
    ----------
    server : CallServer
        Makes the calls.
    """

    def __init__(self, server: CallServer) -> None:
        self._server = server
        self._made: dict[str, Future[Answer | Raised]] = {}  # by key; used by the door's thread alone
        self._given: dict[str, None] = {}  # keys of calls whose answers were fetched, in that order

    def asked(self, message: Any) -> Any:
        """Begin a call, or return the answer to an earlier one."""
        if isinstance(message, Call):
            return self._begin(message)
        if not isinstance(message, AnswerWanted) or message.key not in self._made:
            return Raised("ValueError", "no such call is known")
        made = self._made[message.key]
        if not made.done():
            return CallBegun(message.key)
        self._given[message.key] = None
        return made.result(0)

    def _begin(self, call: Call) -> Any:
        if call.method in _NOT_BY_DOOR:
            return raised(
                PlanError(
                    f"{call.method}: a cluster whose process is on an executor takes its rows with its launch: "
                    "launch(…, detach='executor', data=rows)"
                )
            )
        if call.key not in self._made:
            self._made[call.key] = made = Future[Answer | Raised]()
            self._drop_old()
            threading.Thread(target=self._make, args=(call, made), name="tfos_nb call", daemon=True).start()
        return CallBegun(call.key)

    def _drop_old(self) -> None:
        ended = [key for key, future in self._made.items() if future.done() and key not in self._given]
        for key in [*list(self._given)[:-_ANSWERS_KEPT], *ended[:-_CALLS_KEPT]]:
            del self._made[key]
            self._given.pop(key, None)

    def _make(self, call: Call, made: Future[Answer | Raised]) -> None:
        answer = self._server.answer(call)
        try:
            wire.encode(answer)
        except wire.NotData as error:
            answer = raised(error)
        made.set_result(answer)

    def arrived(self, link: Any, message: Any) -> None:
        """End a stream: kernels only ask."""
        link.end()

    def received(self, link: Any, message: Any) -> None:
        """Do nothing."""

    def left(self, link: Any) -> None:
        """Do nothing."""

    def ticked(self, late: float) -> None:
        """Do nothing."""
