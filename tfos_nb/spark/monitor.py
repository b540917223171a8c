"""Set up sparkmonitor, which shows Spark's jobs below the cells, when tfos_nb starts the Spark session.

sparkmonitor has three parts. The kernel extension must be loaded from the IPython profile, since a page looks for it
when it opens the notebook. The listener in Spark's JVM sends to the extension's port. The panel is in JupyterLab. This
module connects them:

::

    listener(…) -> Listener | None         Spark's start options; None if sparkmonitor's panel cannot be shown
    keep_quiet()                           drop its messages while no page listens, or Spark floods the cell
    enable(folder), disable(folder)        add or remove the line in the profile that loads the extension

This module imports neither sparkmonitor nor Spark.
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

from tfos_nb.errors import current_shell

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
    """Start options of Spark: the listener's jar, and the port for the environment of the JVM."""

    jar: Path
    port: int

    def merged(self, conf: Mapping[str, str]) -> dict[str, str]:
        """Return the settings that add the listener to the user's listeners and class path."""
        listeners, path = conf.get("spark.extraListeners", ""), conf.get("spark.driver.extraClassPath", "")
        return {
            "spark.extraListeners": _with(listeners, LISTENER, ","),
            "spark.driver.extraClassPath": _with(path, str(self.jar), os.pathsep),
        }


def _with(words: str, word: str, separator: str) -> str:
    parts = [part for part in words.split(separator) if part]
    return separator.join(parts if word in parts else [*parts, word])


class _NoPage:
    """A comm that is used until a page opens one, and sparkmonitor replaces this one by it."""

    def send(self, message: object) -> None:
        """Drop the message."""


def listener(
    jars: Path, *, shell: Any = None, environ: Mapping[str, str] | None = None, extension: ModuleType | None = None
) -> Listener | None:
    """Return Spark's start options for sparkmonitor, if its panel can be shown.

    The panel can be shown only in a kernel of a Jupyter server whose profile has loaded the extension. It cannot be
    shown in nbclient or papermill, where no page opens the comm.

    Parameters
    ----------
    jars : pathlib.Path
        The folder with Spark's jars.
    shell, environ, extension : optional
        IPython's shell, the environment and sparkmonitor's module. Default: those of this process.

    Returns
    -------
    Listener or None
        None if the panel cannot be shown.
    """
    environ = os.environ if environ is None else environ
    extension = sys.modules.get(EXTENSION) if extension is None else extension
    shell = current_shell() if shell is None else shell
    monitor = getattr(extension, "monitor", None)  # exists only after the extension was loaded in a kernel
    if monitor is None or extension is None or shell is None or not shell.has_trait("kernel"):
        return None
    keep_quiet(extension)
    jar = listener_jar(jars, Path(str(extension.__file__)).parent)
    if not environ.get("JPY_SESSION_NAME") or jar is None:
        return None
    return Listener(jar, int(monitor.getPort()))


def listener_jar(jars: Path, folder: Path) -> Path | None:
    """Return sparkmonitor's jar for the Spark version of the ``spark-core`` jar in ``jars``; None if it has none."""
    for core in sorted(jars.glob("spark-core_*.jar")):
        found = _SPARK_CORE.fullmatch(core.name)
        if found:
            jar = folder / f"listener_spark{found[2]}_{found[1]}.jar"
            return jar if jar.is_file() else None
    return None


def keep_quiet(extension: ModuleType | None = None) -> None:
    """Give sparkmonitor's monitor a comm that drops everything, until a page opens a real one.

    Without a comm the first message ends the monitor's thread. Spark then writes a stack trace into the cell for each
    further message. The level of sparkmonitor's logger is raised to WARNING, since it logs every connection in the
    cell.
    """
    extension = sys.modules.get(EXTENSION) if extension is None else extension
    monitor = getattr(extension, "monitor", None)
    if monitor is not None and not hasattr(monitor, "comm"):
        monitor.comm = _NoPage()
    logger = getattr(extension, "logger", None)
    if isinstance(logger, logging.Logger) and logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)


def is_installed() -> bool:
    """Return whether this Python has sparkmonitor."""
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
    """Remove the line that :func:`enable` wrote; return what was done."""
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
    return (folder / _CONFIG).resolve()  # it may be a link, which must stay a link


def _loads_it(text: str) -> bool:
    return any(EXTENSION in line and not line.lstrip().startswith("#") for line in text.splitlines())
