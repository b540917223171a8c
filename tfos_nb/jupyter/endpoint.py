"""Web server in the kernel, which answers a page's requests for a cluster's Stop, log, curves, stacks and TensorBoard.

::

    page ──▶ Jupyter server (tfos_nb.serverext, behind its login) ── unix socket, 0600 ──▶ Endpoint
                                                                              stop, log, curves, stacks ──▶ the cluster
                                                              tb, while it runs ── tunnel ──▶ the chief's TensorBoard
                                                              tb, when it has ended ──▶ one beside the kernel

If no Jupyter server with this extension exists, :meth:`Endpoint.open_port` opens a loopback port for TensorBoard only.
A client of that port exchanges the code of its link for a pass, which is then part of the address. A cookie would not
work, because browsers do not send it for a frame in a page of another site.

The server runs in its own thread, so it answers while a cell blocks the kernel. The Jupyter server and this server both
remove a page's cookies and tokens: only the few headers that TensorBoard needs are passed on. Bodies are passed on in
pieces and never collected in memory.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from tfos_nb.errors import ClusterClosed, TfosError
from tfos_nb.jupyter import connection
from tfos_nb.jupyter.access_links import AccessLinks
from tfos_nb.jupyter.connection import Place
from tfos_nb.jupyter.message_page import page
from tfos_nb.jupyter.tensorboard_page import SCRIPT, front_page, script
from tfos_nb.ports import allowed_ports
from tfos_nb.redaction import without_password
from tfos_nb.runtime.control.processes import private_directory, remove_directory
from tfos_nb.runtime.node.tensorboard import TensorBoard
from tfos_nb.state.chart_data import chart_data
from tfos_nb.state.cluster_state import ClusterState, LogLine
from tfos_nb.state.log_buffer import brief_line

__all__ = ["Endpoint", "Served", "the_endpoint"]

logger = logging.getLogger(__name__)

_LOG_LINES = 500
_OPEN_SECONDS = 10.0
_LOCAL_START_SECONDS = 60.0
_ASK_AGAIN_SECONDS = 2
_NODES_KEPT, _LINES_KEPT = 32, 50  # maximum of an ended cluster's nodes, and of lines of each
_ENDED_KEPT = 100  # maximum number of ended clusters for whose pages it answers
_BOARDS = 8  # TensorBoards beside the kernel, of some hundred MB each; an open page sends a request twice a minute
_IDLE_SECONDS = 1800.0  # a TensorBoard without requests for this time is ended; the next request starts it again
_LOOK_SECONDS = 30.0
_FRONT_PAGE = ("", "index.html")
_PORT_VARIABLE = "TFOS_NB_PORT"


class Served(Protocol):
    """The part of :class:`tfos_nb.Cluster` that the endpoint uses."""

    @property
    def id(self) -> str:
        """The cluster's id in URLs."""

    @property
    def tensorboard_socket(self) -> str:
        """The unix socket that leads to the chief's TensorBoard; empty if there is none.

        Raises
        ------
        TfosError
            If the cluster is not reached.
        """

    def snapshot(self) -> ClusterState:
        """Return the cluster's state."""

    def request_stop(self) -> str:
        """Ask the cluster to stop; return a line that says what happens."""

    def log_lines(self, node: str, limit: int) -> Sequence[LogLine]:
        """Return a node's newest lines."""

    def curves(self, metric: str, by: str, node: str) -> dict[str, Any]:
        """Return the numbers of a chart; raise ValueError if there is no such node."""

    def stacks(self) -> dict[str, str]:
        """Return each node's Python stacks; raise ClusterClosed if the cluster has ended."""


@dataclass(frozen=True)
class _EndedCluster:
    """State and last lines of a cluster that has ended, kept after another one was started.

    The cluster itself, with its results and history, can then be freed when no variable refers to it.
    """

    id: str
    state: ClusterState
    lines: Mapping[str, Sequence[LogLine]]
    tensorboard_socket: str = ""

    @classmethod
    def of(cls, cluster: Served) -> _EndedCluster:
        """Return the final state and last lines of a cluster."""
        state = cluster.snapshot()
        lines: dict[str, Sequence[LogLine]] = {}
        for node in ["", *(node.node for node in state.nodes[:_NODES_KEPT])]:  # "" is the chief
            with contextlib.suppress(ValueError):  # the cluster has no such node
                lines[node] = tuple(cluster.log_lines(node, _LINES_KEPT))
        return cls(cluster.id, state, lines)

    def snapshot(self) -> ClusterState:
        """Return the cluster's final state."""
        return self.state

    def request_stop(self) -> str:
        """Return a line that says that there is nothing to stop."""
        return f"{self.state.name} has ended already"

    def log_lines(self, node: str, limit: int) -> Sequence[LogLine]:
        """Return the node's last lines."""
        if node not in self.lines:
            raise ValueError(
                f"{self.state.name} has ended and keeps no lines of {node or 'the chief'}: ask for one of "
                f"{', '.join(self.lines)}"
            )
        return list(self.lines[node])[-limit:]

    def curves(self, metric: str, by: str, node: str) -> dict[str, Any]:
        """Return the numbers of a chart of the chief, with as many points as are kept."""
        if node:
            raise ValueError(f"{self.state.name} has ended and keeps no curves of {node}: ask for the chief's")
        return chart_data(self.state.points, metric=metric, by=by)

    def stacks(self) -> dict[str, str]:
        """Raise ClusterClosed: no node runs."""
        raise ClusterClosed(f"cluster {self.state.name} has ended, so it has no stacks; read its logs")


@dataclass
class _LocalTensorBoard:
    """A TensorBoard beside the kernel, the time of its last request, and the number of its current requests."""

    board: TensorBoard
    asked: float
    serving: int = 0


class Endpoint:
    """Answer requests for clusters on a unix socket, in a daemon thread.

    Examples
    --------
    >>> the_endpoint().serve(cluster)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._clusters: dict[str, Served] = {}
        self._boards: dict[str, _LocalTensorBoard] = {}  # by log directory, the most recently used one last
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._links = AccessLinks()
        self._port: int | None = None
        self._directory = private_directory("kernel")
        self.socket = os.path.join(self._directory, "http")
        self._opened: Future[None] = Future()
        self._runners: list[web.AppRunner] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="tfos_nb endpoint", daemon=True)
        self._thread.start()
        self._opened.result(_OPEN_SECONDS)
        atexit.register(self.close)

    def serve(self, cluster: Served) -> None:
        """Answer requests for a cluster from now on, and publish its place for the Jupyter server."""
        if cluster.id not in self._clusters:
            ended = [known for known in self._clusters.values() if known.snapshot().status.ended]
            for old in ended[: max(0, len(ended) - _ENDED_KEPT)]:
                del self._clusters[old.id]
                connection.forget(old.id)
            for old in ended[-_ENDED_KEPT:]:
                self._clusters[old.id] = old if isinstance(old, _EndedCluster) else _EndedCluster.of(old)
        self._clusters[cluster.id] = cluster
        known = connection.find(cluster.id)
        if known is None or not known.alive:  # else a detached cluster's own process answers, and for longer
            connection.publish(Place(cluster.id, cluster.snapshot().name, self.socket, os.getpid()))

    def open_port(self, bind: str = "127.0.0.1") -> int:
        """Listen also on a port, for TensorBoard only, and return it. Further calls return the same port.

        Parameters
        ----------
        bind : str, optional
            The address to listen on.

        Raises
        ------
        TfosError
            If no port of ``TFOS_NB_PORT`` is free.
        """
        if self._port is None:
            assert self._loop is not None, "it has been opened"
            opening = asyncio.run_coroutine_threadsafe(self._listen(bind, allowed_ports(_PORT_VARIABLE)), self._loop)
            self._port = opening.result(_OPEN_SECONDS)
        return self._port

    def access_link(self, cluster_id: str) -> str:
        """Return the path, below the port's root, of a link to a cluster's TensorBoard, which works once for 10 min."""
        return f"{cluster_id}/enter?code={self._links.new_code(cluster_id)}"

    def close(self) -> None:
        """Stop the server and the TensorBoards that it has started. Idempotent."""
        for one in list(self._boards.values()):
            one.board.stop()
        self._boards.clear()
        if self._closing is not None and self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_OPEN_SECONDS)
        remove_directory(self._directory)

    def _run(self) -> None:
        try:
            asyncio.run(self._answer())
        except BaseException as error:
            if self._opened.done():
                logger.exception("the endpoint's thread failed")
            else:
                self._opened.set_exception(error)  # the thread that waits in __init__ must receive it

    async def _answer(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application()
        application.add_routes(
            [
                web.post("/{id}/stop", self._stop),
                web.get("/{id}/log", self._log),
                web.get("/{id}/curves", self._curves),
                web.get("/{id}/stacks", self._stacks),
                web.route("*", "/{id}/tb/{path:.*}", self.tensorboard),
            ]
        )
        await web.UnixSite(await self._runner(application), self.socket).start()
        os.chmod(self.socket, 0o600)
        self._opened.set_result(None)
        while not self._closing.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _LOOK_SECONDS)
            await self._end_idle_boards(time.monotonic())
        for session in self._sessions.values():
            await session.close()
        for runner in self._runners:
            await runner.cleanup()

    async def _runner(self, application: web.Application) -> web.AppRunner:
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        self._runners.append(runner)
        await runner.setup()
        return runner

    async def _listen(self, bind: str, ports: range) -> int:
        application = web.Application()
        application.add_routes(
            [
                web.get("/", self._here),
                web.get("/{id}/enter", self._enter),
                web.route("*", "/{id}/{pass}/tb/{path:.*}", self._guest),
            ]
        )
        runner = await self._runner(application)
        for port in ports:
            site = web.TCPSite(runner, bind, port)
            with contextlib.suppress(OSError):
                await site.start()
                return int(runner.addresses[-1][1])
        told = f"{ports[0]}-{ports[-1]}" if len(ports) > 1 else str(ports[0])
        raise TfosError(f"no port for TensorBoard: {told} on {bind} is taken. Set {_PORT_VARIABLE} to another range")

    async def _enter(self, request: web.Request) -> web.StreamResponse:
        cluster = self._cluster(request)
        admitted = self._links.enter(cluster.id, request.query.get("code", ""))
        if admitted is None:
            return _say(403, "This link has been used", "It opens once. Run %tfos_tensorboard again for a new one.")
        # A relative address, because a proxy in front of the port may have added a prefix to the path.
        return web.Response(status=302, headers={"Location": f"{admitted}/tb/", "Referrer-Policy": "no-referrer"})

    async def _guest(self, request: web.Request) -> web.StreamResponse:
        if not self._links.knows(request.match_info["id"], request.match_info["pass"]):
            return _say(403, "Not for you", "Run %tfos_tensorboard in the notebook: its link lets you in.")
        return await self.tensorboard(request)

    async def _here(self, request: web.Request) -> web.StreamResponse:
        """Answer a page that checks whether a proxy leads to this server."""
        return web.Response(status=204)

    # --- requests -------------------------------------------------------------------------------------------------

    def _cluster(self, request: web.Request) -> Served:
        cluster = self._clusters.get(request.match_info["id"])
        if cluster is None:
            raise web.HTTPNotFound(text="no such cluster in this kernel")
        return cluster

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        cluster = self._cluster(request)
        return web.json_response({"said": await asyncio.to_thread(cluster.request_stop)})

    async def _log(self, request: web.Request) -> web.StreamResponse:
        cluster = self._cluster(request)
        try:
            lines = await asyncio.to_thread(cluster.log_lines, request.query.get("node", ""), _LOG_LINES)
        except ValueError as error:
            raise web.HTTPNotFound(text=str(error)) from None
        return web.json_response({"lines": [brief_line(line) for line in lines]})

    async def _curves(self, request: web.Request) -> web.StreamResponse:
        cluster = self._cluster(request)
        asked = [request.query.get(name, "") for name in ("metric", "by", "node")]
        try:
            return web.json_response(await asyncio.to_thread(cluster.curves, *asked))
        except ValueError as error:
            raise web.HTTPNotFound(text=str(error)) from None

    async def _stacks(self, request: web.Request) -> web.StreamResponse:
        cluster = self._cluster(request)
        try:
            return web.json_response({"stacks": await asyncio.to_thread(cluster.stacks)})
        except ClusterClosed as error:
            return web.json_response({"message": str(error)})

    async def tensorboard(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on to TensorBoard: the chief's while the cluster runs, one beside the kernel afterwards."""
        cluster = self._cluster(request)
        if not connection.stays_below(request.match_info["path"]):
            raise web.HTTPNotFound(text="no such page")
        state = await asyncio.to_thread(cluster.snapshot)
        if not state.log_dir:
            return _say(404, "No TensorBoard", f"Cluster {state.name} was launched without --tensorboard or --logdir.")
        if request.match_info["path"] == SCRIPT:
            return script()
        try:  # a detached cluster's process is asked
            path = await asyncio.to_thread(getattr, cluster, "tensorboard_socket")
        except TfosError as error:
            return await self._from_log_dir(request, state, f"{error}. The")
        if path:
            return await self._through_tunnel(request, path, state)
        if not state.status.ended:
            return _say(503, "TensorBoard is starting", f"Cluster {state.name} is starting its nodes.", wait=True)
        return await self._from_log_dir(request, state, "The cluster has ended, and its")

    async def _through_tunnel(self, request: web.Request, socket: str, state: ClusterState) -> web.StreamResponse:
        session = self._session(socket, lambda: aiohttp.UnixConnector(socket, limit=16))
        try:
            return await _handed_on(request, session, "http://127.0.0.1", state)
        except aiohttp.ClientError:
            where = next((f" ({node.node} on {node.host})" for node in state.nodes if node.host), "")
            text = f"It starts on the chief's executor{where} when the training starts."
            return _say(503, "TensorBoard is starting", text, wait=True)

    async def _from_log_dir(self, request: web.Request, state: ClusterState, why: str) -> web.StreamResponse:
        log_dir = state.log_dir
        if "://" not in log_dir and not os.path.isdir(log_dir):
            text = (
                f"{why} log directory {log_dir} is not on the kernel's machine "
                f"({os.uname().nodename}). Give a --logdir that the chief and the kernel both see, such as a URL."
            )
            return _say(404, "The logs are elsewhere", text)
        one = self._board(log_dir)
        one.serving += 1
        try:
            await self._end_boards(self._too_many())
            path = await asyncio.to_thread(one.board.wait, _LOCAL_START_SECONDS)
            if path is None:
                return _say(502, "TensorBoard did not start", one.board.said or "It said nothing.")
            session = self._session(path, lambda: aiohttp.UnixConnector(path, limit=16))
            return await _handed_on(request, session, "http://127.0.0.1", state)
        except aiohttp.ClientError as error:
            return _say(502, "TensorBoard does not answer", str(error))
        finally:
            one.serving, one.asked = one.serving - 1, time.monotonic()

    def _board(self, log_dir: str) -> _LocalTensorBoard:
        """Return the TensorBoard over a directory. It is started in this thread, because it ends with its thread."""
        one = self._boards.pop(log_dir, None)
        if one is None or one.board.over:
            one = _LocalTensorBoard(TensorBoard(log_dir), time.monotonic())
            one.board.start()
        self._boards[log_dir] = one
        return one

    def _too_many(self) -> list[str]:
        """Return the log directories of surplus TensorBoards, the least recently used ones without requests."""
        idle = [log_dir for log_dir, one in self._boards.items() if not one.serving]
        return idle[: max(0, len(self._boards) - _BOARDS)]

    async def _end_idle_boards(self, now: float) -> None:
        await self._end_boards(
            [log_dir for log_dir, one in self._boards.items() if not one.serving and now - one.asked >= _IDLE_SECONDS]
        )

    async def _end_boards(self, log_dirs: Sequence[str]) -> None:
        """End these TensorBoards, and close the sessions of all sockets that no longer exist."""
        for board in [self._boards.pop(log_dir).board for log_dir in log_dirs]:
            await asyncio.to_thread(board.stop)
        gone = [self._sessions.pop(path) for path in list(self._sessions) if not os.path.exists(path)]
        for session in gone:
            await session.close()

    def _session(self, key: str, connector: Callable[[], aiohttp.BaseConnector]) -> aiohttp.ClientSession:
        if key not in self._sessions:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
            self._sessions[key] = aiohttp.ClientSession(
                connector=connector(), timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._sessions[key]


async def _handed_on(
    request: web.Request, session: aiohttp.ClientSession, origin: str, state: ClusterState
) -> web.StreamResponse:
    """Send a request to TensorBoard and return its answer, passed on in pieces as the client reads them."""
    if request.match_info["path"] in _FRONT_PAGE and request.method == "GET":
        return await front_page(session, origin) or _nothing_yet(state)
    body = request.content if request.body_exists else None
    async with session.request(
        request.method,
        connection.below(origin, request.match_info["path"], request.query.items()),
        headers=connection.passed_on(request.headers),
        data=body,
        allow_redirects=False,
        skip_auto_headers=("User-Agent",),
    ) as answer:
        response = web.StreamResponse(status=answer.status, headers=connection.answered(answer.headers))
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response


def _nothing_yet(state: ClusterState) -> web.Response:
    when = "" if state.status.ended else " Keras' fit writes at the end of each epoch."
    place = without_password(state.log_dir)
    text = f"TensorBoard has found nothing under {place}.{when} This page looks again by itself."
    return _say(503, "Nothing to show yet", text, wait=True)


def _say(status: int, title: str, text: str, wait: bool = False) -> web.Response:
    body = page(title, text, again=_ASK_AGAIN_SECONDS if wait else None)
    return web.Response(status=status, text=body, content_type="text/html")


_the_one: list[Endpoint] = []
_making = threading.Lock()


def the_endpoint() -> Endpoint:
    """Return this kernel's endpoint. The first call starts it."""
    with _making:
        if not _the_one:
            _the_one.append(Endpoint())
        return _the_one[0]
