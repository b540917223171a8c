"""Daemon that forks Spark's Python workers, which start with what they need imported.

::

    executor's JVM ──starts──▶ this module ── pyspark.daemon ──fork──▶ workers, of every other function
                   ──starts──▶ this module ··· warm process ──fork──▶ pyspark.daemon ──fork──▶ workers that apply models

Spark starts the module that ``spark.python.daemon.module`` names, once for each set of environment variables of Python
functions. If :data:`VARIABLE` is one of them, the daemon is forked from the application's warm process
(:mod:`tfos_nb.runtime.node.warm_process`), which has imported TensorFlow, and this process only waits for its end.
Without that variable, on a host with GPUs, and if the warm process cannot be reached, this process itself is PySpark's
daemon. It imports what the tasks of a cluster import, without TensorFlow: a new worker of theirs would need 0.35 s for
it, and after a loss several start beside the nodes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import signal
import sys
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfos_nb.runtime.node.warm_process import ForkedProcess

__all__ = ["VARIABLE", "wanted"]

logger = logging.getLogger(__name__)

VARIABLE = "TFOS_NB_PYTHON_DAEMON"
_TASKS = ("tfos_nb.runtime.feed.feed_task", "tfos_nb.runtime.node.spark_task")
_PYTHON, _SITE = 1, 3  # parents of pyspark.zip that may contain the package
_MEMORY_LIMIT = "PYSPARK_EXECUTOR_MEMORY_MB"
_LOOKS = 10  # at the daemon's workers, in the time after which it ends
_FIRST_WITHIN = 30.0  # seconds to the first worker: Spark may have stopped while TensorFlow was imported


def wanted(token: str, idle: float, version: str = "") -> dict[str, str]:
    """Return the environment variables that let a Python function run in a worker that has imported TensorFlow.

    Parameters
    ----------
    token : str
        The application's token.
    idle : float
        Seconds after which an unused warm process ends.
    version : str, optional
        Names the versions of the imported files. Spark starts another daemon for another one.
    """
    return {VARIABLE: f"{token} {idle:g} {version}".rstrip()}


def run() -> None:
    """Run PySpark's daemon, or wait for the one that the warm process has forked."""
    wish = os.environ.pop(VARIABLE, "")
    if wish and (forked := _forked_if_possible(wish)):
        sys.exit(_wait(forked))
    daemon = _pyspark_daemon()
    if not os.environ.get(_MEMORY_LIMIT):  # it limits each worker's addresses, of which imported libraries use many
        _import_tasks()
    daemon.manager()


def _import_tasks() -> None:
    """Import the modules of a cluster's tasks. Without them Spark's workers of other functions work as well."""
    try:
        for task in _TASKS:
            importlib.import_module(task)
    except Exception as error:  # noqa: BLE001 - whatever it is, the task that needs the module will raise it
        why = f"{type(error).__name__}: {error}"
        logger.warning("Spark's Python workers import the tasks' modules themselves: %s", why)
    os.register_at_fork(after_in_child=partial(_begin_worker, os.getpid()))
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages of all imported objects


def _forked_if_possible(wish: str) -> ForkedProcess | None:
    """Fork the daemon as :func:`wanted`; if that fails, say why in the executor's log and return None."""
    token, _, others = wish.partition(" ")
    if os.environ.get(_MEMORY_LIMIT):
        logger.warning("Spark's Python workers import TensorFlow themselves: spark.executor.pyspark.memory limits them")
        return None
    try:
        return _forked(token, float(others.split(" ")[0]))
    except ValueError:  # of another version; its message would contain a part of the variable
        why = f"the value of {VARIABLE} is not understood"
    except OSError as error:
        why = f"the warm process cannot be reached: {type(error).__name__}: {error}"
    logger.warning("Spark's Python workers import TensorFlow themselves: %s", why)
    return None


def _forked(token: str, idle: float) -> ForkedProcess | None:
    """Fork the daemon from the warm process and return it; return None on a host with GPUs or without pidfd."""
    # Imported here, because the workers of all other functions do not need these modules.
    from tfos_nb.runtime.host.gpu import host_has_gpus
    from tfos_nb.runtime.node.process import environment_to_warm
    from tfos_nb.runtime.node.warm_process import PYTHON_DAEMON, Fork, ServerTerms, WarmProcess, can_fork

    if host_has_gpus() or not can_fork():
        return None
    env = environment_to_warm({})
    terms = ServerTerms(token, os.getppid(), idle)
    warm = WarmProcess.of_the_application(env, terms, variables={**env, **os.environ})
    try:
        return warm.fork(Fork(PYTHON_DAEMON, (f"{idle:g}", *sys.argv[1:])), (0, 1), output=2)
    except OSError:
        warm.close()
        raise


def _wait(daemon: ForkedProcess) -> int:
    """Wait for the daemon and return its exit code. This process closes the JVM's pipes: only the daemon uses them."""
    signal.signal(signal.SIGTERM, partial(_terminate, daemon.pid))
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    return abs(daemon.wait())


def _terminate(pid: int, *_: object) -> None:
    """Handle a signal by sending SIGTERM to the daemon."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _pyspark_daemon() -> Any:
    _import_unzipped()
    return importlib.import_module("pyspark.daemon")


def _import_unzipped() -> None:
    """Import PySpark from the directory beside its zip file, which Spark puts on the path.

    From a zip file, each daemon compiles all modules anew, in 0.7 s. The directory belongs to the same Spark: in its
    distribution, ``python/lib/pyspark.zip`` has ``python/pyspark`` beside it, and the package of PyPI contains both.
    """
    zipped = next((Path(place) for place in sys.path if Path(place).name == "pyspark.zip"), None)
    if zipped is None or len(zipped.parents) <= _SITE or "pyspark" in sys.modules:
        return
    for home in (zipped.parents[_PYTHON], zipped.parents[_SITE]):
        if (home / "pyspark" / "daemon.py").is_file():
            spec = PathFinder.find_spec("pyspark", [str(home)])
            if spec is not None and spec.loader is not None:
                sys.modules["pyspark"] = package = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(package)
                return


def main() -> None:
    """Run PySpark's daemon in a process that was forked from the warm process."""
    from tfos_nb.runtime.control.processes import PARENT_VARIABLE, name_this_process

    for given, descriptor in enumerate(map(int, sys.argv[1:3])):
        os.dup2(descriptor, given)
        os.close(descriptor)
    idle = float(sys.argv[3])
    sys.argv[1:4] = []
    os.environ.pop(PARENT_VARIABLE, None)
    os.register_at_fork(after_in_child=partial(_begin_worker, os.getpid()))
    name_this_process("pyspark.daemon")
    _IdleWatch(idle).start()
    _pyspark_daemon().manager()


def _begin_worker(daemon: int) -> None:
    """Undo in a worker what is the daemon's. The processes that a worker's program forks stay as it makes them."""
    if os.getppid() == daemon:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # otherwise all workers would draw the same numbers


class _IdleWatch:
    """Ends this daemon after ``idle`` seconds without a worker. Spark starts another one when it needs it.

    Spark ends idle workers, and never a daemon, which holds TensorFlow's memory. A daemon that has had no worker yet
    ends sooner, and so does one without a worker if the memory is nearly used up.
    """

    def __init__(self, idle: float) -> None:
        self._every = min(idle, _FIRST_WITHIN) / _LOOKS
        self._most = _LOOKS  # looks in a row that find no worker
        self._most_later = round(idle / self._every)
        self._daemon = os.getpid()
        self._looks = 0

    def start(self) -> None:
        """Look from now on; a forked worker does not."""
        signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, self._every, self._every)

    def _look(self, *_: object) -> None:
        if _has_children(self._daemon):
            self._looks, self._most = 0, self._most_later
            return
        self._looks += 1
        if self._looks >= self._most or _lacks_memory():
            os.kill(self._daemon, signal.SIGTERM)


def _lacks_memory() -> bool:
    from tfos_nb.runtime.node.warm_process import lacks_memory

    return lacks_memory()


def _has_children(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().strip())
    except OSError:  # a kernel without this file
        return True


if __name__ == "__main__":
    run()
