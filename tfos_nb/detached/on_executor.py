"""A detached cluster's process on one of Spark's executors: a Spark task starts it, and kernels call it.

::

    kernel ── Spark Connect ──▶ a task of StartTask ── starts ──▶ process of the cluster: driver and door
           ◀─── its address and token ───────────────────────────
    kernel ── Call ──▶ its calls' door; if the kernel does not reach it, by a task of CallTask on any executor

So the cluster outlives the kernel's host, too. The process is a client of the same Spark Connect server. No task holds
it, so it needs no slot, and it ends with its host or container. The calls' door is as the nodes' one: TLS with a key of
its own, and a token. It does not take functions, so nobody can run code there by it.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.parse
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import grpc

from tfos_nb.detached.handover import answer_of, hand_over, last_lines
from tfos_nb.detached.messages import Answer, AnswerWanted, Call, CallBegun, Raised, error_of
from tfos_nb.errors import PlanError, TfosError
from tfos_nb.runtime.control.door import DoorAddress, DoorClient
from tfos_nb.runtime.control.processes import path_variable, private_directory, refuses, remove_directory, start_module
from tfos_nb.runtime.control.tunnel import TunnelEntry
from tfos_nb.runtime.control.wire import decode, encode

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from tfos_nb.detached.places import DetachedPlace
    from tfos_nb.detached.starting import DetachedLaunch

__all__ = [
    "CallTask",
    "NotReached",
    "RemoteCalls",
    "StartTask",
    "door_in_place",
    "door_of",
    "log_name",
    "log_on_executor",
    "start_on_executor",
]

_MODULE = "tfos_nb.detached.process"
_ANSWER = "answer binary"
_SERVER_PORT, _SERVER_WITHIN = 15_002, 10.0  # Spark's default; seconds for a connection
_REACHED_WITHIN = 1.0  # seconds for a connection to the process, if the kernel reaches it
_ANSWERED_WITHIN = 10.0  # seconds: it says at once that it has begun
_ASKED_FOR = 1.0  # seconds for which a task waits for an answer: it holds a slot
_LOOK_SECONDS, _LOOK_SECONDS_MOST = 0.02, 0.5
_PAUSE_BY_TASKS = 4.0  # seconds between two tasks that ask for the same answer
_AGAIN_AFTER, _AGAIN_FOR = 2.0, 600.0  # seconds, if the process is not reached; a host that sleeps does not count them
_DIRECT_AGAIN_AFTER = 60.0  # seconds
_NO_TLS = ("HTTP_REQUEST", "RECORD_LAYER_FAILURE", "WRONG_VERSION_NUMBER")  # OpenSSL's reasons
_GONE, _UNREACHED = "ConnectionError", "NotReached"
_SLOT_WITHIN = 60.0  # seconds for a task's slot
_STARTED_WITHIN = 360.0
_OF_THE_WORKER = ("PYTHON_WORKER_FACTORY_", "PYTHON_DAEMON_", "SPARK_REMOTE", "SPARK_CONNECT_", "SPARK_LOCAL_REMOTE")


@dataclass(frozen=True)
class StartTask:
    """Spark task that starts a detached cluster's process beside its executor.

    ``launch`` is the pickled :class:`~tfos_nb.detached.starting.DetachedLaunch`, which comes from the kernel as this
    task does. ``host`` and ``port`` are the Spark Connect server's. ``variables`` are added to the environment.
    """

    id: str
    launch: bytes = field(repr=False)
    host: str
    port: int
    variables: dict[str, str] = field(default_factory=dict, repr=False)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return where the process answers; it submits its nodes then, which may need this task's slot."""
        deque(batches, maxlen=0)
        yield _row(self._refusal() or self._started())

    def _refusal(self) -> Raised | None:
        """Return an error if this host does not reach the server, which a client would try for minutes."""
        try:
            socket.create_connection((self.host, self.port), _SERVER_WITHIN).close()
        except OSError as error:
            return Raised(
                "PlanError",
                f"detach='executor': executor host {socket.gethostname()} does not reach the Spark Connect server at "
                f"{self.host}:{self.port} ({error}), where the cluster's process must be a client. Make the session "
                "with a URL that is valid there, too",
            )
        return None

    def _started(self) -> Any:
        log = log_on_executor(self.id)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_WORKER)}
        ready, told = os.pipe()
        try:
            with open(log, "xb", opener=_for_this_user) as output:
                process = start_module(
                    _MODULE,
                    env={**environment, **self.variables, "PYTHONPATH": path_variable()},
                    fds=(told,),
                    arguments=(str(told),),
                    stdin=subprocess.PIPE,
                    stdout=output.fileno(),
                    stderr=output.fileno(),
                )
        finally:
            os.close(told)
        with os.fdopen(ready, "rb") as answers:
            hand_over(process, self.launch)
            answer = answer_of(answers)
        if isinstance(answer, (Answer, Raised)):
            return answer
        process.kill()
        where = f"the process on executor host {socket.gethostname()} did not start"
        return Raised("TfosError", f"{where}. Its last output:\n{last_lines(log)}")


def log_name(id: str) -> str:
    """Return the name of the file of a process's output, in its host's temporary directory."""
    return f"tfos_nb-log-{id}"


def log_on_executor(id: str) -> str:
    """Return the file of the output of a process on this host. The process removes it when it ends by itself."""
    return os.path.join(tempfile.gettempdir(), log_name(id))


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@dataclass(frozen=True)
class CallTask:
    """Spark task that asks a detached cluster's process, for a kernel that does not reach it."""

    door: DoorAddress
    question: bytes = field(repr=False)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return the answer, or the key by which to ask for it again."""
        deque(batches, maxlen=0)
        with DoorClient(self.door) as door:
            try:
                yield _row(_ask(door, decode(self.question), _ASKED_FOR))
            except grpc.RpcError as error:
                kind = _GONE if _has_gone(self.door) else _UNREACHED
                yield _row(Raised(kind, str(error.code().name)))


def _row(answer: Any) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_pydict({"answer": pa.array([encode(answer)], pa.binary())})


def _ask(door: DoorClient, question: Any, seconds: float) -> Any:
    """Ask the process for some seconds; return its answer, or :class:`CallBegun` if there is none yet."""
    until, never, pause = time.monotonic() + seconds, threading.Event(), _LOOK_SECONDS
    answer = door.ask(question, _ANSWERED_WITHIN)
    while isinstance(answer, CallBegun) and time.monotonic() < until:
        never.wait(pause)
        pause = min(2 * pause, _LOOK_SECONDS_MOST)
        answer = door.ask(AnswerWanted(answer.key), _ANSWERED_WITHIN)
    return answer


def start_on_executor(session: SparkSession, launch: DetachedLaunch, variables: dict[str, str]) -> DetachedPlace:
    """Start a cluster's process on an executor, with these environment variables; return where it answers.

    Raises
    ------
    TfosError
        If it does not start; the message has its last output.
    """
    from tfos_nb.detached.places import place_of
    from tfos_nb.spark.session import REMOTE

    assert launch.spark is not None, "it has the server's URL"
    what = f"tfos_nb cluster {launch.plan.name}: start its process"
    server = urllib.parse.urlparse(launch.spark[REMOTE])
    task = StartTask(launch.id, pickle.dumps(launch), server.hostname or "", server.port or _SERVER_PORT, variables)
    answer = _run(session, f"tfos_nb-{launch.id}", what, task, _STARTED_WITHIN)
    if isinstance(answer, Raised):
        raise error_of(answer)
    return place_of(answer.value)


def _run(session: SparkSession, tag: str, what: str, task: Any, seconds: float) -> Any:
    """Run a task of one partition; return the message that it returns."""
    from tfos_nb.driver.launching import error_of_job
    from tfos_nb.spark.session import SparkJobs

    frame = session.range(0, 1, 1, 1).mapInArrow(task, _ANSWER)
    job = SparkJobs(session, tag).run(frame.collect, what)
    try:
        if not job.done.wait(seconds):
            raise TfosError(
                f"{what}: its task has not ended after {seconds:g} s. Look at Spark's page whether it has got a slot"
            )
    finally:
        if not job.done.is_set():
            job.cancel()
    if job.error is not None:
        raise error_of_job(job.error, f"{what} failed")
    return decode(bytes(job.result[0][0]))  # type: ignore[index]


def door_of(place: DetachedPlace) -> DoorAddress:
    """Return the address of a process's calls' door."""
    door = place.door
    return DoorAddress(door["host"], door["port"], door["certificate"].encode(), door["token"])


def door_in_place(address: DoorAddress) -> dict[str, Any]:
    """Return the address as a place's file has it."""
    certificate = address.certificate.decode()
    return {"host": address.host, "port": address.port, "certificate": certificate, "token": address.token}


class NotReached(TfosError):
    """A process on an executor does not answer at the moment, and nothing says that it has gone."""


class RemoteCalls:
    """Calls of a process on an executor: over the network, or by Spark tasks if the kernel does not reach it.

    Parameters
    ----------
    place : DetachedPlace
        Where the process answers.
    session : SparkSession, optional
        Runs the tasks. Default: the active one.

    Raises
    ------
    ConnectionError
        If the process has gone.
    PlanError
        If the kernel does not reach the process and has no session.
    """

    def __init__(self, place: DetachedPlace, session: SparkSession | None = None) -> None:
        from tfos_nb.driver.relaying import stated_relay

        self._place, self._door, self._session = place, door_of(place), session
        self._client = DoorClient(self._door)
        self._lock = threading.Lock()
        self._entry: TunnelEntry | None = None
        self._direct_from = math.inf if stated_relay() == "1" else 0.0  # monotonic time
        if self.by_tasks or _is_reached(self._door):
            return
        if _has_gone(self._door):
            raise ConnectionError("the process does not listen there")
        self._by_tasks_for_now()
        if self._session_for_tasks() is None:
            raise PlanError(
                f"{place.name}: its process is on an executor ({self._door.host}:{self._door.port}), which this "
                "kernel does not reach. Start a session at the same Spark first: tasks then carry the calls"
            )

    @property
    def by_tasks(self) -> bool:
        """Whether Spark tasks carry the next call, which takes a slot for a moment."""
        return time.monotonic() < self._direct_from

    def ask(self, call: Call) -> Any:
        """Make a call; return its answer, however long that takes.

        Raises
        ------
        ConnectionError
            If the process has gone.
        NotReached
            If it cannot be reached: for ten minutes, if the call had begun.
        """
        answer, never = self._asked(replace(call, key=uuid.uuid4().hex)), threading.Event()
        while isinstance(answer, CallBegun):
            if self.by_tasks:
                never.wait(_PAUSE_BY_TASKS)
            answer = self._followed(AnswerWanted(answer.key))
        return answer

    def tensorboard_socket(self) -> str:
        """Return a unix socket of this kernel whose connections come out at the process's own one.

        Raises
        ------
        NotReached
            If tasks carry the calls: they do not carry TensorBoard's bytes.
        """
        if self.by_tasks:
            raise NotReached(
                f"{self._place.name}: this kernel does not reach {self._door.host}:{self._door.port}, where the "
                "cluster's process is"
            )
        with self._lock:
            if self._entry is None:
                directory = private_directory("tunnel")
                atexit.register(remove_directory, directory)
                self._entry = TunnelEntry(self._client, os.path.join(directory, "tensorboard"))
            return self._entry.path

    def close_tunnel(self) -> None:
        """Remove that socket, if there is one: the cluster has ended."""
        with self._lock:
            entry, self._entry = self._entry, None
        if entry is not None:
            entry.close()
            remove_directory(os.path.dirname(entry.path))

    def _followed(self, question: AnswerWanted) -> Any:
        """Ask for the answer to a call, again and again while the process cannot be reached: there the call goes on."""
        deadline, never = time.monotonic() + _AGAIN_FOR, threading.Event()
        while True:
            try:
                return self._asked(question)
            except NotReached:
                if time.monotonic() > deadline:
                    raise
                never.wait(_AGAIN_AFTER)

    def _asked(self, question: Any) -> Any:
        if not self.by_tasks:
            try:
                return _ask(self._client, question, _ASKED_FOR)
            except grpc.RpcError as error:
                if _has_gone(self._door):
                    raise ConnectionError("the process does not listen there") from None
                self._by_tasks_for_now()
                if self._session_for_tasks() is None:
                    raise NotReached(self._unanswered(error.code().name)) from None
        return self._asked_by_task(question)

    def _asked_by_task(self, question: Any) -> Any:
        session = self._session_for_tasks()
        if session is None:
            raise NotReached(self._unanswered("no Spark session is active, whose tasks could carry the call"))
        what = f"tfos_nb cluster {self._place.name}: ask its process"
        try:
            answer = _run(
                session, f"tfos_nb-{self._place.id}-calls", what, CallTask(self._door, encode(question)), _SLOT_WITHIN
            )
        except Exception as error:  # Spark's errors have many classes
            raise NotReached(self._unanswered(str(error))) from error
        if isinstance(answer, Raised) and answer.kind == _GONE:
            raise ConnectionError(answer.text)
        if isinstance(answer, Raised) and answer.kind == _UNREACHED:
            raise NotReached(self._unanswered(answer.text))
        return answer

    def _session_for_tasks(self) -> SparkSession | None:
        from tfos_nb.spark.session import active_session

        self._session = self._session or active_session()
        return self._session

    def _by_tasks_for_now(self) -> None:
        self._direct_from = max(self._direct_from, time.monotonic() + _DIRECT_AGAIN_AFTER)

    def _unanswered(self, why: str) -> str:
        where = f"{self._door.host}:{self._door.port}"
        return f"{self._place.name}: its process at {where} does not answer at the moment ({why}). It may still train"


def _has_gone(door: DoorAddress) -> bool:
    """Whether no process listens at a door's address any more, or another program has taken the port.

    That is known of a program that answers without TLS, or with another certificate.
    """
    if refuses(door.host, door.port):
        return True
    try:
        shown = ssl.get_server_certificate((door.host, door.port), timeout=_REACHED_WITHIN)
    except ssl.SSLError as error:
        return error.reason in _NO_TLS
    except OSError:
        return False
    return ssl.PEM_cert_to_DER_cert(shown) != ssl.PEM_cert_to_DER_cert(door.certificate.decode())


def _is_reached(door: DoorAddress) -> bool:
    try:
        with socket.create_connection((door.host, door.port), _REACHED_WITHIN):
            return True
    except OSError:
        return False
