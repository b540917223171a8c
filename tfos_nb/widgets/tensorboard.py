"""Show TensorBoard to the user: in the page, in a tab, or as a printed address.

The first of these routes that is available is used:

1. an address that the user or the administrator has configured,
2. Colab's and Databricks' own proxies,
3. this package's extension in the Jupyter server of the page,
4. jupyter-server-proxy,
5. the port itself.

All but the extension need a port on the kernel's machine. The port is opened only for these routes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from IPython.display import HTML, display

from tfos_nb.errors import ClusterClosed, PlanError
from tfos_nb.jupyter.endpoint import Endpoint, Served, the_endpoint
from tfos_nb.redaction import without_password
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, LogLine
from tfos_nb.widgets.extension import ask_extension
from tfos_nb.widgets.hosts import Host, detect_host, parent_server, proxied_url

__all__ = ["LogDirectory", "show_tensorboard"]

_ADVICE = (
    "The Jupyter server of this page has no tfos_nb extension. In its environment run: "
    "jupyter server extension enable tfos_nb.serverext, and start it again."
)


class LogDirectory:
    """A log directory with the interface of a cluster that has ended.

    Parameters
    ----------
    log_dir : str
        A directory on the kernel's machine, or a URL that TensorBoard can read.

    Raises
    ------
    PlanError
        If the directory does not exist on this machine.
    """

    tensorboard_socket = ""

    def __init__(self, log_dir: str) -> None:
        if not log_dir.strip():
            raise PlanError("--logdir must not be empty; give a directory")
        if "://" not in log_dir:
            log_dir = os.path.abspath(os.path.expanduser(log_dir))
            if not os.path.isdir(log_dir):
                raise PlanError(f"{log_dir}: no such directory on {os.uname().nodename}, where the kernel runs")
        self._log_dir = log_dir
        self.id = hashlib.sha256(log_dir.encode()).hexdigest()[:16]

    def snapshot(self) -> ClusterState:
        """Return the state of an ended cluster with these logs."""
        name = os.path.basename(self._log_dir.rstrip("/")) or self._log_dir
        return ClusterState(name, self.id, status=ClusterStatus.DONE, log_dir=self._log_dir)

    def request_stop(self) -> str:
        """Return a line that says that there is nothing to stop."""
        return "there is no cluster behind these logs"

    def log_lines(self, node: str, limit: int) -> Sequence[LogLine]:
        """Return no lines, since there is no node."""
        return ()

    def curves(self, metric: str, by: str, node: str) -> dict[str, Any]:
        """Raise ValueError, since no node has reported anything here."""
        raise ValueError("a directory of logs has no curves: TensorBoard shows them")

    def stacks(self) -> dict[str, str]:
        """Raise ClusterClosed, since there is no node."""
        raise ClusterClosed("there is no cluster behind these logs, so there are no stacks")


def show_tensorboard(
    cluster: Served | None = None,
    *,
    log_dir: str | None = None,
    height: int = 800,
    frame: bool = True,
    proxy_url: str = "",
    host: Host | None = None,
    spark_conf: Mapping[str, str] | None = None,
) -> None:
    """Show the TensorBoard of a cluster or of a directory, in the page or as a printed address.

    Parameters
    ----------
    cluster : Cluster, optional
        A cluster that was launched with ``tensorboard=True`` or ``log_dir=``. While it runs, its chief's TensorBoard is
        shown. After its end, a TensorBoard beside the kernel shows its logs.
    log_dir : str, optional
        A directory or URL to show instead of a cluster's logs.
    height : int, optional
        Height of the frame in the page, in pixels.
    frame : bool, optional
        Whether to show a frame; if False, only a link is shown.
    proxy_url : str, optional
        The URL under which a browser reaches a port of this machine, with ``%PORT%`` in it.
    host : Host, optional
        Environment in which the code runs. Default: detected.
    spark_conf : mapping of str to str, optional
        Spark's configuration, which has the address of Databricks' proxy.

    Raises
    ------
    PlanError
        If there is nothing to show.
    """
    host = detect_host() if host is None else host
    shown = LogDirectory(log_dir) if log_dir is not None else _with_logs(cluster)
    state = shown.snapshot()
    if host.headless:
        place = without_password(state.log_dir)
        sys.stdout.write(f"TensorBoard of {state.name}: no page to show it in; the logs are in {place}\n")
        return
    endpoint = the_endpoint()
    endpoint.serve(shown)
    configured = proxy_url or os.environ.get("TFOS_NB_PROXY_URL") or os.environ.get("TENSORBOARD_PROXY_URL")
    if host.name == "colab" and not configured:
        _show_in_colab(endpoint, state, height if frame else 0)
    elif configured or host.name in ("databricks", "zeppelin", "terminal"):
        links = [_address(endpoint, state, host, proxy_url, spark_conf) for _ in range(2)]  # each works once
        _show_link(links[0], state, height if frame else 0, host, framed=links[1])
    else:
        _show_in_jupyter(endpoint, state, height if frame else 0, host)


def _with_logs(cluster: Served | None) -> Served:
    if cluster is None:
        raise PlanError(
            "TensorBoard needs a cluster or a log directory, got neither; name a cluster, or give --logdir DIR"
        )
    state = cluster.snapshot()
    if not state.log_dir:
        raise PlanError(f"{state.name} was launched without TensorBoard: launch it with --tensorboard, or --logdir DIR")
    return cluster


def _address(
    endpoint: Endpoint, state: ClusterState, host: Host, proxy_url: str = "", conf: Mapping[str, str] | None = None
) -> str | None:
    """Return an address that works once. Its port listens on loopback, on Databricks on all addresses for the proxy."""
    port = endpoint.open_port("0.0.0.0" if host.name == "databricks" else "127.0.0.1")  # noqa: S104 - for Databricks' proxy; links have a token
    return proxied_url(port, endpoint.access_link(state.id), host, template=proxy_url, spark_conf=conf)


def _show_in_jupyter(endpoint: Endpoint, state: ClusterState, height: int, host: Host) -> None:
    """Show a frame if the address is known; otherwise let the page find it.

    The address is known if the Jupyter server that started this kernel has the extension. Then the frame is plain HTML,
    which a saved notebook can keep.
    """
    server = parent_server()
    base = str(server.get("base_url", "")).rstrip("/")
    if host.name == "jupyter" and server and ask_extension(server).version:
        _show_link(f"{base}/tfos-nb/tb/{state.id}/", state, height, host)
        return
    port = endpoint.open_port()
    local = f"http://127.0.0.1:{port}/"
    proxied = proxied_url(port, "", host) or local
    try:
        from tfos_nb.widgets.frame import Frame
    except ImportError:
        _show_link(f"{proxied}{endpoint.access_link(state.id)}", state, height, host)
        return
    log_dir = without_password(state.log_dir)
    widget = Frame(cluster=state.id, name=state.name, log_dir=log_dir, height=height, advice=_ADVICE)
    widget.proxied, widget.local, widget.widget = proxied, local, widget.model_id
    widget.access_links = [endpoint.access_link(state.id) for _ in range(2)]
    text = f"TensorBoard of {state.name}: {log_dir}"
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    bundle: dict[str, Any] = {"text/plain": text, "text/html": f"<div>{escape(text)}</div>"}
    display({**bundle, "application/vnd.jupyter.widget-view+json": view}, raw=True)  # type: ignore[no-untyped-call]


def _show_link(url: str | None, state: ClusterState, height: int, host: Host, framed: str | None = None) -> None:
    if url is None:
        raise PlanError(f"TensorBoard of {state.name}: no address leads to it from here. {_ADVICE}")
    if host.rendering == "text":
        sys.stdout.write(f"TensorBoard of {state.name}: {url}\n(on this machine; the link opens once)\n")
        return
    link = f'<a href="{escape(url)}" target="_blank" rel="noopener">TensorBoard of {escape(state.name)} ↗</a>'
    title = f"TensorBoard of {escape(state.name)}"
    size = f'width="100%" height="{height}" style="border:0"'
    box = f'<iframe src="{escape(framed or url)}" title="{title}" {size}></iframe>'
    display(HTML(f"<div>{link}</div>{box if height else ''}"))  # type: ignore[no-untyped-call]


def _show_in_colab(endpoint: Endpoint, state: ClusterState, height: int) -> None:
    """Show TensorBoard in Colab by a script, since only a script of the output can get the address of a port."""
    port = endpoint.open_port()
    script = Path(__file__).with_name("colab.js").read_text(encoding="utf-8")
    paths = [endpoint.access_link(state.id) for _ in range(2)]
    given = json.dumps({"port": port, "paths": paths, "height": height, "name": state.name}).replace("<", "\\u003c")
    display(HTML(f"<div></div><script>({script})({given})</script>"))  # type: ignore[no-untyped-call]
