"""A TensorFlow cluster on Spark, seen from the driver: :func:`launch` and :class:`Cluster`.

One thread lives as long as the cluster and alone decides how it ends: it waits for the nodes to come, to return or to fail,
then dismisses them, frees their slots and closes the door. The user's calls wait for what that thread finds. All of them
wait on the roster's one condition.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfos_nb.errors import ClusterClosed, FeedFailed, FeedTimeout, NodeFailed, PlanError, RendezvousTimeout, TfosError
from tfos_nb.feeding import Feed, feed_job
from tfos_nb.launching import (
    NodeTasks,
    Settings,
    Waking,
    error_of_job,
    open_door,
    submit_nodes,
    survey,
)
from tfos_nb.roster import Failure, Roster
from tfos_nb.runtime import wire
from tfos_nb.runtime.lifecycle import Farewell, Stop
from tfos_nb.runtime.payload import pack
from tfos_nb.runtime.plan import ClusterPlan, InputMode
from tfos_nb.runtime.reports import History
from tfos_nb.session import Job, SparkJobs, spark_session
from tfos_nb.state import ClusterState, ClusterStatus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Cluster", "launch"]

logger = logging.getLogger(__name__)

_SETTLE = 0.5  # seconds in which a node that failed for its own reason may come after one that failed because of it
_SETTLE_COLLATERAL = 3.0  # the same, when all that failed so far failed because of a peer
_LEAVING = 5.0  # seconds beyond the grace in which nodes must be gone


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
        The program: takes ``args`` and a :class:`tfos_nb.runtime.context.NodeContext`. It travels by value, with what it
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
    autolog : bool, optional
        Whether Keras' ``fit`` reports its progress by itself.
    env : mapping of str to str, optional
        Environment variables of the nodes, such as ``{"TF_USE_LEGACY_KERAS": "1"}``.
    rendezvous_timeout : float, optional
        Seconds within which all nodes must come.
    feed_timeout : float, optional
        Seconds for which a node may leave rows waiting without taking one.
    grace : float, optional
        Seconds that ``main`` has to end after :meth:`Cluster.stop`.
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
        model_dir, autolog, dict(env or {}), rendezvous_timeout, feed_timeout, grace, buffer_bytes, spill_bytes
    )
    payload = pack(main, args, sources)
    cluster = Cluster(plan, settings, payload, spark if spark is not None else spark_session(len(plan.nodes) + 2))
    cluster.start()
    if wait_until_up:
        cluster.wait_until_up()
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
    """

    def __init__(self, plan: ClusterPlan, settings: Settings, payload: bytes, spark: SparkSession) -> None:
        self.plan = plan
        self._settings = settings
        self._spark = spark
        self._payload = payload
        self._roster = Roster(plan)
        self._jobs = SparkJobs(spark, f"tfos_nb-{uuid.uuid4().hex[:8]}")
        self._node_jobs: list[Job[Any]] = []
        self._status = ClusterStatus.PLANNED
        self._error: TfosError | None = None
        self._stop: Stop | None = None
        self._training = threading.Lock()
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"tfos_nb cluster {plan.name}", daemon=True)

    # --- what the user calls ---

    def start(self) -> None:
        """Ask Spark, open the door and submit the nodes; returns before they are up."""
        launching = survey(self._spark, self.plan)
        self._hold = launching.hold
        self._door, self._address = open_door(self._spark, self._roster)
        self._started_at = time.monotonic()
        self._status = ClusterStatus.STARTING
        tasks = NodeTasks(self.plan, self._settings, self._address, launching.hold, self._payload)
        self._payload = b""
        try:
            description = f"tfos_nb cluster {self.plan.name}"
            self._node_jobs = submit_nodes(self._spark, self._jobs, launching, tasks, description, self._wake)
        except BaseException:
            self._door.close()
            raise
        self._thread.start()

    def wait_until_up(self) -> None:
        """Wait until ``main`` has been called on every node; raise what went wrong instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._over.is_set() or self._roster.all_up or self._roster.failures)
        if self._roster.failures or self._error is not None:
            self._raise_outcome()

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
            raise PlanError("this cluster reads files itself (input_mode='tensorflow'): launch it with input_mode='spark'")
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise PlanError(f"epochs={epochs!r}: it is a whole number, 1 or more")
        self._refuse_if_over("train")
        with self._training:
            epoch = 1
            while epoch <= epochs and not self._fed_nodes_over():
                epoch += self._feed_once(data, epoch, epochs, spill)

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
        with self._training:
            self._roster.feeds.close("the driver waits for the end")
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._over.wait(left):
            raise TimeoutError(f"cluster {self.plan.name} still runs after {timeout:g} s")
        if self._error is not None:
            raise self._error

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
            if self._status is ClusterStatus.STARTING and self._roster.all_up:
                return ClusterStatus.RUNNING
            return self._status

    @property
    def history(self) -> History:
        """The metrics of each epoch, as the chief reported them: ``cluster.history["loss"]``."""
        return self._roster.history

    def logs(self, node: str = "") -> str:
        """Return what a node wrote of late to its output, such as ``logs("worker:1")``; the chief's by default."""
        names = [str(known) for known in self.plan.nodes]
        wanted = node or str(self.plan.chief_node)
        if wanted not in names:
            raise ValueError(f"no node {wanted!r}: the cluster has {', '.join(names)}")
        return "\n".join(self._roster.logs(wanted))

    def stop(self, grace: float | None = None) -> None:
        """Stop the training and free the slots: politely at first, by force after ``grace`` seconds.

        Idempotent, from any thread. Keras' ``fit`` ends at the next step; a loop of one's own looks at
        ``ctx.should_stop``.
        """
        with self._changed:
            if self._stop is None:
                self._stop = Stop("stopped by the user", self._settings.grace if grace is None else grace)
            self._changed.notify_all()
        self._await_end()

    def close(self) -> None:
        """End the cluster at once, if it has not ended, and free all it holds. Idempotent, from any thread."""
        self.stop(grace=0.0)

    def snapshot(self) -> ClusterState:
        """Return how the cluster looks now."""
        with self._changed:
            feed = self._roster.feeds.current
            until = self._ended_at or time.monotonic()
            return ClusterState(
                name=self.plan.name,
                status=self.state,
                nodes=self._roster.snapshot(),
                feed=feed.progress if feed is not None else None,
                elapsed=until - self._started_at if self._started_at is not None else 0.0,
                error=str(self._error) if self._error is not None else "",
                spark_master=str(self._spark.conf.get("spark.master", "")) if self._spark is not None else "",
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
        return f"<Cluster {self.plan.name} {state.status.value} {len(self.plan.nodes)} nodes {minutes}:{seconds:02}>"

    # --- feeding, in the caller's thread ---

    def _feed_once(self, data: Any, epoch: int, epochs: int, spill: bool) -> int:
        """Send the rows through Spark once; return how many passes that made."""
        passes = epochs - epoch + 1
        feed = self._roster.feeds.begin(passes, spill and passes > 1, epoch, epochs)
        name = f"tfos_nb cluster {self.plan.name}: feed epoch {epoch}"
        job = self._jobs.run(Waking(feed_job(data, feed, self._address), self._wake), name)
        try:
            self._await_feed(feed, job.done.is_set)
            if feed.error is None and not job.done.is_set():  # every node has all it wants
                return passes
            self._check_feed(feed, job)
            replays = passes - 1 if feed.spill and feed.ledger.spilled else 0
            self._roster.feeds.end(feed, replays)
            if epoch + replays == epochs:
                self._await_feed(feed, lambda: self._passes_made(feed, 1 + replays))
            return 1 + replays
        finally:
            job.cancel()

    def _await_feed(self, feed: Feed, reached: Callable[[], bool]) -> None:
        """Wait until ``reached()``, or no node wants rows; raise if the cluster fails or nothing moves."""
        mark, since = self._feed_mark(feed), time.monotonic()
        with self._changed:
            while not (reached() or self._over.is_set() or self._fed_nodes_over() or feed.error or self._failing()):
                self._changed.wait(1.0)
                if (now := self._feed_mark(feed)) != mark or not self._stalled():
                    mark, since = now, time.monotonic()
                elif time.monotonic() - since > self._settings.feed_timeout:
                    self._abort(FeedTimeout(self._stall_text(feed)))
        if self._failing() or self._over.is_set():
            self._raise_outcome()

    def _check_feed(self, feed: Feed, job: Job[Any]) -> None:
        error: TfosError | None = feed.error
        if error is None and job.error is not None:
            error = error_of_job(job.error, "Spark could not deliver the rows")
        if error is None and feed.ledger.rows == 0:
            error = FeedFailed("the data have no rows")
        if error is not None:
            self._abort(error)
            self._raise_outcome()

    def _feed_mark(self, feed: Feed) -> tuple[int, int]:
        return (feed.moved, self._roster.rows_taken)

    def _stalled(self) -> bool:
        """Whether rows wait for a node that does not take them; a wait for Spark is none."""
        return bool(self._roster.sated())

    def _stall_text(self, feed: Feed) -> str:
        nodes = ", ".join(self._roster.sated())
        return (
            f"{nodes} took no row for {self._settings.feed_timeout:g} s, while rows of epoch {feed.epoch} were waiting "
            f"({feed.ledger.rows} delivered so far). Does main go through ctx.dataset() as often as epochs={feed.epochs}? "
            "A step that takes longer needs a longer feed_timeout"
        )

    def _passes_made(self, feed: Feed, count: int) -> bool:
        nodes = self._roster.feeds.nodes
        return all(feed.passes_done.get(node, 0) >= count or self._roster.is_over(node) for node in nodes)

    def _fed_nodes_over(self) -> bool:
        return all(self._roster.is_over(node) for node in self._roster.feeds.nodes)

    # --- the end, decided in the cluster's own thread ---

    @property
    def _changed(self) -> threading.Condition:
        return self._roster.changed

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _failing(self) -> bool:
        return bool(self._roster.failures) or self._stop is not None

    def _abort(self, error: TfosError) -> None:
        """Make an error of the whole cluster its first failure."""
        with self._changed:
            self._roster.failures.append(Failure(error, "", collateral=False))
            self._changed.notify_all()

    def _live(self) -> None:
        try:
            error = self._until_done()
        except Exception as unexpected:
            logger.exception("cluster %s", self.plan.name)
            error = TfosError(f"tfos_nb failed by an error of its own: {unexpected!r}")
        try:
            self._dismiss(error)
        finally:
            self._finish(error)

    def _until_done(self) -> TfosError | None:
        came = self._await(lambda: not self._roster.missing, self._settings.rendezvous_timeout)
        if not came:
            return self._rendezvous_timeout()
        self._await(lambda: self._roster.all_returned, None)
        return self._first_failure()

    def _await(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for something, a failure, a stop, or a node job's error; False if the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: reached() or self._failing() or self._lost_job(), timeout)

    def _lost_job(self) -> Job[Any] | None:
        return next((job for job in self._node_jobs if job.done.is_set() and job.error is not None), None)

    def _rendezvous_timeout(self) -> TfosError:
        missing = self._roster.missing
        total = len(self.plan.nodes)
        names = ", ".join(missing)
        return RendezvousTimeout(
            f"{total - len(missing)} of {total} nodes reserved within {self._settings.rendezvous_timeout:g} s; missing: "
            f"{names}. Spark did not start their tasks, or their executors cannot reach the driver at "
            f"{self._address.host}:{self._address.port}: look at Spark's UI for the job of cluster {self.plan.name}; set "
            "TFOS_SERVER_HOST and TFOS_SERVER_PORT if a firewall stands between",
            missing,
        )

    def _first_failure(self) -> TfosError | None:
        """Choose the failure to show: the first of those that no peer caused."""
        failures = self._roster.failures
        if not failures:
            job = self._lost_job()
            if job is None or self._roster.all_returned or self._stop is not None:
                return None
            assert job.error is not None
            return error_of_job(job.error, "Spark ended the nodes' job")
        own = lambda: any(not failure.collateral for failure in failures)  # noqa: E731
        with self._changed:
            if not own():
                self._changed.wait_for(own, _SETTLE_COLLATERAL)
            elif failures[0].node:
                self._changed.wait_for(lambda: False, _SETTLE)
        first = next((failure for failure in failures if not failure.collateral), failures[0])
        return self._with_others(first)

    def _with_others(self, first: Failure) -> TfosError:
        error = first.error
        others = len({failure.node for failure in self._roster.failures if failure.node} - {first.node})
        return error.counting(others) if others and isinstance(error, NodeFailed) else error

    def _dismiss(self, error: TfosError | None) -> None:
        with self._changed:
            self._status = ClusterStatus.STOPPING
            self._changed.notify_all()
        grace = 0.0
        if error is not None:
            message: Stop | Farewell = Stop("another node failed", 0.0)
        elif self._stop is not None:
            message, grace = self._stop, self._stop.grace
        else:
            message = Farewell()
        self._roster.dismiss(message)
        with self._changed:
            self._changed.wait_for(lambda: self._roster.all_gone, grace + _LEAVING)
        self._jobs.cancel_all()
        self._door.close()

    def _finish(self, error: TfosError | None) -> None:
        self._roster.mark_stopped()
        with self._changed:
            self._error = error
            self._ended_at = time.monotonic()
            stopped = self._stop is not None and error is None
            self._status = (
                ClusterStatus.FAILED if error is not None else ClusterStatus.STOPPED if stopped else ClusterStatus.DONE
            )
            if stopped and not self._roster.all_returned:
                self._error = ClusterClosed(f"cluster {self.plan.name} was stopped before its nodes were done")
            self._over.set()
            self._changed.notify_all()

    def _await_end(self) -> None:
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._over.wait()
            self._thread.join()

    def _raise_outcome(self) -> None:
        self._over.wait()
        raise self._error or ClusterClosed(f"cluster {self.plan.name} has ended")

    def _refuse_if_over(self, call: str) -> None:
        if self._error is not None:
            raise self._error
        if self._status.ended or self._failing():
            raise ClusterClosed(f"cluster {self.plan.name} is {self.state.value}: {call} needs a running one; launch it anew")

