"""Detect where the code runs: the kind of notebook, terminal or script, what it can show, and its URLs of ports.

Environment variables, the shell and the imported modules are enough to find this out. The page is not queried, since
the kernel would hang if the page did not answer. Spark and TensorFlow are never imported for this.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import quote

from tfos_nb.errors import PlanError, current_shell
from tfos_nb.spark.contexts import is_connect

__all__ = ["Host", "Rendering", "check_proxy_url", "detect_host", "parent_server", "proxied_url"]

Rendering = Literal["widget", "html", "text"]

_PORT = "%PORT%"
_URL_VARIABLES = ("TFOS_NB_PROXY_URL", "TENSORBOARD_PROXY_URL")
_NAME = re.compile(r"[A-Za-z0-9._-]+")

_CONNECT_ON_DATABRICKS = (
    "this compute of Databricks ({kind}) gives notebooks Spark Connect, to a client that its executors do not reach: "
    "attach the notebook to classic compute in Dedicated access mode, with the ML runtime. TFOS_SERVER_RELAY=1 in the "
    "environment has it tried by a relay all the same, which nobody has seen work there"
)


@dataclass(frozen=True)
class Host:
    """Environment in which the code runs.

    Attributes
    ----------
    name : str
        ``jupyter`` (JupyterLab, Notebook, JupyterHub), ``vscode``, ``colab``, ``databricks``, ``zeppelin``,
        ``headless`` (a kernel without a page: nbclient, papermill), ``terminal`` (IPython), or ``script``.
    rendering : str
        The best that it can show: ``widget``, ``html`` or ``text``.
    replaces_by_clearing : bool
        Whether an output can be replaced only by clearing the cell's outputs and writing them again.
    refusal : str
        The reason why tfos_nb cannot run here, and what to do; empty if it can.
    """

    name: str
    rendering: Rendering
    replaces_by_clearing: bool = False
    refusal: str = ""

    @property
    def headless(self) -> bool:
        """Whether no page shows the code's output while it runs."""
        return self.name in ("headless", "script")


def detect_host(
    environ: Mapping[str, str] | None = None,
    *,
    shell: Any = None,
    modules: Mapping[str, ModuleType] | None = None,
) -> Host:
    """Return the environment in which the code runs.

    Parameters
    ----------
    environ : mapping of str to str, optional
        Environment variables. Default: those of the process.
    shell : InteractiveShell, optional
        IPython's shell. Default: the shell of the process, if it has one.
    modules : mapping of str to module, optional
        The imported modules. Default: ``sys.modules``.
    """
    environ = os.environ if environ is None else environ
    modules = sys.modules if modules is None else modules
    shell = current_shell(modules) if shell is None else shell
    kernel = shell is not None and bool(shell.has_trait("kernel"))
    names: Mapping[str, Any] = getattr(shell, "user_ns", {})
    if environ.get("DATABRICKS_RUNTIME_VERSION"):
        return Host("databricks", "widget" if kernel else "text", refusal=_refusal(environ, names))
    if "google.colab" in modules or environ.get("COLAB_RELEASE_TAG"):
        return Host("colab", "widget" if kernel else "text")
    if _has_zeppelin_context(names):
        return Host("zeppelin", "html" if kernel else "text", replaces_by_clearing=kernel)
    if not kernel:
        return Host("script" if shell is None else "terminal", "text")
    if "__vsc_ipynb_file__" in names:
        return Host("vscode", "widget")
    if environ.get("JPY_SESSION_NAME") and not _is_inherited("JPY_SESSION_NAME", environ):
        return Host("jupyter", "widget")
    if environ.get("VSCODE_PID"):  # set in VS Code's Interactive Window, but not in its terminals
        return Host("vscode", "widget")
    return Host("headless", "html")


def _is_inherited(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether the process that started this kernel has the variable with the same value.

    That is so if papermill or nbclient runs in a cell: then the variable belongs to the notebook of that cell. A
    Jupyter server sets the variable for each kernel, and does not have it itself.
    """
    parent = environ.get("JPY_PARENT_PID", "")
    if not parent.isdigit():
        return False
    try:
        theirs = Path(f"/proc/{parent}/environ").read_bytes()
    except OSError:  # not Linux, or another user's process
        return False
    return os.fsencode(f"{name}={environ[name]}") in theirs.split(b"\0")


def _has_zeppelin_context(names: Mapping[str, Any]) -> bool:
    """Return whether the names include Zeppelin's context, ``z``.

    The variable ``ZEPPELIN_HOME`` is not enough, because it may be set for the whole machine.
    """
    return "ZeppelinContext" in type(names.get("z")).__name__


def _refusal(environ: Mapping[str, str], names: Mapping[str, Any]) -> str:
    """Return why this Databricks compute cannot run a cluster; empty if it can, or the user wants to try."""
    if environ.get("TFOS_SERVER_RELAY", "").strip() == "1":
        return ""
    if environ.get("IS_SERVERLESS", "").lower() in ("1", "true"):
        return _CONNECT_ON_DATABRICKS.format(kind="Serverless")
    if is_connect(names.get("spark")) or environ.get("SPARK_CONNECT_MODE_ENABLED") or environ.get("SPARK_REMOTE"):
        return _CONNECT_ON_DATABRICKS.format(kind="Standard access mode or Serverless")
    return ""


def proxied_url(
    port: int,
    path: str,
    host: Host,
    environ: Mapping[str, str] | None = None,
    *,
    template: str = "",
    spark_conf: Mapping[str, str] | None = None,
) -> str | None:
    """Return the URL under which the user's browser reaches a port of this machine.

    Parameters
    ----------
    port : int
        The port.
    path : str
        The path below it, without a leading slash. A directory needs a trailing slash.
    host : Host
        Environment in which the code runs.
    environ : mapping of str to str, optional
        Environment variables. Default: those of the process.
    template : str, optional
        A URL with ``%PORT%`` that the user has configured. The environment variables have precedence.
    spark_conf : mapping of str to str, optional
        Spark's configuration, which has the address of Databricks' driver proxy.

    Returns
    -------
    str or None
        A URL, or a path on the notebook page's own origin. None if it is not known, or known only to the page (Colab).

    Raises
    ------
    PlanError
        If a configured URL has no ``%PORT%``, or is not a URL for a browser.
    """
    environ = os.environ if environ is None else environ
    configured = _configured(environ, template)
    if configured:
        return _joined(configured.replace(_PORT, str(port)), path)
    if host.name == "colab":
        return None
    if host.name == "databricks":
        return _driver_proxy(port, path, spark_conf or {})
    code_server = environ.get("VSCODE_PROXY_URI", "")  # such as https://example.org/proxy/{{port}}/
    if host.name == "vscode" and "{{port}}" in code_server:
        return _joined(code_server.replace("{{port}}", str(port)), path)
    prefix = _prefix(environ, host)
    return _joined(f"{prefix}proxy/{port}/" if prefix else f"http://127.0.0.1:{port}/", path)


def _configured(environ: Mapping[str, str], template: str) -> str:
    """Return the URL that the user or the administrator has set, after a check; empty if none is set."""
    given = [(name, environ.get(name, "")) for name in _URL_VARIABLES] + [("TfosMagics.proxy_url", template)]
    for name, value in given:
        value = value.strip()
        if value:
            check_proxy_url(name, value)
            return value
    return ""


def check_proxy_url(name: str, value: str) -> None:
    """Refuse a value that cannot be the URL of a port: it lacks ``%PORT%``, or a browser cannot open it."""
    if _PORT not in value:
        raise PlanError(f"{name} must contain {_PORT} in place of the port, as in /proxy/{_PORT}/, got {value}")
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", value)
    if (scheme and scheme[0].lower() not in ("http:", "https:")) or re.search(r"[\s\x00-\x1f\"'<>]", value):
        raise PlanError(f"{name} must be a path, or a URL that begins with http:// or https://, got {value}")


def _joined(base: str, path: str) -> str:
    return f"{base.rstrip('/')}/{path.lstrip('/')}"


def _driver_proxy(port: int, path: str, conf: Mapping[str, str]) -> str | None:
    """Return the URL through Databricks' driver proxy; None if Spark's configuration does not name the cluster."""
    cluster = conf.get("spark.databricks.clusterUsageTags.clusterId", "")
    organization = conf.get("spark.databricks.clusterUsageTags.clusterOwnerOrgId", "")
    workspace = conf.get("spark.databricks.workspaceUrl", "")
    if not (_NAME.fullmatch(cluster) and _NAME.fullmatch(organization)):
        return None
    origin = f"https://{workspace}" if _NAME.fullmatch(workspace) else ""
    return _joined(f"{origin}/driver-proxy/o/{organization}/{cluster}/{port}/", path)


def _prefix(environ: Mapping[str, str], host: Host) -> str:
    """Return the base path of this kernel's Jupyter server, with a trailing slash; empty if it has none."""
    if host.name not in ("jupyter", "headless"):
        return ""
    for name in ("JUPYTERHUB_SERVICE_PREFIX", "NB_PREFIX"):
        value = environ.get(name, "").strip()
        if value:
            return quote("/" + value.strip("/"), safe="/%~@").rstrip("/") + "/"
    base = parent_server(environ).get("base_url", "")
    return f"/{str(base).strip('/')}/".replace("//", "/") if base else ""


def parent_server(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the data of the Jupyter server that started this kernel. They include its token: never show them.

    They are those of ``jupyter_server.serverapp.list_running_servers``, whose import would take more than a second. The
    result is empty if no server started this kernel, or the server runs on another machine.
    """
    environ = os.environ if environ is None else environ
    parent = environ.get("JPY_PARENT_PID", "")
    if not parent.isdigit():
        return {}
    try:
        from jupyter_core.paths import jupyter_runtime_dir

        folder = environ.get("JUPYTER_RUNTIME_DIR") or jupyter_runtime_dir()
        info = json.loads(Path(folder, f"jpserver-{parent}.json").read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError):
        return {}
    return info if isinstance(info, dict) and info.get("pid") == int(parent) else {}
