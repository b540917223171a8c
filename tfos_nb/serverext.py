"""The Jupyter server extension: a page's way to its cluster, behind Jupyter's own login.

::

    GET  {base_url}tfos-nb/api/version                   which extension this is; a page asks whether there is one
    POST {base_url}tfos-nb/api/clusters/<id>/stop        stop; works while the kernel is busy with a cell
    GET  {base_url}tfos-nb/api/clusters/<id>/log?node=   a node's newest lines
    GET  {base_url}tfos-nb/api/clusters/<id>/curves?…    the numbers of a metric's chart
    GET  {base_url}tfos-nb/api/clusters/<id>/stacks      where each node's program is
    any  {base_url}tfos-nb/tb/<id>/…                     TensorBoard

All but the first are asked of the kernel, through the unix socket that :mod:`tfos_nb.jupyter.connection` names.
Cookies, tokens and authorization headers stay here: only the headers that it lists go on. Bodies are passed on piece by
piece.

This module is loaded into the Jupyter server: it imports neither pyspark nor TensorFlow.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

import aiohttp
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.utils import url_path_join
from tornado import iostream, web

from tfos_nb.jupyter import connection
from tfos_nb.jupyter.connection import Place
from tfos_nb.jupyter.message_page import page
from tfos_nb.version import __version__

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp

__all__ = ["CurvesHandler", "LogHandler", "StopHandler", "TensorBoardHandler", "VersionHandler"]

_ONLY_HERE = "; frame-ancestors 'self'"
_KERNEL_GONE = (
    "The kernel that held this cluster has ended, and the cluster with it: its executors are free. "
    "Run the notebook again; what was saved is still where it was saved. "
    "If the cluster is detached, it goes on: %tfos_attach shows it again."
)
_UNKNOWN = "This server knows no such cluster. It belongs to another user or machine, or was long ago."


class VersionHandler(APIHandler):
    """Says that the extension is here, and which one."""

    @web.authenticated
    async def get(self) -> None:
        """Answer ``{"version": …}``."""
        await self.finish(json.dumps({"version": __version__}))


class _ClusterHandler(APIHandler):
    """Asks the kernel something small, and answers with JSON."""

    auth_resource = "kernels"
    _track_activity = False  # a page that polls does not keep an idle server from being culled

    async def _ask(self, method: str, cluster_id: str, what: str) -> None:
        place = connection.find(cluster_id)
        if place is None:
            raise web.HTTPError(404, _UNKNOWN)
        try:
            async with _kernel(place) as session, session.request(method, f"http://kernel/{place.id}/{what}") as answer:
                self.set_status(answer.status)
                said = await answer.text()
        except TimeoutError as error:
            raise web.HTTPError(504, "the kernel did not answer in time; the request may still take effect") from error
        except aiohttp.ClientError as error:
            raise web.HTTPError(410 if not place.alive else 502, _KERNEL_GONE) from error
        await self.finish(said if answer.status == 200 else json.dumps({"message": said}))


class StopHandler(_ClusterHandler):
    """Stops a cluster: politely at first; a second time at once."""

    @web.authenticated
    @authorized("execute")  # type: ignore[untyped-decorator]
    async def post(self, cluster_id: str) -> None:
        """Answer ``{"said": …}``."""
        await self._ask("POST", cluster_id, "stop")


class LogHandler(_ClusterHandler):
    """Gives a node's newest lines."""

    @web.authenticated
    @authorized("read")  # type: ignore[untyped-decorator]
    async def get(self, cluster_id: str) -> None:
        """Answer ``{"lines": [[time, node, text], …]}``."""
        node = quote(self.get_query_argument("node", ""), safe="")
        await self._ask("GET", cluster_id, f"log?node={node}")


class CurvesHandler(_ClusterHandler):
    """Gives the numbers of a metric's chart."""

    @web.authenticated
    @authorized("read")  # type: ignore[untyped-decorator]
    async def get(self, cluster_id: str) -> None:
        """Answer with the data of :func:`tfos_nb.state.chart_data.chart_data`."""
        asked = {name: self.get_query_argument(name, "") for name in ("metric", "by", "node")}
        await self._ask("GET", cluster_id, f"curves?{urlencode(asked)}")


class StacksHandler(_ClusterHandler):
    """Gives the nodes' Python stacks."""

    @web.authenticated
    @authorized("read")  # type: ignore[untyped-decorator]
    async def get(self, cluster_id: str) -> None:
        """Answer ``{"stacks": {node: text, …}}``, or ``{"message": …}`` if no node runs."""
        await self._ask("GET", cluster_id, "stacks")


class TensorBoardHandler(JupyterHandler):
    """Hands TensorBoard's requests on to the kernel."""

    auth_resource = "kernels"

    def check_xsrf_cookie(self) -> None:
        """Let TensorBoard's POSTs pass: they read, they know nothing of Jupyter's cookie, and change nothing."""

    @web.authenticated
    @authorized("read")  # type: ignore[untyped-decorator]
    async def get(self, cluster_id: str, path: str | None) -> None:
        """Hand on; without its last slash the page's own addresses would be wrong."""
        if path is None:
            self.redirect(self.request.path + "/")
            return
        await self._hand_on(cluster_id, path)

    head = get
    post = get

    async def _hand_on(self, cluster_id: str, path: str) -> None:
        place = connection.find(cluster_id)
        if place is None or not connection.stays_below(path):
            self._say(404, "No such cluster", _UNKNOWN)
            return
        names = self.request.query_arguments
        query = [(name, value) for name in names for value in self.get_query_arguments(name, strip=False)]
        url = connection.below(f"http://kernel/{place.id}/tb", path, query)
        headers = connection.passed_on(self.request.headers)
        body = self.request.body or None
        try:
            async with (
                _kernel(place) as session,
                session.request(
                    str(self.request.method), url, headers=headers, data=body, allow_redirects=False
                ) as answer,
            ):
                self._answer_like(answer)
                async for piece in answer.content.iter_any():
                    self.write(piece)
                    await self.flush()  # waits for a slow page, so that nothing gathers here
        except iostream.StreamClosedError:
            return  # the page was closed
        except (aiohttp.ClientError, TimeoutError):
            if self._headers_written:
                self.request.connection.stream.close()  # type: ignore[union-attr]  # a torn answer must not look whole
                return
            self._say(410 if not place.alive else 502, "The cluster's kernel does not answer", _KERNEL_GONE)
            return
        await self.finish()

    def _answer_like(self, answer: aiohttp.ClientResponse) -> None:
        self.set_status(answer.status)
        for name, value in connection.answered(answer.headers).items():
            policy = name == "Content-Security-Policy"
            self.set_header(name, value.rstrip("; ") + _ONLY_HERE if policy else value)

    def _say(self, status: int, title: str, text: str) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(page(title, text))


def _kernel(place: Place) -> aiohttp.ClientSession:
    """Open the way to a kernel; of unix sockets each request may have its own."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=330)
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(place.socket),
        timeout=timeout,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent",),
    )


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "tfos_nb.serverext"}]


def _load_jupyter_server_extension(server: ServerApp) -> None:
    base_url = server.web_app.settings["base_url"]
    cluster = r"([a-z0-9]{8,64})"
    routes = [
        (r"api/version", VersionHandler),
        (rf"api/clusters/{cluster}/stop", StopHandler),
        (rf"api/clusters/{cluster}/log", LogHandler),
        (rf"api/clusters/{cluster}/curves", CurvesHandler),
        (rf"api/clusters/{cluster}/stacks", StacksHandler),
        (rf"tb/{cluster}(?:/(.*))?", TensorBoardHandler),
    ]
    handlers = [(url_path_join(base_url, "tfos-nb", route), handler) for route, handler in routes]
    server.web_app.add_handlers(".*$", handlers)  # type: ignore[no-untyped-call]
