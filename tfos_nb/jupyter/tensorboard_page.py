"""TensorBoard's first page, adapted for a notebook.

The original has three problems in a notebook. The addresses of its fonts are outside the path under which the page is
shown. If it is opened before any data are written, it shows "No dashboards are active" forever; so another page is
shown until there are data. And it reads the numbers only once: reloading is a setting of the page, off by default and
stored in the browser (``localStorage``, where TensorBoard's ``persistent_settings_data_source.ts`` reads it). A script
switches it on, unless the user has switched it off.
"""

from __future__ import annotations

import json

import aiohttp
from aiohttp import web

from tfos_nb.jupyter import connection

__all__ = ["SCRIPT", "front_page", "script"]

SCRIPT = "tfos_nb/reload.js"
"""Path of the script. It is a separate file because TensorBoard's Content-Security-Policy forbids inline scripts."""

_SETTINGS = "_tb_global_settings"
_READ_ANEW = f"""\
// TensorBoard reads its numbers anew every 30 s, unless the user has set that otherwise in its settings.
try {{
  const settings = JSON.parse(localStorage.getItem("{_SETTINGS}") || "{{}}");
  if (typeof settings.autoReload !== "boolean") {{
    localStorage.setItem("{_SETTINGS}", JSON.stringify({{ ...settings, autoReload: true }}));
  }}
}} catch {{}} // a browser that keeps nothing for this page, or settings of another form
"""


def script() -> web.Response:
    """Return the response with the script that switches reloading on."""
    return web.Response(text=_READ_ANEW, content_type="text/javascript", headers={"Cache-Control": "no-cache"})


async def front_page(session: aiohttp.ClientSession, origin: str) -> web.Response | None:
    """Fetch TensorBoard's first page and return it adapted; None if TensorBoard has nothing to show yet."""
    if not await _has_something(session, origin):
        return None
    async with session.get(origin, skip_auto_headers=("User-Agent", "Accept-Encoding")) as answer:
        body = (await answer.read()).replace(b"url(/font-roboto/", b"url(font-roboto/")
        body = body.replace(b"<head>", f'<head><script src="{SCRIPT}"></script>'.encode(), 1)
        headers = connection.answered(answer.headers)
        headers.pop("Content-Length", None)
        return web.Response(status=answer.status, body=body, headers=headers)


async def _has_something(session: aiohttp.ClientSession, origin: str) -> bool:
    """Return whether any plugin of TensorBoard has found data, by the same request that TensorBoard's page makes."""
    url = f"{origin}/data/plugins_listing"
    async with session.get(url, skip_auto_headers=("User-Agent", "Accept-Encoding")) as answer:
        if answer.status != 200:
            return True
        said = await answer.read()
    try:
        plugins = json.loads(said)
        return any(plugin["enabled"] for plugin in plugins.values())
    except (ValueError, AttributeError, KeyError, TypeError):
        return True  # the answer of an unknown version: show TensorBoard's own page
