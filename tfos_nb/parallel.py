"""Run independent TensorFlow programs on Spark's executors, one per slot.

TensorFlowOnSpark calls this TFParallel. Use it for inference over files, or to train one model per set of parameters.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfos_nb.driver.launching import check_descriptors, check_door_variables, check_host_gpus, error_of_job, open_door
from tfos_nb.driver.prewarm import settle, warm_token
from tfos_nb.driver.relaying import needs_relay
from tfos_nb.driver.settings import Settings, checked_env
from tfos_nb.errors import NodeFailed, PlanError, TfosError, check_count
from tfos_nb.interrupts import interruptible
from tfos_nb.runtime.code.payload import pack
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import Link
from tfos_nb.runtime.control.processes import python_path
from tfos_nb.runtime.node.single_program import SUMMARY_SCHEMA, SingleProgramEnded, SingleProgramTask
from tfos_nb.spark.session import (
    SparkJobs,
    check_dynamic_allocation,
    check_local_python,
    check_slots,
    gives_gpus,
    most_slots,
    resource_profile,
    run_to_the_end,
    session_and_format,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["run"]

_ENDING_SECONDS = 10.0  # in which Spark notes the end of tasks that have reported their results


class _Handler:
    """DoorHandler of the door: collects the outcomes of the programs."""

    def __init__(self, count: int) -> None:
        self.changed = threading.Condition()
        self.ended: dict[int, SingleProgramEnded] = {}
        self.count = count

    def asked(self, message: Any) -> None:
        """Record a program's outcome; that of the first attempt counts."""
        if isinstance(message, SingleProgramEnded):
            if not 0 <= message.index < self.count:
                raise ValueError(f"no program has the index {message.index}")
            with self.changed:
                self.ended.setdefault(message.index, message)
                self.changed.notify_all()

    def wake(self) -> None:
        """Notify all waiting threads."""
        with self.changed:
            self.changed.notify_all()

    @property
    def failure(self) -> SingleProgramEnded | None:
        """The first program that failed."""
        return next((ended for ended in self.ended.values() if ended.result is None), None)

    def arrived(self, link: Link, message: Any) -> None:
        """Refuse a stream: a program has none."""
        link.end()

    def received(self, link: Link, message: Any) -> None:
        """Take nothing."""

    def left(self, link: Link) -> None:
        """Do nothing: there are no streams."""

    def ticked(self, late: float) -> None:
        """Look at no clock."""


def run(
    main: Callable[[Any, Any], Any],
    args: Any = None,
    *,
    nodes: int,
    spark: SparkSession | None = None,
    barrier: bool = False,
    cpus: int = 1,
    gpus: int = 0,
    env: Mapping[str, str] | None = None,
    name: str = "parallel",
    sources: Mapping[str, str] | None = None,
    warm: bool = Settings.warm,
) -> list[Any]:
    """Call ``main(args, ctx)`` in ``nodes`` processes on Spark's executors, and return what each returned.

    Each program is one Spark task. ``ctx.index`` is its number, from 0, and ``ctx.count`` the number of programs. If
    Spark loses an executor, it runs that executor's programs again. A program that raises is not run again, and ends
    the others.

    Parameters
    ----------
    main : callable
        The program: takes ``args`` and a :class:`tfos_nb.runtime.node.single_program.SingleProgramContext`. It travels
        by value; its result is data.
    args : object, optional
        Handed to ``main``.
    nodes : int
        The number of programs.
    spark : SparkSession, optional
        Where to run. Default: the active session, or else an embedded local Spark.
    barrier : bool, optional
        Whether all start together, one per slot. Otherwise there may be more programs than slots.
    cpus, gpus : int, optional
        Spark CPUs and GPUs per program. If Spark does not manage GPUs, each program takes free ones of its host.
    env : mapping of str to str, optional
        Environment variables of the programs.
    name : str, optional
        The job's name in the Spark UI.
    sources : mapping of str to str, optional
        Source text by file name, for tracebacks.
    warm : bool, optional
        Whether the programs are forked from a process that has imported TensorFlow, the same as a cluster's nodes are.
        On a host with GPUs none is.

    Returns
    -------
    list
        The results, in the order of the programs.

    Raises
    ------
    PlanError
        If Spark cannot take them, or the function cannot be sent; before anything starts.
    NodeFailed
        If a program raised, or its process died.

    Examples
    --------
    >>> def main(args, ctx):  # doctest: +SKIP
    ...     return [score(file) for file in args["files"][ctx.index :: ctx.count]]
    >>> tfos_nb.parallel.run(main, {"files": files}, nodes=4)  # doctest: +SKIP
    """
    for field, count, least in (("nodes", nodes, 1), ("cpus", cpus, 1), ("gpus", gpus, 0)):
        check_count(field, count, least)
    if not isinstance(warm, bool):
        raise PlanError(f"warm must be True or False, got {warm!r}")
    variables = checked_env(env)
    payload = pack(main, args, sources)
    check_door_variables()
    session, _ = session_and_format(spark, nodes)
    settle(session)
    check_local_python(session)
    claim = gpus if gpus > 0 and not gives_gpus(session) else 0
    profile = resource_profile(session, cpus, gpus - claim)
    if claim:
        at_once = nodes if barrier else min(nodes, most_slots(session, profile, cpus=cpus))
        check_host_gpus(session, at_once, cpus=cpus, gpus=gpus)
    relayed = needs_relay(session)
    if barrier or relayed:  # tasks fetch their messages, too, and would wait for slots that the programs hold
        check_dynamic_allocation(session, nodes, barrier=barrier)
        check_slots(session, nodes, False, cpus=cpus, gpus=gpus - claim, profile=profile, exchanging=relayed)
    check_descriptors(session, nodes if barrier else min(nodes, most_slots(session)))
    handler = _Handler(nodes)
    door, address = open_door(session, handler)
    try:
        path = python_path()
        token = warm_token(session) if warm else ""
        task = SingleProgramTask(nodes, address, barrier, variables, path, payload, claim, token, Settings.warm_idle)
        extra: dict[str, Any] = {"profile": profile} if profile is not None else {}
        frame = session.range(0, nodes, 1, nodes).mapInArrow(task, SUMMARY_SCHEMA, barrier=barrier, **extra)
        with interruptible():
            return _results(handler, SparkJobs(session, f"tfos_nb-parallel-{uuid.uuid4().hex[:12]}"), frame, name)
    finally:
        door.close()


def _results(handler: _Handler, jobs: SparkJobs, frame: Any, name: str) -> list[Any]:
    job = jobs.run(run_to_the_end(frame), f"tfos_nb {name}: {handler.count} programs", handler.wake)
    try:
        with handler.changed:
            handler.changed.wait_for(
                lambda: handler.failure or len(handler.ended) == handler.count or job.done.is_set()
            )
            failure = handler.failure
        if failure is not None:
            raise _error_of(failure)
        if len(handler.ended) < handler.count:
            job.done.wait()
            raise _error_of_job(job.error, name)
        job.done.wait(_ENDING_SECONDS)
    finally:
        job.cancel()
    return [wire.decode(handler.ended[index].result or b"") for index in range(handler.count)]


def _error_of(failure: SingleProgramEnded) -> NodeFailed:
    return NodeFailed(
        failure.summary,
        node=f"program {failure.index}",
        host=failure.host,
        exit_code=failure.exit_code,
        signal=failure.signal,
        remote_traceback=failure.traceback,
        log_tail=failure.log_tail,
    )


def _error_of_job(error: BaseException | None, name: str) -> TfosError:
    return error_of_job(error or TfosError("Spark ended the job"), f"Spark ended the job of {name}")
