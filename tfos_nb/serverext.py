"""The Jupyter server extension.

A kernel may run in another environment than the server, so it cannot know what the server has: it asks
``GET {base_url}tfos-nb/api/version``, which answers whoever Jupyter itself lets in.

This module is loaded into the Jupyter server: it imports neither pyspark nor TensorFlow.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web

from tfos_nb import __version__

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp

__all__ = ["VersionHandler"]


class VersionHandler(APIHandler):
    """Says that the extension is here, and which one."""

    @web.authenticated
    async def get(self) -> None:
        """Answer ``{"version": …}``."""
        await self.finish(json.dumps({"version": __version__}))


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "tfos_nb.serverext"}]


def _load_jupyter_server_extension(server: ServerApp) -> None:
    base_url = server.web_app.settings["base_url"]
    routes = [(url_path_join(base_url, "tfos-nb", "api", "version"), VersionHandler)]
    server.web_app.add_handlers(".*$", routes)  # type: ignore[no-untyped-call]
