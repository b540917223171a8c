"""Find out whether the Jupyter server that started this kernel has tfos_nb's extension.

The kernel may run in another Python than the server, so only a request to the server can tell.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

__all__ = ["Answer", "ask_extension"]

_SECONDS = 3.0


@dataclass(frozen=True)
class Answer:
    """The server's answer: the extension's version, or an HTTP status, or the reason why no answer came."""

    url: str = ""
    version: str = ""
    status: int = 0
    reason: str = ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirects, because the token is for this server only."""

    def redirect_request(self, *args: object) -> None:
        """Return None, so that a redirect is not followed."""


def ask_extension(info: Mapping[str, Any], seconds: float = _SECONDS) -> Answer:
    """Ask the server for the version of the extension, and return its answer.

    Parameters
    ----------
    info : mapping
        The server, as returned by :func:`tfos_nb.widgets.hosts.parent_server`. Its token is sent only to that server
        and never shown.
    seconds : float, optional
        Time limit of the request.
    """
    url = str(info.get("url", ""))
    if not url.startswith(("http://", "https://")):
        return Answer()
    request = urllib.request.Request(f"{url.rstrip('/')}/tfos-nb/api/version")  # noqa: S310 - see above
    if info.get("token"):
        request.add_unredirected_header("Authorization", f"token {info['token']}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(request, timeout=seconds) as answer:
            return Answer(url, version=str(json.loads(answer.read(10_000))["version"]))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(url, status=error.code)
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        cause = getattr(error, "reason", error)
        return Answer(url, reason=f"{type(cause).__name__}: {cause}")
