"""The executors import TensorFlow before the first cluster asks for it.

::

    begin(spark)        a short job of two tasks an executor, which starts the application's warm process there
    settle(spark)       have that job out of the way, before a cluster counts the free slots
    look(spark)         how far each host is, for %tfos_doctor

Where the executors have no ``tfos_nb``, or Spark gives GPUs to tasks, whose nodes are never forked, nothing is begun.
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
from typing import ParamSpec

from pyspark.sql import SparkSession

from tfos_nb.driver.settings import Settings
from tfos_nb.errors import PlanError
from tfos_nb.runtime.node.warm_task import WARMTH_SCHEMA, WarmTask
from tfos_nb.runtime.program.strategies import PROTOCOL_VARIABLE
from tfos_nb.spark import session
from tfos_nb.spark.contexts import context_of
from tfos_nb.spark.session import Job, SparkJobs, run_to_the_end, slots_total
from tfos_nb.spark.slots import gives_gpus

__all__ = ["VARIABLE", "begin", "look", "settle", "spark_session", "warm_token"]

logger = logging.getLogger(__name__)

VARIABLE = "TFOS_NB_PREWARM"
_DESCRIPTION = "tfos_nb: warm the executors"
_SETTLE_SECONDS = 5.0  # its tasks take one at the most; where they wait for slots, the cluster comes first
_LOOK_SECONDS = 20.0
_WORKERS = 2  # of an executor's Python workers: a node's task is in one of them, and a task that feeds it in another

_of_this_process = secrets.token_bytes(32)
_lock = threading.Lock()
_begun: dict[Hashable, Job[dict[str, str]]] = {}  # by session

_Given = ParamSpec("_Given")


def warm_token(spark: SparkSession) -> str:
    """Return what the nodes of one application, launched by this process, know of each other and nobody else does."""
    return hmac.new(_of_this_process, str(context_of(spark).key).encode(), hashlib.sha256).hexdigest()


def begin(spark: SparkSession) -> None:
    """Begin to warm a session's executors in the background, once; ``TFOS_NB_PREWARM=0`` says not to.

    Returns at once. What goes wrong is no reason to bother anybody: the nodes of the first cluster start as they would
    have. It is in the log of ``tfos_nb.driver.prewarm``.
    """
    key = context_of(spark).key
    with _lock:
        if os.environ.get(VARIABLE, "").strip() == "0" or key in _begun:
            return
        try:
            _begun[key] = _sent(spark, Settings.warm_idle)
        except PlanError as error:  # this Spark takes no jobs of several threads; a launch says so
            logger.info("the executors are not warmed: %s", error)


def settle(spark: SparkSession) -> None:
    """Wait until the tasks that warm this session's executors have left their slots; those that have not begun, go."""
    job = _begun_for(spark)
    if job is not None and not job.done.wait(_SETTLE_SECONDS):
        job.cancel(timeout=_SETTLE_SECONDS)  # its tasks may take a moment more to leave, as check_slots knows


def look(spark: SparkSession) -> dict[str, str]:
    """Ask each executor's host whether it is warm, if they answer in time; what has begun to warm them comes first.

    Returns
    -------
    dict of str to str
        By host: ``cold``, ``importing``, ``warm``, or why it cannot be.
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
    """One job's way: it waits for executors, then runs tasks on each, which Spark deals to one after the other."""

    def __init__(self, spark: SparkSession, idle: float) -> None:
        self._spark = spark
        self._idle = idle
        self._job: Job[dict[str, str]] | None = None

    def begin(self, jobs: SparkJobs) -> Job[dict[str, str]]:
        self._job = jobs.run(self._run, _DESCRIPTION, self._say)
        return self._job

    def _run(self) -> dict[str, str]:
        """Return what the tasks say of their hosts."""
        spark, context = self._spark, context_of(self._spark)
        slots = slots_total(spark)  # once those that were asked for have come
        executors = 0 if gives_gpus(spark) else context.executors() or int(context.is_local)
        tasks = min(executors * _WORKERS, slots) if self._idle else executors  # to look, one is enough
        # What a cluster's nodes have by themselves; where the user adds what an import reads, another process is made.
        task = WarmTask(warm_token(spark), self._idle, {PROTOCOL_VARIABLE: "grpc"})
        if not tasks or (self._job is not None and self._job.cancelled):
            return {}
        frame = spark.range(0, tasks, 1, tasks).mapInArrow(task, WARMTH_SCHEMA)
        if self._idle:
            run_to_the_end(frame)()  # as the nodes' job is run: Spark compiles that once
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
