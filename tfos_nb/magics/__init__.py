"""Register the magics with IPython, for ``%load_ext tfos_nb``.

The input is the lines and cells of a notebook. The output is calls of the public API, and views of ``widgets``. Only
``tfos_nb`` imports this package.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from tfos_nb.magics.cluster import TfosMagics
from tfos_nb.magics.clusters import Launch
from tfos_nb.magics.completion import install, remove
from tfos_nb.magics.lines import ClusterLines
from tfos_nb.magics.spark import SparkLines
from tfos_nb.spark.monitor import keep_quiet

__all__ = ["load", "unload"]

_CLASSES: tuple[type[Magics], ...] = (TfosMagics, ClusterLines, SparkLines)


def load(
    ipython: InteractiveShell, launch: Launch | None = None, provided: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Register the magics and their completion with a shell. A second call replaces them.

    Parameters
    ----------
    ipython : InteractiveShell
        The user's shell.
    launch : callable, optional
        Starts a cluster, instead of :func:`tfos_nb.launch`.
    provided : mapping of str to callable, optional
        Functions that :class:`~tfos_nb.magics.lines.ClusterLines` calls instead of this package's own, by name.
    """
    unload(ipython)
    magics = TfosMagics(ipython, launch)
    ipython.register_magics(magics, ClusterLines(ipython, magics, provided), SparkLines(ipython, magics))
    install(ipython)
    keep_quiet()
    _use_session(magics.prewarm)


def _use_session(prewarm: bool) -> None:
    """If a session exists, warm its executors if ``prewarm``, and register the TFRecord format with it."""
    if "pyspark" not in sys.modules:
        return
    from tfos_nb.driver.prewarm import begin
    from tfos_nb.spark.session import active_session
    from tfos_nb.spark.tfrecord_source import register_quietly

    with contextlib.suppress(Exception):  # Spark may have died, and the magics must be loaded nevertheless
        session = active_session()
        if session is not None:
            if prewarm:
                begin(session)
            register_quietly(session)


def unload(ipython: InteractiveShell) -> None:
    """Remove the magics from a shell. Running clusters continue."""
    for magics in _CLASSES:
        for kind, names in magics.magics.items():
            for name in names:
                ipython.magics_manager.magics[kind].pop(name, None)
        ipython.magics_manager.registry.pop(magics.__name__, None)
    ipython.configurables[:] = [one for one in ipython.configurables if not isinstance(one, _CLASSES)]
    remove(ipython)
