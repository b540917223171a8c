"""A kernel's view of a detached cluster: find it, ask its process, and show it like any other cluster."""

from __future__ import annotations

import contextlib
import math
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfos_nb.detached import places
from tfos_nb.detached.messages import Answer, Call, HistoryParts, Raised, check_peer, error_of
from tfos_nb.detached.on_executor import NotReached, RemoteCalls, log_name
from tfos_nb.detached.places import LOST, RUNNING, DetachedPlace
from tfos_nb.driver.settings import check_seconds
from tfos_nb.errors import ClusterClosed, PlanError, TfosError, near
from tfos_nb.interrupts import interruptible
from tfos_nb.redaction import without_password
from tfos_nb.rich import Rich
from tfos_nb.runtime.code.payload import check_takes_session, pack_reader
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.control.processes import read_frame, write_frame
from tfos_nb.runtime.storage.checkpoint_directory import directory_of_run, newest_checkpoint
from tfos_nb.runtime.storage.one_writer import is_the_same, mark_of
from tfos_nb.state.chart_data import chart_data
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, LogLine
from tfos_nb.state.history import History
from tfos_nb.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["AttachedCluster", "attach", "clusters"]

_CONNECTED_WITHIN = 10.0  # seconds
_LOOK_EVERY_BY_TASKS = 5.0  # seconds


def clusters() -> list[DetachedPlace]:
    """Return this user's detached clusters on all hosts that share this home directory, the newest first.

    Those that have ended are among them while their process keeps their results. A ``status`` of ``"LOST"`` says that
    the process was killed, or that its host has restarted.

    Examples
    --------
    >>> [(one.name, one.status) for one in tfos_nb.clusters()]  # doctest: +SKIP
    [('mnist', 'RUNNING')]
    """
    return list(places.places())


def attach(name: str = "", spark: SparkSession | None = None) -> AttachedCluster:
    """Return a detached cluster that this user has launched from any kernel.

    Parameters
    ----------
    name : str, optional
        Its name or its id. Of several with one name the newest that runs is meant. Default: the only one.
    spark : SparkSession, optional
        For a cluster whose process is on an executor (``detach="executor"``), if this kernel does not reach it: its
        tasks then carry the calls. Default: the active session.

    Raises
    ------
    PlanError
        If there is none, several are possible, its process has gone, or runs another version of this package or on
        another host.
    ClusterClosed
        If its process goes at this moment.
    NotReached
        If its process is on an executor, and does not answer at the moment.

    Examples
    --------
    >>> mnist = tfos_nb.attach("mnist")  # doctest: +SKIP
    >>> mnist.wait()  # doctest: +SKIP
    """
    place = _chosen(name, clusters())
    if place.is_lost:
        raise PlanError(_lost(place))
    if place.process.runs() is None and not place.door:
        raise PlanError(f"{place.name}: its process runs on host {place.process.host}: attach from a kernel there")
    if place.version != __version__:
        there = f" on host {place.process.host}" if place.door else ""
        stop = f"`kill {place.process.pid}`{there}"
        raise PlanError(
            f"{place.name} was launched with tfos_nb {place.version}, and this kernel has {__version__}: attach from a "
            f"Python with {place.version}. {stop} stops it without one, and its results are lost then. "
            f"{_last_checkpoint(place)}. {_last_model(place)}"
        )
    try:
        return AttachedCluster(place, spark=spark)
    except ConnectionError:
        _note_lost(place)
        raise PlanError(_lost(place)) from None


def _note_lost(place: DetachedPlace) -> None:
    """Write on this host that a process on an executor has gone."""
    if place.door and (found := places.find(place.id)) is not None and found.status == RUNNING:
        places.publish(replace(found, status=LOST))


def _chosen(name: str, known: Sequence[DetachedPlace]) -> DetachedPlace:
    fitting = [one for one in known if name in ("", one.name, one.id)]
    here = [one for one in fitting if one.process.runs() or one.door]
    meant = [one for one in here or fitting if one.status == RUNNING] or here or fitting
    if not meant:
        listed = ", ".join(dict.fromkeys(one.name for one in known))
        raise PlanError(
            f"no detached cluster {name!r} on this host; there are {listed}{near(name, [one.name for one in known])}"
            if known
            else "no detached cluster on this host: launch(detach=True) or %%tfos_cluster --detach starts one"
        )
    if not name and len({one.name for one in meant}) > 1:
        raise PlanError(f"several clusters are possible ({', '.join(one.name for one in meant)}): name one")
    return meant[0]


def _lost(place: DetachedPlace) -> str:
    """Return what is known of a cluster whose process has gone without a result."""
    saved = f"{_last_checkpoint(place)}. {_last_model(place)}"
    if place.status not in (RUNNING, LOST):
        return f"{place.name} has ended ({place.status}), and its process, which kept its results, has gone. {saved}"
    return (
        f"{place.name}: its process {place.process.pid} on {place.process.host} has gone without a result: it was "
        f"killed, or the host has restarted. {saved}. Its output is in {_log_of(place)}"
    )


def _log_of(place: DetachedPlace) -> str:
    if not place.door:
        return str(place.log)
    return f"{log_name(place.id)} in the temporary directory of {place.process.host}"


def _last_checkpoint(place: DetachedPlace) -> str:
    """Return a sentence on the newest complete checkpoint in the directory that a cluster uses."""
    if not place.model_dir:
        return "It has no model_dir"
    directory = directory_of_run(place.model_dir, place.run)
    if "://" in directory:
        return f"Its checkpoints, if it has saved any, are in {without_password(directory)}: attach does not read URLs"
    try:
        newest = newest_checkpoint(directory)
    except OSError as error:
        return f"Its checkpoints in {directory} cannot be read: {error}"
    if newest is None:
        return f"It has left no complete checkpoint in {directory}"
    path, written = newest
    return (
        f"Its last complete checkpoint is {path}, of {_shown(written)}: launch(…, resume=PATH) continues its training"
    )


def _last_model(place: DetachedPlace) -> str:
    """Return a sentence on the model that a cluster has written last; a later cluster may have replaced the file."""
    if not place.model:  # of a process on an executor it is known only once it has ended
        unknown = place.door and place.status in (RUNNING, LOST)
        return "Look there for its model, too" if unknown else "It has saved no model with ctx.save"
    if place.model_size < 0:
        return f"Its model is {place.model}"
    if not is_the_same(mark_of(place.model), [place.model_size, place.model_changed]):
        return f"Its model was {place.model}, which is not on this host or was written again since"
    return f"Its model is {place.model}, of {_shown(place.model_changed / 1e9)}"


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


class AttachedCluster(Rich):
    """A detached cluster, seen from a kernel. Made by :func:`attach`, and by ``launch(detach=True)``.

    It has the calls of :class:`tfos_nb.Cluster` that need no data of the kernel's. The cluster continues when this
    object, or the kernel, is gone. An interrupt ends the waiting and nothing else.

    It is a context manager. Leaving the block, also by an error, neither stops the cluster nor waits for it. If this
    object has launched the cluster or fed it, the nodes are told that no more rows come once those of a running
    :meth:`train` are delivered. So a ``main`` that was given no rows ends with an error, and holds no slots.

    Parameters
    ----------
    place : DetachedPlace
        Where its process answers.
    feeds : bool, optional
        Whether its ``with`` block is where the cluster is fed.
    spark : SparkSession, optional
        As :func:`attach` takes it.

    Attributes
    ----------
    id : str
        Its name among all clusters.
    """

    _rich = "cluster"
    reads_its_rows = True  # train() takes functions

    def __init__(self, place: DetachedPlace, feeds: bool = False, spark: SparkSession | None = None) -> None:
        self.id = place.id
        self._feeds = feeds
        self._history = History("")
        self._place = place
        self._remote = RemoteCalls(place, spark) if place.door else None
        self._looked = -math.inf
        self._client = uuid.uuid4().hex
        self._plan = ClusterPlan(**self._call("plan"))
        self._last: ClusterState = self._call("snapshot")

    def __enter__(self) -> AttachedCluster:
        return self

    def __exit__(self, *error: object) -> None:
        if self._feeds:
            with contextlib.suppress(ClusterClosed, NotReached):  # its process has gone, or has had its rows
                self._call("end_feed")

    # --- what it does ---

    def wait_until_up(self) -> None:
        """Wait until ``main`` has been called on every node; raise what went wrong instead."""
        with interruptible():
            self._call("wait_until_up")

    def await_submission(self) -> None:
        """Wait until a process on an executor has asked Spark for the nodes; raise what went wrong instead."""
        self._place = places.place_of(self._call("submitted"))
        places.publish(self._place)

    def announce_train(self) -> None:
        """Do nothing: another thread's :meth:`train` is announced to the process by its call."""

    def train(
        self,
        data: Callable[[Any], Any],
        epochs: int = 1,
        *,
        spill: bool = True,
        qname: str = "input",
        feed_timeout: float | None = None,
        validation: Callable[[Any], Any] | None = None,
    ) -> None:
        """Feed rows, as :meth:`tfos_nb.Cluster.train` does, that the cluster's process reads.

        Parameters
        ----------
        data : callable
            Takes the SparkSession of the cluster's process and returns the DataFrame, such as
            ``lambda spark: spark.read.parquet(path)``. It is sent by value.
        epochs, spill, qname, feed_timeout
            As there.
        validation : callable, optional
            Returns the rows for ``ctx.validation(…)`` in the same way.

        Raises
        ------
        PlanError
            If ``data`` is no function: a DataFrame of this kernel does not outlive it.
        """
        given = {"epochs": epochs, "spill": spill, "qname": qname, "feed_timeout": feed_timeout}
        reads = {"data": packed_reader("data", data)}
        if validation is not None:
            reads["validation"] = packed_reader("validation", validation)
        self._feeds = True
        with interruptible():
            self._call("train", **reads, **given)

    def scale(self, *, workers: int) -> None:
        """Change the number of workers: see :meth:`tfos_nb.Cluster.scale`."""
        self._call("scale", workers=workers)

    def wait(self, timeout: float | None = None) -> None:
        """Tell the nodes that no more data come, and wait until every ``main`` has returned.

        Raises
        ------
        TimeoutError
            If it takes longer than ``timeout`` seconds; the cluster continues.
        NodeFailed
            The first failure of a node.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        with interruptible():
            self._call("wait", timeout=timeout)

    def result(self) -> Any:
        """Return the value that the chief's ``main`` returned, once it is done."""
        with interruptible():
            return self._call("result")

    def results(self) -> dict[str, Any]:
        """Return the values that all nodes' ``main`` returned, as ``{"worker:0": …}``, once all are done."""
        with interruptible():
            return dict(self._call("results"))

    def stop(self, grace: float | None = None) -> None:
        """Stop the training and free the slots: politely at first, by force after ``grace`` seconds."""
        with interruptible():
            self._call("stop", grace=grace)

    def request_stop(self) -> str:
        """Request a stop and return at once: see :meth:`tfos_nb.Cluster.request_stop`.

        A second request of this object ends the cluster at once; the first request of another kernel does not.
        """
        return str(self._call("request_stop"))

    def close(self) -> None:
        """End the cluster at once, if it has not ended, and its process, which then forgets its results."""
        with contextlib.suppress(ClusterClosed):  # its process has gone
            self._call("close")
        places.forget(self.id)
        if self._remote is not None:
            self._remote.close_tunnel()

    # --- what it looks like ---

    @property
    def plan(self) -> ClusterPlan:
        """The plan that was requested last; the last known one if the process has gone."""
        with contextlib.suppress(ClusterClosed, NotReached):
            self._plan = ClusterPlan(**self._call("plan"))
        return self._plan

    @property
    def model_dir(self) -> str:
        """Directory in which ``ctx.save`` writes."""
        return self._place.model_dir

    @property
    def state(self) -> ClusterStatus:
        """The status of the cluster."""
        return self.snapshot().status

    def snapshot(self) -> ClusterState:
        """Return the current state of the cluster; if its process has gone, the last known one with that error.

        While a process on an executor cannot be reached, that is the last known one. By tasks it is asked for every
        five seconds.
        """
        now = time.monotonic()
        if self._remote is not None and self._remote.by_tasks and now - self._looked < _LOOK_EVERY_BY_TASKS:
            return self._last
        self._looked = now
        try:
            self._last = self._call("snapshot")
            self._note_end()
        except NotReached:
            pass
        except ClusterClosed as error:
            if not self._last.status.ended:
                self._last = replace(self._last, status=self._outcome(), error=str(error))
        if self._remote is not None and self._last.status.ended:
            self._remote.close_tunnel()
        return self._last

    @property
    def history(self) -> History:
        """The metrics of each epoch so far: see :attr:`tfos_nb.Cluster.history`.

        It has all steps of the chief; those of other nodes are fetched when they are asked for.
        """
        with contextlib.suppress(ClusterClosed, NotReached):
            parts: HistoryParts = self._call("history")
            self._history = parts.history(lambda node: list(self._call("reports", node=node)))
        return self._history

    def curves(self, metric: str = "", by: str = "", node: str = "") -> dict[str, Any]:
        """Return the numbers of a metric's chart as JSON has them, for a page."""
        try:
            return dict(self._call("curves", metric=metric, by=by, node=node))
        except (ClusterClosed, NotReached) as error:
            if node not in ("", str(self._plan.chief_node)):
                raise ValueError(f"{error}. Only the chief's curves are known here") from None
            return chart_data(self._history.points(), metric=metric, by=by, node=node)

    def stacks(self, timeout: float = 5.0) -> dict[str, str]:
        """Return where each node's program is: see :meth:`tfos_nb.Cluster.stacks`."""
        return dict(self._call("stacks", timeout=timeout))

    def logs(self, node: str = "") -> str:
        """Return the last lines of a node's output, such as ``logs("worker:1")``; the chief's by default."""
        return str(self._call("logs", node=node))

    def log_lines(self, node: str = "", limit: int = 500) -> Sequence[LogLine]:
        """Return a node's newest lines, each with its time; the chief's by default."""
        try:
            return list(self._call("log_lines", node=node, limit=limit))
        except (ClusterClosed, NotReached):
            wanted = node or str(self._plan.chief_node)
            return [line for line in self._last.log if line.node == wanted][-limit:]

    @property
    def tensorboard_socket(self) -> str:
        """The unix socket that leads to TensorBoard on the chief's executor; empty if TensorBoard does not run.

        Raises
        ------
        NotReached
            If the cluster's process is on an executor, and this kernel does not reach it.
        """
        if self._remote is not None:
            return "" if self._last.status.ended else self._remote.tensorboard_socket()
        try:
            return str(self._call("tensorboard_socket"))
        except ClusterClosed:
            return ""

    def __repr__(self) -> str:
        state = self.snapshot()
        return f"<AttachedCluster {state.name} {state.status.value}, process {self._place.process.pid}>"

    def _call(self, method: str, **arguments: Any) -> Any:
        """Call a method in the cluster's process.

        Raises
        ------
        ClusterClosed
            If the process has gone.
        NotReached
            If it is on an executor, and cannot be reached.
        Exception
            What the method raises.
        """
        if method != "snapshot":
            self._looked = -math.inf  # it may change the state
        call = Call(method, arguments, self._client)
        try:
            answer = _ask_socket(self._place, call) if self._remote is None else self._remote.ask(call)
        except (FileNotFoundError, ConnectionError):
            _note_lost(self._place)
            raise ClusterClosed(self._gone()) from None
        if isinstance(answer, Answer):
            return answer.value
        if isinstance(answer, Raised):
            raise error_of(answer)
        if self._place.process.runs():
            raise TfosError(
                f"{self._place.name}: its process did not answer {method}; its output is in {_log_of(self._place)}"
            )
        raise ClusterClosed(self._gone())

    def _note_end(self) -> None:
        """Write on this host that a cluster has ended whose process cannot do so from an executor."""
        if self._remote is None or not self._last.status.ended or self._place.status != RUNNING:
            return
        self._place = replace(places.place_of(self._call("place")), status=self._last.status.value)
        if places.find(self.id) is not None:  # else another kernel has closed it
            places.publish(self._place)

    def _outcome(self) -> ClusterStatus:
        """Return the status with which the cluster ended, if its process has said so before it went."""
        place = places.find(self.id)
        if place is None:  # another kernel has closed it, or its results are no longer kept
            return ClusterStatus.STOPPED
        return ClusterStatus.DONE if place.status == "DONE" else ClusterStatus.FAILED

    def _gone(self) -> str:
        place = places.find(self.id)
        if place is None:
            return f"{self._place.name}: its process has ended, and keeps its results no longer"
        return _lost(place)


def _ask_socket(place: DetachedPlace, call: Call) -> Any:
    """Make a call of a process on this host; return its message, None if it ends without one."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECTED_WITHIN)
        connection.connect(place.socket)
        connection.settimeout(None)  # the answer to a wait may take days
        check_peer(connection)
        with connection.makefile("rwb") as stream:
            write_frame(stream, call)
            return read_frame(stream)


def packed_reader(what: str, reader: Any) -> bytes:
    """Return a function that reads rows, pickled by value.

    Raises
    ------
    PlanError
        If it is no function of one argument, such as a DataFrame.
    """
    if not callable(reader) or hasattr(reader, "rdd") or hasattr(reader, "isStreaming"):
        raise PlanError(
            f"{what}: a detached cluster reads its rows itself, since a {type(reader).__name__} of this kernel's Spark "
            "does not outlive the kernel. Give a function of the SparkSession: write the rows with "
            "df.write.parquet(path), and give lambda spark: spark.read.parquet(path)"
        )
    check_takes_session(what, reader)
    return pack_reader(reader)
