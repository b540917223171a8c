"""The Spark session, and the Spark jobs of a cluster.

:mod:`tfos_nb.spark.contexts` reads Spark's settings and state, and tags and cancels its jobs.
:mod:`tfos_nb.spark.slots` has the checks of preflight, which this module exports too.

::

    spark_session()                     the user's session, or an embedded local Spark
    resource_profile(spark, cpus, gpus) stage-level scheduling, if a node needs other resources than Spark's default
    check_dynamic_allocation(spark, need), check_slots(spark, need, feeding)   refuse a cluster that cannot run
    SparkJobs(spark, tag).run(target, description) -> Job                      one Spark action in its own thread
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import pwd
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil
import pyspark
from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from tfos_nb.errors import PlanError
from tfos_nb.runtime.control.processes import left_behind, owner
from tfos_nb.runtime.node.warm_process import DAEMON_CONF, PYTHON_DAEMON
from tfos_nb.spark.contexts import Context, check_session, context_of, is_connect
from tfos_nb.spark.contexts.named import check_server, named_spark
from tfos_nb.spark.contexts.pending_slots import ENDING_SECONDS, ending
from tfos_nb.spark.contexts.pods import refusal_in
from tfos_nb.spark.java import find_java
from tfos_nb.spark.monitor import PORT, listener
from tfos_nb.spark.slots import (
    Busy,
    SlotCounts,
    Slots,
    await_executors,
    check_dynamic_allocation,
    check_local_python,
    check_slots,
    gives_gpus,
    most_slots,
    places_beside_exchanges,
    resource_profile,
    room_for,
    slots_busy,
    slots_total,
)

__all__ = [
    "LOG_CONF",
    "REMOTE",
    "Busy",
    "Job",
    "SlotCounts",
    "Slots",
    "SparkJobs",
    "active_session",
    "await_executors",
    "check_dynamic_allocation",
    "check_local_python",
    "check_slots",
    "end_jvm",
    "gives_gpus",
    "is_stopped",
    "most_slots",
    "places_beside_exchanges",
    "resource_profile",
    "run_to_the_end",
    "session_and_format",
    "session_with",
    "slots_busy",
    "slots_total",
    "spark_session",
    "usable_session",
]

logger = logging.getLogger(__name__)

_PACKAGE = str(Path(__file__).parents[1] / "__init__.py")
LOG_CONF = "spark.tfos_nb.log"
"""Name of the setting that has the path of the embedded Spark's log."""

REMOTE = "spark.remote"
"""Name of the setting that has the URL of a Spark Connect server."""

_TASK_FAILURES = 4  # as on a real cluster; plain local[N] would give a task only one attempt
_LOG = "tfos_nb-spark-"
_POLL_SECONDS = 0.2  # Spark offers Python no event for a submitted job
_LATE_SECONDS = 1.0  # between two cancellations of an action that has not ended in time
_QUESTIONS = 3  # that Spark may leave unanswered in turn
_FINDS_SECONDS = 10.0  # time limit of an interpreter's answer; without an answer the setting is left out
_FORMAT_SECONDS = 10.0  # time limit of Spark's registration of a format; nothing fails without it
_MEBIBYTE = 1024 * 1024
_found_by: weakref.WeakSet[Any] = weakref.WeakSet()  # gateways of JVMs whose Python workers find this package
_Result = TypeVar("_Result")


def spark_session(
    slots: int | None = None, *, app_name: str = "tfos_nb", conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the user's Spark session, or start an embedded local Spark.

    Parameters
    ----------
    slots : int, optional
        Number of tasks that the embedded Spark runs at the same time. Default: the cores of this machine, at least 4.
    app_name : str
        The embedded Spark's name in its UI.
    conf : mapping of str to str, optional
        More configuration of the embedded Spark. It overrides the defaults of this function.

    Returns
    -------
    SparkSession
        An existing session is returned unchanged. The arguments apply only to a session that is started here. Its log
        is written to a file instead of the cell: ``spark.conf.get("spark.tfos_nb.log")``. The file is removed when
        Python ends.

    Raises
    ------
    PlanError
        If no session exists and no Java is found to start one, or if it cannot be started with these arguments.
    """
    if slots is not None and (type(slots) is not int or slots < 1):
        raise PlanError(
            f"slots must be a whole number, 1 or more, got {slots!r}. Give another master as "
            "spark_session(conf={'spark.master': 'spark://host:7077'})"
        )
    if conf is not None and not isinstance(conf, Mapping):
        raise PlanError(f"conf must be a dictionary, as in conf={{'spark.executor.memory': '4g'}}, got {conf!r}")
    return _with_format(_own_session(slots, app_name, conf or {}))


def session_and_format(spark: SparkSession | None, slots: int) -> tuple[SparkSession, Callable[[], None]]:
    """Return the user's session, or one that is started here, and register the TFRecord format in the background.

    Spark needs most of a second to list its formats, since it starts a Python process for that. A launch does not need
    the format.

    Returns
    -------
    SparkSession, callable
        The session, and a function that waits until the format is registered.

    Raises
    ------
    PlanError
        As in :func:`spark_session` and :func:`usable_session`.
    """
    session = _own_session(slots, "tfos_nb", {}) if spark is None else _checked(spark)
    asking = threading.Thread(target=_with_format, args=(session,), name="tfos_nb format", daemon=True)
    asking.start()
    return session, partial(asking.join, _FORMAT_SECONDS)


def session_with(settings: Mapping[str, str]) -> SparkSession:
    """Start a session with this configuration alone, in a process that has none.

    With ``spark.remote`` it is a session of that Spark Connect server, with those of the settings that it may change.
    """
    if REMOTE in settings:
        return _with_format(_remote_session(settings))
    conf = SparkConf().setAll(list(settings.items()))
    return _with_format(_start_embedded(conf, is_local=settings.get("spark.master", "local").startswith("local")))


def _remote_session(settings: Mapping[str, str]) -> SparkSession:
    session = SparkSession.builder.remote(settings[REMOTE]).getOrCreate()
    known = session.conf.getAll
    for key, value in settings.items():
        if key != REMOTE and known.get(key) != value:
            with suppress(PySparkException):  # one that only the server's own configuration can have
                session.conf.set(key, value)
    return session


def end_jvm() -> None:
    """End the JVM of a stopped session: this process starts no other one."""
    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()  # it ends with its input


def _own_session(slots: int | None, app_name: str, conf: Mapping[str, str]) -> SparkSession:
    session = active_session()
    with _refusals_of_kubernetes():
        if session is None and named_spark():
            check_server()
            session = SparkSession.builder.getOrCreate()
        return session or _start_embedded(_embedded_conf(slots, app_name, conf))


def active_session() -> SparkSession | None:
    """Return the existing Spark session, or None; never start one."""
    if "SPARK_CONNECT_MODE_ENABLED" in os.environ:  # PySpark sets it when it makes the first Spark Connect session
        from tfos_nb.spark.contexts.connect import default_session

        return default_session()
    active = SparkSession.getActiveSession()
    if active is None and SparkContext._active_spark_context is not None:
        return SparkSession.builder.getOrCreate()
    return active


def is_stopped(value: object) -> bool:
    """Return whether a value is a session that was stopped."""
    return (isinstance(value, SparkSession) or is_connect(value)) and context_of(value).stopped  # type: ignore[arg-type]


def usable_session(spark: SparkSession) -> SparkSession:
    """Check the user's session, register the TFRecord format if possible, and return the session.

    Raises
    ------
    PlanError
        If it is not a SparkSession, or was stopped.
    """
    return _with_format(_checked(spark))


def _checked(spark: SparkSession) -> SparkSession:
    check_session(spark, "leave it out, or give spark=spark")
    if context_of(spark).stopped:
        raise PlanError("the Spark session was stopped: start a new one, or leave spark out")
    return spark


def _with_format(spark: SparkSession) -> SparkSession:
    """Let a session read and write TFRecord files by the format's name, if its Spark can."""
    from tfos_nb.spark.tfrecord_source import register_quietly

    register_quietly(spark)
    return spark


def _embedded_conf(slots: int | None, app_name: str, conf: Mapping[str, str]) -> SparkConf:
    slots = slots if slots is not None else max(os.cpu_count() or 1, 4)
    memory = min(max(psutil.virtual_memory().total // _MEBIBYTE // 4, 1024), 8192)
    ours = {
        "spark.master": f"local[{slots},{_TASK_FAILURES}]",
        "spark.app.name": app_name,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": f"{memory}m",
        "spark.ui.port": "0",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
    }
    settings = {**ours, **conf}
    is_local = settings["spark.master"].startswith("local")
    if is_local and DAEMON_CONF not in settings and _workers_find_this_package():
        settings[DAEMON_CONF] = PYTHON_DAEMON
    return SparkConf().setAll(list(settings.items()))


def _workers_find_this_package() -> bool:
    """Return whether the Python workers find tfos_nb. They have the environment with which Spark's JVM was started."""
    gateway = SparkContext._gateway
    return gateway in _found_by if gateway is not None else _finds_this_package(_executors_python())


def _executors_python() -> str:
    return os.environ.get("PYSPARK_PYTHON", sys.executable)


def _finds_this_package(python: str) -> bool:
    """Return whether an interpreter that is started in another directory finds this installation of tfos_nb."""
    command = [python, "-c", "import importlib.util as u; print(u.find_spec('tfos_nb').origin)"]
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=_FINDS_SECONDS)
        return told.stdout.strip() == _PACKAGE
    return False


def _refuse_nobody() -> None:
    """Refuse a user id without a name: Hadoop's login in Spark would fail with a long Java stack trace."""
    number = os.geteuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        raise PlanError(
            f"this process runs as user {number}, who has no entry in /etc/passwd. Spark does not start without an "
            "entry. "
            f"Add it where the container starts, such as 'spark:x:{number}:0::/tmp:/bin/sh', or run as another user"
        ) from None


@contextmanager
def _refusals_of_kubernetes() -> Iterator[None]:
    """Say what Kubernetes has refused instead of a Java stack trace, if a session could not be started for that."""
    try:
        yield
    except Py4JJavaError as error:
        if refusal := refusal_in(str(error)):
            raise PlanError(
                f"Spark did not start: Kubernetes refuses what it asks for: {refusal}. docs/kubernetes/rbac.yaml has "
                "the permissions that Spark needs in its namespace"
            ) from None
        raise


def _start_embedded(conf: SparkConf, *, is_local: bool = True) -> SparkSession:
    _refuse_nobody()
    java = find_java()
    settings = {
        "JAVA_HOME": str(java.home),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_HOME": os.environ.get("SPARK_HOME", str(Path(pyspark.__file__).parent)),
    }
    if is_local:
        # Without it the executors take another python3 from PATH, and fail.
        settings["PYSPARK_PYTHON"] = _executors_python()
        # Spark does not look up the machine's name, and other machines cannot open its UI.
        settings["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    settings.update(_join_sparkmonitor(conf, Path(settings["SPARK_HOME"])))
    with _environment(settings):
        if SparkContext._gateway is not None:  # the JVM of a stopped session still runs, and is used again
            return SparkSession.builder.config(conf=conf).getOrCreate()
        log = _log_file()
        conf.set(LOG_CONF, str(log))
        with log.open("ab") as stderr:
            try:
                gateway = launch_gateway(conf, {"stderr": stderr})  # type: ignore[no-untyped-call]
            except PySparkRuntimeError as error:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                raise PlanError(f"Spark did not start on {java}. Its last output:\n{tail}") from error
        if conf.get(DAEMON_CONF) == PYTHON_DAEMON:
            _found_by.add(gateway)
        SparkContext(conf=conf, gateway=gateway)
        return SparkSession.builder.getOrCreate()


def _join_sparkmonitor(conf: SparkConf, home: Path) -> dict[str, str]:
    """Add sparkmonitor's listener if its panel can be shown; return the JVM's environment variables for it."""
    found = listener(home / "jars")
    if found is None:
        return {}
    settings = found.merged(dict(conf.getAll()))
    gateway = SparkContext._gateway
    if gateway is not None and gateway.jvm.System.getenv(PORT) != str(found.port):
        return {}  # this JVM was started without the jar, and its class path cannot be changed
    conf.setAll(list(settings.items()))
    return {PORT: str(found.port)}


def _log_file() -> Path:
    """Make the log file of the JVM, whose banners and warnings would fill the user's cell; return its path.

    Log files of processes that were killed are removed.
    """
    for path in left_behind(_LOG):
        with suppress(OSError):  # it is another user's
            os.unlink(path)
    descriptor, name = tempfile.mkstemp(prefix=f"{_LOG}{owner()}-", suffix=".log")
    os.close(descriptor)
    atexit.register(Path(name).unlink, missing_ok=True)
    return Path(name)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during the start of Spark, which passes them to all processes that it starts."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_to_the_end(frame: Any) -> Callable[[], object]:
    """Return an action that computes a DataFrame for the effects of its tasks, not for its rows."""
    return context_of(frame.sparkSession).action(frame)


class Job(Generic[_Result]):
    """A Spark action that runs in its own thread.

    Attributes
    ----------
    description : str
        The job's description in the Spark UI.
    tag : str
        The Spark job tag that only this job has.
    done : threading.Event
        Set when the action has ended, with or without an error.
    result
        The action's return value; None until it has returned.
    error : BaseException or None
        The exception that the action raised.
    cancelled : bool
        Whether :meth:`cancel` was called. Then ``error`` only reports the cancellation.
    """

    def __init__(
        self,
        context: Context,
        target: Callable[[], _Result],
        description: str,
        tags: tuple[str, str],
        then: Callable[[], object] | None = None,
    ) -> None:
        self.description = description
        self.tag = tags[-1]
        self.done = threading.Event()
        self.result: _Result | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self._is_cancelled_to_the_end = False
        self._context = context
        self._then = then
        self._thread = context.thread(partial(self._run, target, tags), f"tfos_nb {description}")

    def start(self) -> None:
        """Start the action. Call it once, after the job was stored where it can be cancelled."""
        self._thread.start()

    def _run(self, target: Callable[[], _Result], tags: tuple[str, str]) -> None:
        try:
            self._context.mark(tags, self.description)
            if not self.cancelled:
                self.result = target()
        except BaseException as error:  # noqa: BLE001 - the error is for the thread that waits for the job
            self.error = error
            ending(self.description)
        finally:
            self.done.set()
            if self._then is not None:
                self._then()

    def partitions(self) -> int:
        """Return the number of tasks in the job's last stage, its partitions; 0 while Spark does not know it."""
        if self._context.stopped or self.done.is_set():
            return 0
        return self._context.partitions(self.description)

    def cancel(self, timeout: float = 10.0) -> bool:
        """Cancel only this job, and wait until its action has ended; return whether it has.

        If it has not ended in time, it is cancelled again and again in the background: an action that submits its job
        after this call must not take slots.
        """
        self.cancelled = True
        self._cancel_until(time.monotonic() + timeout, _POLL_SECONDS)
        if not (self.done.is_set() or self._context.stopped or self._is_cancelled_to_the_end):
            self._is_cancelled_to_the_end = True
            name = f"tfos_nb cancels {self.description}"
            threading.Thread(target=self._cancel_to_the_end, name=name, daemon=True).start()
        return self.done.is_set()

    def _cancel_until(self, deadline: float, pause: float) -> None:
        # Spark ignores a cancellation before the action has submitted its job, so repeat it until the action has ended.
        while not self.done.is_set() and time.monotonic() < deadline and not self._context.stopped:
            self._context.cancel(self.tag)
            self.done.wait(pause)

    def _cancel_to_the_end(self) -> None:
        try:
            self._cancel_until(math.inf, _LATE_SECONDS)
        except Exception as error:  # noqa: BLE001 - one of py4j's many errors: Spark has ended, and its jobs with it
            logger.info("%s is no longer cancelled: %s", self.description, error)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the job's thread has ended; return whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


class SparkJobs:
    """Run the Spark jobs of one cluster, all with the same tag.

    Parameters
    ----------
    tag : str
        The cluster's own tag; no other jobs have it.

    Examples
    --------
    >>> jobs = SparkJobs(spark, "tfos_nb-mnist-1f0c")  # doctest: +SKIP
    >>> job = jobs.run(frame.collect, "mnist: nodes")  # doctest: +SKIP
    >>> job.cancel()  # doctest: +SKIP
    True
    """

    def __init__(self, spark: SparkSession, tag: str) -> None:
        self._context = context_of(spark)
        self._context.check_threads()
        if not tag or "," in tag:
            raise PlanError(f"tag must not be empty or contain a comma, got {tag!r}")
        self.tag = tag
        self._lock = threading.Lock()
        self._started = 0
        self._jobs: list[Job[Any]] = []

    def run(
        self, target: Callable[[], _Result], description: str, then: Callable[[], object] | None = None
    ) -> Job[_Result]:
        """Run an action in a daemon thread with the cluster's tag, its own tag and a description; return the job.

        ``then`` is called after ``done`` is set, so that a thread that it wakes sees the job as done.
        """
        with self._lock:
            self._jobs = [job for job in self._jobs if not job.done.is_set()]
            self._started += 1
            job = Job(self._context, target, description, (self.tag, f"{self.tag}-{self._started}"), then)
            self._jobs.append(job)  # first, so that an interrupt here leaves no job that cannot be cancelled
            job.start()
        return job

    def cancel_stage(self, stage: int, reason: str) -> None:
        """Cancel a stage of a user's job, which fails with this reason. Do not wait for Spark."""
        cancel = partial(self._context.in_time, partial(self._context.cancel_stage, stage, reason))
        threading.Thread(target=cancel, name=f"tfos_nb cancels stage {stage}", daemon=True).start()

    def room(self, job: Job[Any] | None = None) -> SlotCounts | None:
        """Return the slots that Spark has for the tasks of a job, or of a next one; None if it does not answer."""
        return self._context.in_time(partial(room_for, self._context, "" if job is None else job.description))

    def running(self) -> tuple[Job[Any], ...]:
        """Return the jobs that have not ended."""
        with self._lock:
            return tuple(job for job in self._jobs if not job.done.is_set())

    def cancel_all(self, timeout: float = 10.0) -> bool:
        """Cancel all running jobs of this cluster, and no others; return whether all have ended."""
        deadline = time.monotonic() + timeout
        ended = [job.cancel(max(deadline - time.monotonic(), _POLL_SECONDS)) for job in self.running()]
        return all(ended)

    def wait_for_slots(self, timeout: float = ENDING_SECONDS) -> None:
        """Wait until no task of the cluster holds a slot. A task holds it for a moment after its job was cancelled."""
        deadline = time.monotonic() + timeout
        nothing = threading.Event()  # Spark has no event for the end of a task, so poll
        unanswered = 0  # the scheduler may change while its tasks are counted; if Spark has ended, it never answers
        while unanswered < _QUESTIONS and time.monotonic() < deadline:
            running = self._context.in_time(partial(self._context.running, self.tag))
            if running == 0:
                return
            unanswered = unanswered + 1 if running is None else 0
            nothing.wait(_POLL_SECONDS)
