"""Import TensorFlow on the executors before the first cluster starts.

::

    begin(spark)        run a short job, two tasks per executor, which starts the application's warm process there
    settle(spark)       wait for that job, or cancel it, before a cluster counts the free slots
    look(spark)         ask each host for its state, for %tfos_doctor

Nothing is started where the executors have no ``tfos_nb``, or where Spark gives GPUs to tasks: nodes with GPUs are
never forked.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec

from pyspark.sql import SparkSession

from tfos_nb.driver.settings import Settings
from tfos_nb.errors import PlanError
from tfos_nb.runtime.node.python_daemon import wanted
from tfos_nb.runtime.node.warm_process import DAEMON_CONF, PYTHON_DAEMON, changed_on_this_host
from tfos_nb.runtime.node.warm_task import WARMTH_SCHEMA, WarmTask
from tfos_nb.runtime.program.strategies import PROTOCOL_VARIABLE
from tfos_nb.spark import session
from tfos_nb.spark.contexts import context_of
from tfos_nb.spark.session import Job, SparkJobs, run_to_the_end, slots_total
from tfos_nb.spark.slots import gives_gpus

__all__ = ["VARIABLE", "begin", "functions_with_tensorflow", "look", "settle", "spark_session", "warm_token"]

logger = logging.getLogger(__name__)

VARIABLE = "TFOS_NB_PREWARM"
_DESCRIPTION = "tfos_nb: warm the executors"
_SETTLE_SECONDS = 5.0  # its tasks take at most one; if they wait for slots, the cluster has precedence
_LOOK_SECONDS = 20.0
_WORKERS = 2  # Python workers of an executor: one for a node's task, one for a task that feeds it

_USE_DAEMON = "spark.python.use.daemon"

_of_this_process = secrets.token_bytes(32)
_lock = threading.Lock()
_begun: dict[Hashable, Job[dict[str, str]]] = {}  # by session
_changed: dict[str, dict[str, int | None]] = {}  # files, and when they were changed, by token

_Given = ParamSpec("_Given")


def warm_token(spark: SparkSession) -> str:
    """Return the secret shared by the nodes of one application that this process launches.

    In local mode the sessions of this process share it: their executor is Spark's JVM, which outlives them.
    """
    context = context_of(spark)
    key = "local" if context.is_local else str(context.key)
    return hmac.new(_of_this_process, key.encode(), hashlib.sha256).hexdigest()


def begin(spark: SparkSession) -> None:
    """Begin to warm a session's executors in the background, once; ``TFOS_NB_PREWARM=0`` disables it.

    Returns at once. A failure is only logged, to ``tfos_nb.driver.prewarm``: the nodes of the first cluster then start
    without warm processes.
    """
    key = context_of(spark).key
    with _lock:
        if os.environ.get(VARIABLE, "").strip() == "0" or key in _begun:
            return
        try:
            _begun[key] = _sent(spark, Settings.warm_idle)
        except PlanError as error:  # this Spark cannot run jobs from several threads; a launch reports that
            logger.info("the executors are not warmed: %s", error)


def functions_with_tensorflow(spark: SparkSession) -> AbstractContextManager[None]:
    """Have Spark run the Python functions that are made meanwhile in workers that find TensorFlow imported.

    Its daemon for them is forked from the application's warm process. Where Spark has another daemon than ours, where
    it gives GPUs to tasks, and with ``TFOS_NB_PREWARM=0``, nothing changes.
    """
    context = context_of(spark)
    is_ours = context.setting(DAEMON_CONF) == PYTHON_DAEMON and context.setting(_USE_DAEMON) != "false"
    if not is_ours or os.environ.get(VARIABLE, "").strip() == "0" or gives_gpus(spark):
        return nullcontext()
    token = warm_token(spark)
    return context.functions_with(wanted(token, Settings.warm_idle, _version_of_files(token)))


def _version_of_files(token: str) -> str:
    """Name the present versions of all files that have changed since a warm process on this host imported them."""
    with _lock:
        changed = _changed.setdefault(token, {})
        changed.update(changed_on_this_host(token))
        if not changed:
            return ""
        return hashlib.sha256(repr(sorted(changed.items())).encode()).hexdigest()[:8]


def settle(spark: SparkSession) -> None:
    """Wait until the tasks that warm this session's executors have left their slots; cancel those not yet begun."""
    job = _begun_for(spark)
    if job is not None and not job.done.wait(_SETTLE_SECONDS):
        job.cancel(timeout=_SETTLE_SECONDS)  # its tasks may need a moment more to leave; check_slots allows for that


def look(spark: SparkSession) -> dict[str, str]:
    """Ask each executor's host whether it is warm, after a warming that has begun; skip hosts that answer too late.

    Returns
    -------
    dict of str to str
        By host: ``cold``, ``importing``, ``warm``, or why it cannot be warmed.
    """
    deadline = time.monotonic() + _LOOK_SECONDS
    if begun := _begun_for(spark):
        begun.done.wait(_LOOK_SECONDS)
    job = _sent(spark, 0.0)
    if not job.done.wait(deadline - time.monotonic()):
        job.cancel(timeout=1.0)
    return job.result or {}


def _begun_for(spark: SparkSession) -> Job[dict[str, str]] | None:
    with _lock:
        return _begun.get(context_of(spark).key)


def _sent(spark: SparkSession, idle: float) -> Job[dict[str, str]]:
    jobs = SparkJobs(spark, f"tfos_nb-warm-{uuid.uuid4().hex[:8]}")
    return _Warming(spark, idle).begin(jobs)


class _Warming:
    """Run one job: wait for executors, then run tasks on each; Spark assigns these to one after the other."""

    def __init__(self, spark: SparkSession, idle: float) -> None:
        self._spark = spark
        self._idle = idle
        self._job: Job[dict[str, str]] | None = None

    def begin(self, jobs: SparkJobs) -> Job[dict[str, str]]:
        self._job = jobs.run(self._run, _DESCRIPTION, self._say)
        return self._job

    def _run(self) -> dict[str, str]:
        """Return the tasks' answers by host."""
        spark, context = self._spark, context_of(self._spark)
        slots = slots_total(spark)  # waits for the requested executors
        executors = 0 if gives_gpus(spark) else context.executors() or int(context.is_local)
        tasks = min(executors * _WORKERS, slots) if self._idle else executors  # one is enough for a look
        # The variables of a cluster's nodes by default. If the user adds some that an import reads, the node needs
        # another warm process.
        task = WarmTask(warm_token(spark), self._idle, {PROTOCOL_VARIABLE: "grpc"})
        if not tasks or (self._job is not None and self._job.cancelled):
            return {}
        frame = spark.range(0, tasks, 1, tasks).mapInArrow(task, WARMTH_SCHEMA)
        if self._idle:
            run_to_the_end(frame)()  # the same way as the nodes' job: Spark then compiles it only once
        rows = frame.collect()
        return {row["host"]: row["state"] for row in rows}

    def _say(self) -> None:
        job = self._job
        if job is not None:
            logger.info("warm processes: %s", job.error or job.result or "none")


def _warmed(original: Callable[_Given, SparkSession]) -> Callable[_Given, SparkSession]:
    @functools.wraps(original)
    def spark_session(*args: _Given.args, **kwargs: _Given.kwargs) -> SparkSession:
        spark = original(*args, **kwargs)
        begin(spark)
        return spark

    return spark_session


spark_session = _warmed(session.spark_session)
