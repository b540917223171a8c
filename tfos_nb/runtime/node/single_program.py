"""Run one independent program in one Spark task: the task, the child process, and their messages.

::

    SingleProgramTask (Spark) ── SingleProgramJob ──▶ child process: main(args, ctx)
         │  ◀── SingleProgramEnded ───────────┘
         └── SingleProgramEnded ──▶ door ──▶ driver (tfos_nb.parallel)

The program runs in a separate process with its own environment, which ends with the task. It has no peers and gets no
rows. It is forked from the application's warm process (:mod:`tfos_nb.runtime.node.warm_process`). On a host with GPUs,
without ``warm``, or if that process cannot be reached, it is a new interpreter, which imports TensorFlow only if the
program needs it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from tfos_nb.runtime.code.on_import import spare_scikit_learn
from tfos_nb.runtime.code.payload import unpack
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import DoorAddress, DoorClient
from tfos_nb.runtime.control.processes import (
    Channel,
    die_with_parent,
    kill_group,
    path_variable,
    private_directory,
    remove_directory,
    signal_name,
    start_module,
)
from tfos_nb.runtime.control.wire import message
from tfos_nb.runtime.host.gpu import gpu_variables, host_has_gpus
from tfos_nb.runtime.host.gpu_claims import GpuClaims, GpusTaken
from tfos_nb.runtime.node.process import environment_of
from tfos_nb.runtime.node.spark_task import executor_process
from tfos_nb.runtime.node.warm_process import PROGRAMS, Fork, ForkedProcess, ServerTerms, WarmProcess, can_fork

__all__ = ["SingleProgramContext", "SingleProgramEnded", "SingleProgramJob", "SingleProgramTask"]

SUMMARY_SCHEMA = "program long"
_TAIL_BYTES = 8000


@message
@dataclass(frozen=True)
class SingleProgramJob:
    """Job of the child process. The task takes it from Spark's closure and sends it through an inherited socket."""

    index: int
    count: int
    gpus: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    payload: bytes = field(default=b"", repr=False)


@message
@dataclass(frozen=True)
class SingleProgramEnded:
    """End of a program: its result, or a ``summary`` of why it has none."""

    index: int
    result: bytes | None = field(default=None, repr=False)
    summary: str = ""
    traceback: str = ""
    host: str = ""
    exit_code: int | None = None
    signal: str | None = None
    log_tail: str = ""


class SingleProgramContext:
    """The ``ctx`` argument of an independent program.

    Attributes
    ----------
    index, count : int
        This program's index, from 0, and the number of programs, to divide the work. ``task_index`` and ``num_workers``
        have the same values.
    gpus : tuple of str
        The program's GPUs. ``CUDA_VISIBLE_DEVICES`` is set to them.
    args : object
        The arguments of the program.
    """

    job_name = "worker"
    is_chief = True

    def __init__(self, index: int, count: int, gpus: Sequence[str] = (), args: Any = None) -> None:
        self.index = self.task_index = index
        self.count = self.num_workers = count
        self.gpus = tuple(gpus)
        self.args = args
        self.cluster_spec: dict[str, list[str]] = {}

    def __repr__(self) -> str:
        return f"<ctx program {self.index} of {self.count}>"


@dataclass(frozen=True)
class SingleProgramTask:
    """Run the program that belongs to this task's partition, by ``DataFrame.mapInArrow``."""

    count: int
    door: DoorAddress
    barrier: bool
    env: dict[str, str]
    python_path: tuple[str, ...]
    payload: bytes = field(repr=False)
    claim: int = 0  # number of GPUs to claim on the host
    warm_token: str = field(default="", repr=False)
    warm_idle: float = 0.0

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the program to its end, report the outcome to the driver, and yield one row with its index."""
        from pyspark import BarrierTaskContext, TaskContext

        deque(batches, maxlen=0)
        context = TaskContext.get()
        assert context is not None, "a SingleProgramTask runs inside a Spark task"
        if self.barrier:
            BarrierTaskContext.get().barrier()  # all tasks have their slots before the first program begins
        gpus = context.resources().get("gpu")
        addresses = tuple(gpus.addresses) if gpus is not None else ()
        job = SingleProgramJob(context.partitionId(), self.count, addresses, self.python_path, self.payload)
        with DoorClient(self.door) as door:
            door.ask(self._run_on_gpus(job) if self.claim else self._run(job))
        yield pa.RecordBatch.from_pydict({"program": pa.array([job.index], pa.int64())})

    def _run_on_gpus(self, job: SingleProgramJob) -> SingleProgramEnded:
        claims = GpuClaims()
        try:
            return self._run(replace(job, gpus=claims.take(self.claim)))
        except GpusTaken as error:
            return SingleProgramEnded(job.index, summary=str(error), host=socket.gethostname())
        finally:
            claims.close()  # the program has ended

    def _run(self, job: SingleProgramJob) -> SingleProgramEnded:
        channel, theirs = Channel.pair()
        with tempfile.TemporaryFile() as output, _scratch() as temporary:
            env = self._environment(job.gpus, temporary)
            warm = self._find_warm(job.gpus, env)
            child = self._started(warm, env, theirs.fileno(), output.fileno())
            theirs.close()
            try:
                channel.send(job)
                ended = next(iter(channel), None)
                code = child.wait() if ended is None else 0
            finally:
                kill_group(child)
                child.wait()
                channel.close()
                if warm is not None:
                    warm.close()
            return self._completed(ended, job.index, code, output)

    def _find_warm(self, gpus: tuple[str, ...], env: dict[str, str]) -> WarmProcess | None:
        """Connect to the application's warm server; None to start without one."""
        if not self.warm_token or gpus or host_has_gpus() or not can_fork():
            return None
        terms = ServerTerms(self.warm_token, executor_process(), self.warm_idle)
        with contextlib.suppress(OSError):
            return WarmProcess.of_the_application(env, terms)
        return None

    @staticmethod
    def _started(
        warm: WarmProcess | None, env: dict[str, str], channel: int, output: int
    ) -> ForkedProcess | subprocess.Popen[bytes]:
        if warm is not None:
            with contextlib.suppress(OSError):  # the warm process was killed
                return warm.fork(Fork(PROGRAMS[1]), (channel,), output)
        arguments = (str(channel),)
        return start_module(PROGRAMS[1], env=env, fds=(channel,), arguments=arguments, stdout=output, stderr=output)

    def _completed(self, ended: SingleProgramEnded | None, index: int, code: int, output: Any) -> SingleProgramEnded:
        size = os.fstat(output.fileno()).st_size
        output.seek(max(0, size - _TAIL_BYTES))
        tail = output.read().decode(errors="replace")
        sys.stderr.write(tail)  # so that Spark's log of the task has it too
        if ended is not None:
            return replace(ended, host=socket.gethostname(), log_tail=tail)
        signal = signal_name(code)
        how = f"killed by {signal}" if signal else f"exited with code {code} before main had returned"
        return SingleProgramEnded(
            index,
            summary=how,
            host=socket.gethostname(),
            exit_code=code if code >= 0 else None,
            signal=signal,
            log_tail=tail,
        )

    def _environment(self, gpus: tuple[str, ...], temporary: str) -> dict[str, str]:
        path = {"PYTHONPATH": path_variable()}
        if not gpus and not host_has_gpus():  # the same as a node's, so that both use the same warm process
            return {**environment_of(temporary, self.env), **path, **self.env}
        ours = {
            **path,
            "TMPDIR": temporary,
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
            **gpu_variables(gpus),
        }
        kept = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        return {**kept, **ours, **self.env}


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """Make a program's temporary directory, and remove it with all files when the program ends."""
    path = private_directory("scratch", sockets=False)
    try:
        yield path
    finally:
        remove_directory(path)


def _call(job: SingleProgramJob) -> SingleProgramEnded:
    try:
        main, args = unpack(job.payload)
        result = wire.encode_result(main(args, SingleProgramContext(job.index, job.count, job.gpus, args)))
    except wire.NotData as error:
        return SingleProgramEnded(job.index, summary=f"the value that main returned cannot be sent: {error}")
    except BaseException as error:  # noqa: BLE001 - the cell must show any error
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, frames))
        return SingleProgramEnded(job.index, summary=f"{type(error).__name__}: {error}", traceback=text)
    return SingleProgramEnded(job.index, result)


def main() -> None:
    """Run as the child's process."""
    die_with_parent()
    spare_scikit_learn()
    channel = Channel.of_fd(int(sys.argv[1]))
    job = next(iter(channel))
    sys.path += [entry for entry in job.python_path if entry not in sys.path and os.path.isdir(entry)]
    sys.argv = [f"tfos_nb program {job.index}"]
    ended = _call(job)
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send(ended)
    with contextlib.suppress(OSError):
        channel.close()
    os._exit(0)


if __name__ == "__main__":
    main()
