"""A TensorFlow cluster on Spark, seen from the driver: :func:`launch` and :class:`Cluster`.

The calls here only ask and wait: how a cluster ends is decided in its own thread (:mod:`tfos_nb.life`).
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import ClusterClosed, PlanError
from tfos_nb.fate import Fate
from tfos_nb.launching import NodeTasks, Settings, open_door, submit_nodes, survey
from tfos_nb.life import Life
from tfos_nb.roster import Roster
from tfos_nb.runtime import wire
from tfos_nb.runtime.lifecycle import Stop
from tfos_nb.runtime.payload import pack
from tfos_nb.runtime.plan import ClusterPlan, InputMode
from tfos_nb.runtime.process import private_directory
from tfos_nb.runtime.reports import History
from tfos_nb.session import SparkJobs, spark_session, usable_session
from tfos_nb.state import ClusterState, ClusterStatus, LogLine
from tfos_nb.training import Training

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tfos_nb.runtime.door import Door

__all__ = ["Cluster", "launch"]

_LOG_SHOWN = 60  # lines of all nodes in a snapshot


def launch(
    main: Callable[[Any, Any], Any],
    args: Any = None,
    *,
    spark: SparkSession | None = None,
    workers: int = ClusterPlan.workers,
    ps: int = ClusterPlan.ps,
    chief: bool | None = ClusterPlan.chief,
    evaluator: bool = ClusterPlan.evaluator,
    input_mode: InputMode | str = ClusterPlan.input_mode,
    cpus: int = ClusterPlan.cpus,
    gpus: int = ClusterPlan.gpus,
    name: str = ClusterPlan.name,
    model_dir: str | None = Settings.model_dir,
    tensorboard: bool = Settings.tensorboard,
    log_dir: str | None = Settings.log_dir,
    autolog: bool = Settings.autolog,
    env: Mapping[str, str] | None = None,
    rendezvous_timeout: float = Settings.rendezvous_timeout,
    feed_timeout: float = Settings.feed_timeout,
    grace: float = Settings.grace,
    buffer_bytes: int = Settings.buffer_bytes,
    spill_bytes: int = Settings.spill_bytes,
    sources: Mapping[str, str] | None = None,
    wait_until_up: bool = True,
) -> Cluster:
    """Start a TensorFlow cluster on Spark's executors and call ``main(args, ctx)`` on every node.

    Parameters
    ----------
    main : callable
        The program: takes ``args`` and a :class:`tfos_nb.runtime.context.NodeContext`. It travels by value, with what
        it
        refers to; its results are data.
    args : object, optional
        Handed to ``main``.
    spark : SparkSession, optional
        Where to run. Default: the active session, or else an embedded local Spark.
    workers, ps, chief, evaluator, input_mode, cpus, gpus, name
        The plan: see :class:`ClusterPlan`.
    model_dir : str, optional
        Where ``ctx.save`` writes: a path that the chief's host can write, or a URL that fsspec knows. Default:
        ``tfos_models/NAME`` under the driver's working directory.
    tensorboard : bool, optional
        Whether TensorBoard runs on the chief's executor and can be seen in the notebook. Keras' ``fit`` then writes its
        epochs for it by itself, unless it was given a ``TensorBoard`` callback.
    log_dir : str, optional
        What TensorBoard shows, ``ctx.log_dir`` in ``main``. Default: ``logs`` under ``model_dir``. Implies
        ``tensorboard``.
    autolog : bool, optional
        Whether Keras' ``fit`` and ``evaluate`` report their progress by themselves.
    env : mapping of str to str, optional
        Environment variables of the nodes, such as ``{"TF_USE_LEGACY_KERAS": "1"}``.
    rendezvous_timeout : float, optional
        Seconds within which all nodes must come.
    feed_timeout : float, optional
        Seconds for which a node may leave rows waiting without taking one.
    grace : float, optional
        Seconds that ``main`` has to end after :meth:`Cluster.stop`. A ``ctx.save`` under way is finished anyway.
    buffer_bytes : int, optional
        Bytes of rows that may wait in a node's memory; then Spark waits.
    spill_bytes : int, optional
        Bytes of rows that a node may keep on its local disk for later epochs; beyond it Spark is asked again.
    sources : mapping of str to str, optional
        Source text by file name, for tracebacks.
    wait_until_up : bool, optional
        Whether to return only when ``main`` has been called on every node.

    Returns
    -------
    Cluster

    Raises
    ------
    PlanError
        If this Spark cannot take the plan, or the function cannot travel; before any node starts.
    RendezvousTimeout
        If some nodes never came.
    NodeFailed
        If a node failed before all were up.

    Examples
    --------
    >>> with launch(main, workers=2) as cluster:  # doctest: +SKIP
    ...     cluster.train(df, epochs=3)
    >>> cluster.result()  # doctest: +SKIP
    """
    plan = ClusterPlan(workers, ps, chief, evaluator, input_mode, cpus, gpus, name)
    settings = Settings(
        model_dir=model_dir,
        tensorboard=tensorboard,
        log_dir=log_dir,
        autolog=autolog,
        env=dict(env or {}),
        rendezvous_timeout=rendezvous_timeout,
        feed_timeout=feed_timeout,
        grace=grace,
        buffer_bytes=buffer_bytes,
        spill_bytes=spill_bytes,
    )
    payload = pack(main, args, sources)
    session = spark_session(len(plan.nodes) + 2) if spark is None else usable_session(spark)
    cluster = Cluster(plan, settings, payload, session)
    cluster.start()
    if wait_until_up:
        try:
            cluster.wait_until_up()
        except BaseException:  # an interrupt too: the caller has no cluster yet that could be stopped
            cluster.close()
            raise
    return cluster


class Cluster:
    """A running (or ended) TensorFlow cluster. Made by :func:`launch`; a context manager.

    Leaving its ``with`` block without an error tells the nodes that no more data come and waits for every ``main`` to
    return; leaving it with an error stops them.

    Attributes
    ----------
    plan : ClusterPlan
        What was asked for.
    history : History
        The metrics of each epoch, as the chief reported them.
    id : str
        Its name among all clusters of the machine.
    """

    def __init__(self, plan: ClusterPlan, settings: Settings, payload: bytes, spark: SparkSession) -> None:
        self.plan = plan
        self._settings = settings
        self._spark = spark
        self._master = str(spark.conf.get("spark.master", ""))
        self._payload = payload
        self.id = uuid.uuid4().hex[:12]
        self._roster = Roster(plan)
        self._jobs = SparkJobs(spark, f"tfos_nb-{self.id}")
        self._fate = Fate(plan.name, self._roster)
        self._life = Life(plan.name, self._roster, self._fate, self._jobs, settings)
        self._log_dir = settings.log_dir_for(plan.name)
        self._tunnel = ""
        self._training = threading.Lock()

    # --- what the user calls ---

    def start(self) -> None:
        """Ask Spark, open the door and submit the nodes; returns before they are up."""
        launching = survey(self._spark, self.plan)
        door, self._address = open_door(self._spark, self._roster)
        self._life.begin()
        tasks = NodeTasks(self.plan, self._settings, self._address, launching.hold, self._payload)
        self._payload = b""
        try:
            if self._log_dir:
                self._open_tunnel(door)
            description = f"tfos_nb cluster {self.plan.name}"
            self._fate.jobs = submit_nodes(
                self._spark, self._jobs, launching, task=tasks, description=description, wake=self._fate.wake
            )
        except BaseException:
            door.close()
            raise
        self._life.run(door, self._address)

    def _open_tunnel(self, door: Door) -> None:
        directory = private_directory("tunnel")
        path = os.path.join(directory, "tensorboard")
        door.open_tunnel(path, partial(self._roster.send_to, str(self.plan.chief_node)))
        self._tunnel = path
        self._life.at_end(partial(shutil.rmtree, directory, ignore_errors=True))

    def wait_until_up(self) -> None:
        """Wait until ``main`` has been called on every node; raise what went wrong instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._fate.over.is_set() or self._roster.all_up or self._roster.failures)
        if self._roster.failures or self._fate.error is not None:
            self._fate.raise_outcome()

    def train(self, data: Any, epochs: int = 1, *, spill: bool = True) -> None:
        """Feed the rows of a DataFrame or an RDD: each worker makes ``epochs`` passes over its share.

        Returns when the passes have been delivered; may be called again, and further passes follow.

        Parameters
        ----------
        data : pyspark.sql.DataFrame or pyspark.RDD
            The rows. Of an RDD: Rows, dictionaries, tuples or single values.
        epochs : int, optional
            Passes.
        spill : bool, optional
            Whether the nodes keep their shares on local disk for the later passes. Otherwise Spark is asked again for
            each.

        Raises
        ------
        FeedFailed
            If a row cannot be fed, or there is none.
        FeedTimeout
            If a node took no row for ``feed_timeout`` seconds.
        NodeFailed
            If a node fails meanwhile.
        ClusterClosed
            If the cluster has ended.
        """
        if self.plan.input_mode is InputMode.TENSORFLOW:
            raise PlanError(
                "this cluster reads files itself (input_mode='tensorflow'): launch it with input_mode='spark'"
            )
        if type(epochs) is not int or epochs < 1:
            raise PlanError(f"epochs={epochs!r}: it is a whole number, 1 or more")
        self._refuse_if_over("train")
        with self._training:
            training = Training(self._fate, self._roster, self._jobs, self._settings.feed_timeout, self._address)
            training.run(data, epochs, spill)

    def wait(self, timeout: float | None = None) -> None:
        """Tell the nodes that no more data come, and wait until every ``main`` has returned.

        Raises
        ------
        TimeoutError
            If it takes longer than ``timeout`` seconds; the cluster goes on.
        NodeFailed
            The first failure of a node.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._training.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise TimeoutError(f"cluster {self.plan.name} is still being fed after {timeout:g} s")
        try:
            self._roster.feeds.close("wait() has told the nodes that no more rows come")
        finally:
            self._training.release()
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._fate.over.wait(left):
            raise TimeoutError(f"cluster {self.plan.name} still runs after {timeout:g} s")
        if self._fate.error is not None:
            raise self._fate.error

    def result(self) -> Any:
        """Return what the chief's ``main`` returned, once it is done."""
        return self.results().get(str(self.plan.chief_node))

    def results(self) -> dict[str, Any]:
        """Return what every node's ``main`` returned, as ``{"worker:0": …}``, once all are done."""
        self.wait()
        return {node: wire.decode(data) for node, data in self._roster.results().items()}

    @property
    def state(self) -> ClusterStatus:
        """Where the cluster is in its life."""
        with self._changed:
            status = self._life.status
            return ClusterStatus.RUNNING if status is ClusterStatus.STARTING and self._roster.all_up else status

    @property
    def history(self) -> History:
        """The metrics of each epoch, as the chief reported them: ``cluster.history["loss"]``."""
        return self._roster.history

    def logs(self, node: str = "") -> str:
        """Return what a node wrote of late to its output, such as ``logs("worker:1")``; the chief's by default."""
        return "\n".join(self._roster.logs(self._node_named(node)))

    def log_lines(self, node: str = "", limit: int = 500) -> Sequence[LogLine]:
        """Return a node's newest lines, each with its time; the chief's by default."""
        return self._roster.log_lines(self._node_named(node), limit=limit)

    def _node_named(self, node: str) -> str:
        names = [str(known) for known in self.plan.nodes]
        wanted = node or str(self.plan.chief_node)
        if wanted not in names:
            raise ValueError(f"no node {wanted!r}: the cluster has {', '.join(names)}")
        return wanted

    def stop(self, grace: float | None = None) -> None:
        """Stop the training and free the slots: politely at first, by force after ``grace`` seconds.

        Idempotent, from any thread. Keras' ``fit`` ends at the next step; a loop of one's own looks at
        ``ctx.should_stop``.
        """
        self._fate.ask_to_stop(Stop("stopped by the user", self._settings.grace if grace is None else grace))
        self._life.join()

    def request_stop(self) -> str:
        """Ask for the end and return at once, from any thread; say what happens now.

        The first time politely: training ends at its next step, ``main`` goes on to its end, and a ``ctx.save`` under
        way is finished. A second time at once.
        """
        if self._life.status.ended or self._fate.over.is_set():
            return f"{self.plan.name} has ended already"
        if self._fate.stop is None:
            grace = self._settings.grace
            self._fate.ask_to_stop(Stop("stopped by the user", grace))
            return f"stopping {self.plan.name}: its nodes have {grace:g} s to end; ask again to end them at once"
        self._fate.ask_to_stop(Stop("stopped by the user", 0.0))
        return f"ending {self.plan.name} at once"

    @property
    def tensorboard_socket(self) -> str:
        """The unix socket that leads to TensorBoard on the chief's executor; empty if there is none, or none now."""
        return self._tunnel if self._tunnel and not self._life.status.ended else ""

    def close(self) -> None:
        """End the cluster at once, if it has not ended, and free all it holds. Idempotent, from any thread."""
        self.stop(grace=0.0)

    def snapshot(self) -> ClusterState:
        """Return how the cluster looks now."""
        with self._changed:
            feed = self._roster.feeds.current
            return ClusterState(
                name=self.plan.name,
                id=self.id,
                status=self.state,
                nodes=self._roster.snapshot(),
                feed=feed.progress if feed is not None else None,
                elapsed=self._life.elapsed,
                error=str(self._fate.error or ""),
                spark_master=self._master,
                log=tuple(self._roster.log_tail(_LOG_SHOWN)),
                log_dir=self._log_dir,
                plan=str(self.plan),
            )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.wait()
        else:
            self.close()

    def __repr__(self) -> str:
        state = self.snapshot()
        minutes, seconds = divmod(int(state.elapsed), 60)
        count = "1 node" if len(self.plan.nodes) == 1 else f"{len(self.plan.nodes)} nodes"
        return f"<Cluster {self.plan.name} {state.status.value} {count} {minutes}:{seconds:02}>"

    @property
    def _changed(self) -> threading.Condition:
        return self._roster.changed

    def _refuse_if_over(self, call: str) -> None:
        if self._fate.error is not None:
            raise self._fate.error
        if self._roster.failures:
            self._fate.raise_outcome()
        if self._roster.feeds.closed and not self._life.status.ended and self._fate.stop is None:
            raise ClusterClosed(
                f"cluster {self.plan.name}: {self._roster.feeds.closed}; launch it anew to {call} again"
            )
        if self._life.status.ended or self._fate.failing:
            state = self.state.value
            raise ClusterClosed(f"cluster {self.plan.name} is {state}: {call} needs a running one; launch it anew")
