"""Check the Jupyter server that started this kernel, for ``%tfos_doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfos_nb.magics.diagnosis.report import Finding
from tfos_nb.version import __version__
from tfos_nb.widgets.extension import ask_extension

__all__ = ["ask_server"]

_WHAT = "server extension"
_ENABLE = "jupyter server extension enable tfos_nb.serverext"


def ask_server(info: Mapping[str, Any]) -> Finding:
    """Return whether the server has this package's extension, and what to do if it does not.

    Parameters
    ----------
    info : mapping
        The server, as returned by :func:`tfos_nb.widgets.hosts.parent_server`.
    """
    answer = ask_extension(info)
    if not answer.url:
        return Finding(_WHAT, "ok", "no Jupyter server of this machine started this kernel: nothing to look at")
    if answer.status:
        return _refused(answer.url, answer.status)
    if answer.reason:
        return Finding(_WHAT, "warn", f"{answer.url} did not answer as expected: {answer.reason}")
    if answer.version != __version__:
        told = f"the server has {answer.version}, this kernel {__version__}: install the same one for both"
        return Finding(_WHAT, "warn", told)
    return Finding(_WHAT, "ok", f"{answer.version}, at {answer.url}")


def _refused(url: str, code: int) -> Finding:
    if code == 404:
        told = f"the extension is missing at {url}; Stop and TensorBoard use slower routes, where available"
        return Finding(_WHAT, "missing", told, f"{_ENABLE}   # in the server's environment; then restart the server")
    if code in (301, 302, 401, 403):
        return Finding(_WHAT, "warn", f"{url} needs a login ({code}), so it cannot be checked from here")
    return Finding(_WHAT, "warn", f"{url} answered with {code}")
