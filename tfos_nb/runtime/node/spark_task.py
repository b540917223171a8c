"""Run a node in a Spark task.

The task starts the node's supervisor and usually waits for it. So it holds its Spark slot, and Spark accounts for the
CPU and the GPU. If the nodes use every slot, none is left for the tasks that feed rows. Then the task leaves the
supervisor running and returns (``hold=False``), and only the driver watches the node. The same happens later if an
executor is lost and Spark retries its tasks in the remaining slots.

The node does not end with the task. Spark ends all Python processes of an executor when it interrupts a task while that
task's Python starts ("Lost connection to Python daemon, attempting to restart", PySpark 4). So a failing query of the
user would end the training. Spark then retries this task on some executor. The driver answers that its node still runs,
and the task only holds a slot for it.

If the cluster may start its nodes again, a task whose supervisor has ended asks whether another is wanted, and starts
it. The new one finds the node's rows and states, which the task holds (:mod:`tfos_nb.runtime.node.node_files`). A
supervisor also ends when it is cut off from the driver; the task then keeps asking for a while.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

import grpc
import psutil
import pyarrow as pa

from tfos_nb.runtime.control.door import DoorAddress, DoorClient
from tfos_nb.runtime.control.lifecycle import NodeJob
from tfos_nb.runtime.control.processes import kill_group, path_variable, refuses, start_module, write_frame
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.host.output import without_chatter
from tfos_nb.runtime.node.node_files import NodeFiles

__all__ = [
    "HoldsSlot",
    "NodeTask",
    "NodeThere",
    "NodeWanted",
    "SlotUse",
    "SupervisorEnded",
    "executor_process",
    "slot_use",
]

SUMMARY_SCHEMA = "node string, code int"
_LOOK_SECONDS = 1.0
_ASK_SECONDS = 5.0
_DECIDED_SECONDS = 0.05  # the driver needs no more, as a rule, to find out which node failed first
_CUT_OFF_SECONDS = 30.0  # in which an unreachable driver may come back; a supervisor waits less long
_UNREACHED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_ASKED_A_SECOND = 20  # questions of the tasks of one job


@message
@dataclass(frozen=True)
class NodeThere:
    """Question of a task: whether another attempt has already brought its node into the cluster."""

    node: str


@message
@dataclass(frozen=True)
class NodeWanted:
    """Question of a task whose supervisor has ended: whether to start another. Answer None: not decided yet."""

    node: str
    executor: str = ""


@message
@dataclass(frozen=True)
class HoldsSlot:
    """Question of a task that holds a slot for its node: what to do with the slot.

    ``pid`` is its supervisor's process id, if it has started one. ``machine`` is the host name where that id is valid,
    since each container has its own ids. ``executor`` is Spark's name of the task's executor.

    Answer: the value of a :class:`SlotUse`.
    """

    node: str
    pid: int = 0
    machine: str = ""
    executor: str = ""


class SlotUse(Enum):
    """Actions of a task on its slot."""

    HOLD = "hold"
    """Keep it: the node runs on it."""

    END = "end"
    """Kill the supervisor: it is silent, and the driver has dropped it."""

    LEAVE = "leave"
    """Leave it to the tasks that feed rows: the node continues without a task."""


@message
@dataclass(frozen=True)
class SupervisorEnded:
    """Message of a task: its supervisor has ended, with this exit code and this output."""

    node: str
    code: int
    text: str
    pid: int = 0
    machine: str = ""


@dataclass(frozen=True)
class NodeTask:
    """Run the node that belongs to this task's partition, by ``DataFrame.mapInArrow`` over one partition a node."""

    nodes: tuple[str, ...]
    cluster: str
    door: DoorAddress
    hold: bool
    fed: frozenset[str]
    settings: dict[str, object]
    env: dict[str, str]
    python_path: tuple[str, ...]
    payload: bytes = field(repr=False)
    claims: frozenset[str] = frozenset()
    gpus: int = 0
    warm_token: str = field(default="", repr=False)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the node until it ends or the task leaves it."""
        deque(batches, maxlen=0)
        job = self._job()
        with DoorClient(self.door) as door, contextlib.closing(_Held()) as held:
            code = 0 if self._is_there(job.node, door) else self._run(job, door, held)
            if self.hold and code is not None:
                code = self._stay(job, door, held, code)
        yield pa.RecordBatch.from_pydict({"node": pa.array([job.node]), "code": pa.array([code or 0], pa.int32())})

    def _stay(self, job: NodeJob, door: DoorClient, held: _Held, code: int | None) -> int | None:
        """Hold the slot, and start the node again if wanted; return its last exit code, or None if it continues."""
        never = threading.Event()
        while code is not None and (there := self._whether_there(job, door)) is not None:
            if not there:
                code = self._run(job, door, held)
                continue
            held.close()  # the node has others where it runs
            if slot_use(HoldsSlot(job.node, executor=job.executor), door) is SlotUse.LEAVE:
                return None
            never.wait(_LOOK_SECONDS)
        return code

    def _whether_there(self, job: NodeJob, door: DoorClient) -> bool | None:
        """Return True if the node already runs, False if it must be started, None if neither or without a driver."""
        never, gone_at = threading.Event(), math.inf
        while time.monotonic() < gone_at:
            try:
                if door.ask(NodeThere(job.node)):
                    return True
                return False if self._is_wanted(job, door) else None
            except grpc.RpcError as error:
                if error.code() not in _UNREACHED or refuses(self.door.host, self.door.port):
                    return None
                gone_at = min(gone_at, time.monotonic() + _CUT_OFF_SECONDS)
                never.wait(_LOOK_SECONDS)
        return None

    def _job(self) -> NodeJob:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "a NodeTask runs inside a Spark task"
        node = self.nodes[context.partitionId()]
        gpus = context.resources().get("gpu")
        return NodeJob(
            node=node,
            cluster=self.cluster,
            attempt=context.attemptNumber(),
            executor=_executor_name(),
            door_host=self.door.host,
            door_port=self.door.port,
            relayed=self.door.relayed,
            gpus=tuple(gpus.addresses) if gpus is not None else (),
            claim=self.gpus if node in self.claims else 0,
            env=self.env,
            python_path=self.python_path,
            settings={**self.settings, "fed": node in self.fed},
            certificate=self.door.certificate,
            token=self.door.token,
            payload=self.payload,
            warm_token=self.warm_token,
            anchor=executor_process(),
        )

    @staticmethod
    def _is_there(node: str, door: DoorClient) -> bool:
        with contextlib.suppress(grpc.RpcError):  # without a driver there is no node
            return bool(door.ask(NodeThere(node)))
        return False

    def _is_wanted(self, job: NodeJob, door: DoorClient) -> bool:
        never, pause = threading.Event(), _LOOK_SECONDS / 4 if self.door.relayed else _DECIDED_SECONDS
        while (wanted := door.ask(NodeWanted(job.node, job.executor))) is None:
            never.wait(pause)
            pause = min(2 * pause, _LOOK_SECONDS / 4)
        return bool(wanted)

    def _run(self, job: NodeJob, door: DoorClient, held: _Held) -> int | None:
        """Run a supervisor to its end and return its code; None if it continues without this task."""
        if self.hold and job.settings.get("restarts"):
            job = replace(job, files=held.descriptors())
        with tempfile.TemporaryFile() as complaints:
            supervisor = start_module(
                "tfos_nb.runtime.node.supervisor",
                env={**os.environ, "PYTHONPATH": path_variable()},
                fds=tuple(itertools.chain(*job.files)),
                stdin=subprocess.PIPE,
                stderr=complaints.fileno() if self.hold else subprocess.DEVNULL,
            )
            assert supervisor.stdin is not None, "stdin was set to a pipe"
            with contextlib.suppress(BrokenPipeError):  # it is dead: its exit code and its output say why
                write_frame(supervisor.stdin, job)
            if not self.hold:
                return None
            try:
                code = self._wait(supervisor, job, door)
            except BaseException:
                kill_group(supervisor)
                raise
            if code is None:
                return None
            kill_group(supervisor)
            held.end_user()
            if code != 0:
                complaints.seek(0)
                text = without_chatter(complaints.read()[-8000:].decode(errors="replace"))
                with contextlib.suppress(grpc.RpcError):  # the driver may have gone too
                    door.ask(SupervisorEnded(job.node, code, text, supervisor.pid, socket.gethostname()))
            return code

    def _wait(self, supervisor: subprocess.Popen[bytes], job: NodeJob, door: DoorClient) -> int | None:
        """Wait for the supervisor and return its code, or None if it is left running.

        Kill it if it hangs and the driver wants to replace it.
        """
        seconds = max(_LOOK_SECONDS, len(self.nodes) / _ASKED_A_SECOND)
        if job.settings.get("restarts"):  # another one must replace it soon
            seconds = min(seconds, _ASK_SECONDS)
        if self.door.relayed:  # each question needs a Spark task
            seconds = _ASK_SECONDS
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return supervisor.wait(seconds)
            use = slot_use(HoldsSlot(job.node, supervisor.pid, socket.gethostname(), job.executor), door)
            if use is SlotUse.LEAVE:
                return None
            if use is SlotUse.END:
                kill_group(supervisor)


class _Held:
    """The files of the node that a task runs. While it runs none, there are no files."""

    def __init__(self) -> None:
        self._files: NodeFiles | None = None

    def descriptors(self) -> tuple[tuple[int, ...], ...]:
        """Return the open files, which a supervisor inherits."""
        self._files = self._files or NodeFiles()
        return self._files.descriptors

    def end_user(self) -> None:
        """End the TensorFlow process that an ended supervisor has left. Leave the files to it if it does not end."""
        if self._files is not None and not self._files.end_user():
            self.close()

    def close(self) -> None:
        """Release the files."""
        if self._files is not None:
            self._files.close()
        self._files = None


def slot_use(question: HoldsSlot, door: DoorClient) -> SlotUse:
    """Ask the driver what to do with a slot. Without an answer it is held: the supervisor waits for the driver too."""
    with contextlib.suppress(grpc.RpcError):
        return SlotUse(door.ask(question))
    return SlotUse.HOLD


def executor_process() -> int:
    """Return the id of the process with which this task's Python ends: the executor's JVM."""
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            if parent.name() == "java":
                return int(parent.pid)
    return os.getppid()


def _executor_name() -> str:
    """Return Spark's name of this executor, from the arguments of its JVM: Spark does not pass it to Python."""
    name = os.environ.get("SPARK_EXECUTOR_ID")
    if name is not None:
        return name
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            arguments = parent.cmdline()
            if "--executor-id" in arguments[:-1]:
                return str(arguments[arguments.index("--executor-id") + 1])
    return "driver"
