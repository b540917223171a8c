"""Display of a cluster as it is now, as HTML and as text.

It links to Spark's UI and to TensorBoard, as far as a browser can follow the links.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any

from tfos_nb.errors import PlanError, TfosError
from tfos_nb.redaction import without_secrets
from tfos_nb.state.cluster_state import ClusterState
from tfos_nb.state.training_curve import thin_points
from tfos_nb.widgets.extension import ask_extension
from tfos_nb.widgets.hosts import Host, detect_host, parent_server, proxied_url
from tfos_nb.widgets.html import render_html
from tfos_nb.widgets.text import WIDTH, render_text

__all__ = ["cluster_bundle", "cluster_page", "links_to"]

_POINTS_SHOWN = 400

_SECONDS = 1.0
"""Time for the Jupyter server of this machine to say whether it has the extension."""


def cluster_bundle(cluster: Any, *, every_node: bool = False, width: int = WIDTH) -> dict[str, str]:
    """Return a cluster's panel as it is now: static HTML with links to Spark's UI and TensorBoard, and text."""
    state = _with_points(cluster)
    return {
        "text/html": render_html(state, every_node=every_node, links=links_to(cluster, state)),
        "text/plain": render_text(state, every_node=every_node, width=width),
    }


def cluster_page(cluster: Any) -> str:
    """Return a cluster's panel as static HTML for others to read: errors and output without what looks like a secret.

    It has no links, since others may not reach this machine.
    """
    state = _with_points(cluster)
    state = replace(
        state,
        error=without_secrets(state.error),
        nodes=tuple(replace(node, detail=without_secrets(node.detail)) for node in state.nodes),
        log=tuple(replace(line, text=without_secrets(line.text)) for line in state.log),
    )
    return render_html(state)


def _with_points(cluster: Any) -> ClusterState:
    """Return a cluster's state now, with the curves of its history."""
    state: ClusterState = cluster.snapshot()
    history: Any = getattr(cluster, "history", None)
    if history is not None and not state.points:
        state = replace(state, points=tuple(thin_points(history.points(), _POINTS_SHOWN)))
    return state


def links_to(cluster: Any, state: ClusterState) -> list[tuple[str, str]]:
    """Return the titles and URLs of the pages that belong to a cluster.

    A page that a browser cannot reach from here is left out: a link that leads nowhere is worse than none.
    """
    host = detect_host()
    found = [("Spark UI", _spark_ui(state.spark_ui, host)), ("TensorBoard", _tensorboard(cluster, state, host))]
    return [(title, url) for title, url in found if url]


def _spark_ui(url: str, host: Host) -> str:
    """Return the address of Spark's UI for the user's browser: through the Jupyter server's proxy, or its own."""
    port = url.rpartition(":")[2].strip("/")
    if not url.startswith(("http://", "https://")) or host.name == "databricks":
        return ""
    if not port.isdigit():
        return url
    try:
        address = proxied_url(int(port), "jobs/", host)
    except PlanError:  # %tfos_doctor names the wrong variable
        return ""
    return "" if address is None else url if address.startswith("http://127.0.0.1:") else address


def _tensorboard(cluster: Any, state: ClusterState, host: Host) -> str:
    """Return the address of TensorBoard behind the Jupyter server's login, if that server has the extension."""
    if not state.log_dir or not state.id or host.name != "jupyter":
        return ""
    server = parent_server()
    if not server or not _has_extension(str(server.get("url", "")), int(server["pid"])):
        return ""
    with contextlib.suppress(ImportError, OSError, RuntimeError, TfosError):
        from tfos_nb.jupyter.endpoint import the_endpoint  # here, since it imports aiohttp

        the_endpoint().serve(cluster)
        return f"{str(server.get('base_url', '')).rstrip('/')}/tfos-nb/tb/{state.id}/"
    return ""


@functools.cache
def _has_extension(url: str, pid: int) -> bool:
    """Return whether a server has the extension. A server, by its process, is asked once."""
    return bool(ask_extension(parent_server(), _SECONDS).version)
