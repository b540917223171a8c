"""Check whether executors reach this process: it listens like a cluster's driver, and a Spark task connects to it."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import PlanError, TfosError
from tfos_nb.runtime.node.executor_probe import GREETING, PROBE_SCHEMA, PROBE_SECONDS, Probe
from tfos_nb.spark.session import SparkJobs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["listening", "look_from_executor"]


def look_from_executor(
    spark: SparkSession, host: str, bind: str, ports: range, modules: tuple[str, ...] = ()
) -> tuple[int, Any]:
    """Run a task that checks its Python and connects to this process.

    Returns
    -------
    int, pyspark.sql.Row
        The port on which this process listened, and the row of the :class:`Probe`.

    Raises
    ------
    PlanError
        If this process cannot listen on any of the ports.
    TfosError
        If the task fails or does not return in time.
    """
    with listening(bind, ports) as port:
        jobs = SparkJobs(spark, f"tfos_nb-look-{uuid.uuid4().hex[:8]}")
        probe = Probe(host, port, modules)
        job = jobs.run(spark.range(0, 1, 1, 1).mapInArrow(probe, PROBE_SCHEMA).collect, "tfos_nb: a look from here")
        if not job.done.wait(PROBE_SECONDS):
            job.cancel(timeout=1.0)
            raise TfosError(f"a task did not end within {PROBE_SECONDS:g} s")
        if job.error is not None:
            raise job.error
        if not job.result:
            raise TfosError("a task returned no row")
        return port, job.result[0]


@contextmanager
def listening(bind: str, ports: range) -> Iterator[int]:
    """Listen like a cluster's driver, and send the greeting to each client; yield the port."""
    listener = _first_free(bind, ports)
    over = threading.Event()
    threading.Thread(target=_greet, args=(listener, over), name="tfos_nb port", daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        over.set()
        listener.close()


def _first_free(bind: str, ports: range) -> socket.socket:
    reason: OSError | None = None
    for port in ports:
        try:
            return socket.create_server((bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)
        except OSError as error:
            reason = error
    raise PlanError(f"cannot listen on {bind}, port {ports[0]}-{ports[-1]}: {reason}")


def _greet(listener: socket.socket, over: threading.Event) -> None:
    listener.settimeout(0.2)
    while not over.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        with connection:
            connection.sendall(GREETING)
