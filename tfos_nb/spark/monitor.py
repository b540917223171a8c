"""Set up sparkmonitor, which shows Spark's jobs under the cells, when we start the Spark session.

sparkmonitor has three parts. The kernel extension must be loaded from the IPython profile, since a page looks for it
when it opens the notebook. The listener in Spark's JVM sends to the extension's port. The panel is in JupyterLab. This
module connects them:

::

    listener(…) -> Listener | None         Spark's start options; None where its panel cannot be shown
    keep_quiet()                           while no page listens: else its thread ends, and Spark floods the cell
    enable(folder), disable(folder)        the line in the profile that loads the extension

Neither sparkmonitor nor Spark is imported by this module.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["EXTENSION", "LISTENER", "PORT", "Listener", "disable", "enable", "keep_quiet", "listener", "listener_jar"]

EXTENSION = "sparkmonitor.kernelextension"
LISTENER = "sparkmonitor.listener.JupyterSparkMonitorListener"
PORT = "SPARKMONITOR_KERNEL_PORT"

_CONFIG = "ipython_kernel_config.py"
_MARK = "# added by tfos_nb"
_LINE = f'c.InteractiveShellApp.extensions.append("{EXTENSION}")  {_MARK}'
_SPARK_CORE = re.compile(r"spark-core_(\d+\.\d+)-(\d+)\..*\.jar")


@dataclass(frozen=True)
class Listener:
    """What Spark must be started with: the jar, and the port in the environment of its JVM."""

    jar: Path
    port: int

    def merged(self, conf: Mapping[str, str]) -> dict[str, str]:
        """Return the settings that add the listener to those that the user has."""
        listeners, path = conf.get("spark.extraListeners", ""), conf.get("spark.driver.extraClassPath", "")
        return {
            "spark.extraListeners": _with(listeners, LISTENER, ","),
            "spark.driver.extraClassPath": _with(path, str(self.jar), os.pathsep),
        }


def _with(words: str, word: str, separator: str) -> str:
    parts = [part for part in words.split(separator) if part]
    return separator.join(parts if word in parts else [*parts, word])


class _NoPage:
    """A comm for the time in which no page has opened one: sparkmonitor's own replaces it."""

    def send(self, message: object) -> None:
        """Drop the message."""


def listener(
    jars: Path, *, shell: Any = None, environ: Mapping[str, str] | None = None, extension: ModuleType | None = None
) -> Listener | None:
    """Return Spark's start options for sparkmonitor, if its panel can be shown.

    That is only so in a kernel of a Jupyter server whose profile has loaded the extension. It is not so in nbclient or
    papermill, where no page opens the comm.

    Parameters
    ----------
    jars : pathlib.Path
        The folder with Spark's jars.
    shell, environ, extension : optional
        IPython's shell, the environment and sparkmonitor's module; those of the process by default.
    """
    environ = os.environ if environ is None else environ
    extension = sys.modules.get(EXTENSION) if extension is None else extension
    shell = _current_shell() if shell is None else shell
    monitor = getattr(extension, "monitor", None)  # there only once the extension has been loaded in a kernel
    if monitor is None or extension is None or shell is None or not shell.has_trait("kernel"):
        return None
    keep_quiet(extension)
    jar = listener_jar(jars, Path(str(extension.__file__)).parent)
    if not environ.get("JPY_SESSION_NAME") or jar is None:
        return None
    return Listener(jar, int(monitor.getPort()))


def _current_shell() -> Any:
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if callable(get_ipython) else None


def listener_jar(jars: Path, folder: Path) -> Path | None:
    """Return sparkmonitor's jar for a Spark, known by its own ``spark-core``; None if it has none for it."""
    for core in sorted(jars.glob("spark-core_*.jar")):
        found = _SPARK_CORE.fullmatch(core.name)
        if found:
            jar = folder / f"listener_spark{found[2]}_{found[1]}.jar"
            return jar if jar.is_file() else None
    return None


def keep_quiet(extension: ModuleType | None = None) -> None:
    """Give sparkmonitor's monitor a comm that drops everything, until a page opens a real one.

    Without one the first message ends its thread, and Spark then writes a stack trace into the cell for each that
    follows. Its logger, which it sets to tell of every connection in the cell, tells of warnings only.
    """
    extension = sys.modules.get(EXTENSION) if extension is None else extension
    monitor = getattr(extension, "monitor", None)
    if monitor is not None and not hasattr(monitor, "comm"):
        monitor.comm = _NoPage()
    logger = getattr(extension, "logger", None)
    if isinstance(logger, logging.Logger) and logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)


def is_installed() -> bool:
    """Whether this Python has sparkmonitor."""
    return importlib.util.find_spec("sparkmonitor") is not None


def enable(folder: Path) -> str:
    """Let kernels of an IPython profile load sparkmonitor; return what was done.

    Parameters
    ----------
    folder : pathlib.Path
        The profile's folder.
    """
    config = _config(folder)
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    if _loads_it(text):
        return f"{config} loads sparkmonitor already; nothing was changed"
    start = "" if text else "c = get_config()  # noqa: F821\n\n"
    line = "" if not text or text.endswith("\n") else "\n"
    config.parent.mkdir(parents=True, exist_ok=True)
    with config.open("a", encoding="utf-8") as file:
        file.write(f"{start}{line}{_LINE}\n")
    return f"{config} now loads sparkmonitor: restart the kernel, then reload the notebook's page"


def disable(folder: Path) -> str:
    """Take back what :func:`enable` wrote; return what was done."""
    config = _config(folder)
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if line.strip() != _LINE]
    if len(kept) == len(lines):
        also = "; a line of your own loads it" if _loads_it(text) else ""
        return f"{config} has no line of tfos_nb; nothing was changed{also}"
    config.write_text("".join(kept), encoding="utf-8")
    return f"{config} no longer loads sparkmonitor"


def _config(folder: Path) -> Path:
    return (folder / _CONFIG).resolve()  # it may be a link, which stays one


def _loads_it(text: str) -> bool:
    return any(EXTENSION in line and not line.lstrip().startswith("#") for line in text.splitlines())
