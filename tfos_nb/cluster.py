"""A TensorFlow cluster on Spark, seen from the driver: :func:`launch` and :class:`Cluster`.

The calls here only ask and wait: how a cluster ends is decided in its own thread
(:mod:`tfos_nb.driver.cluster_lifecycle`).
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tfos_nb.cluster_inference import answered, check_queue
from tfos_nb.driver.cluster_desk import ClusterDesk, ClusterEvent
from tfos_nb.driver.cluster_lifecycle import ClusterLifecycle, shown_status
from tfos_nb.driver.evaluator import EvaluatorDesk
from tfos_nb.driver.feeding.streaming import StreamTraining, is_stream, refuse_stream
from tfos_nb.driver.feeding.training import Training
from tfos_nb.driver.feeding.training_calls import TrainingCalls
from tfos_nb.driver.launching import NodeTasks, check_door_variables, check_keras, open_door, survey
from tfos_nb.driver.node_jobs import NodeJobs
from tfos_nb.driver.outcome import ClusterOutcome
from tfos_nb.driver.prewarm import settle, warm_token
from tfos_nb.driver.settings import Settings, check_seconds, checked_env, deadline_after
from tfos_nb.errors import ClusterClosed, NodeFailed, PlanError
from tfos_nb.interrupts import interruptible
from tfos_nb.runtime.code.payload import pack
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.lifecycle import Stop
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.runtime.control.processes import private_directory, remove_directory
from tfos_nb.runtime.control.reports import History
from tfos_nb.runtime.inference.serving import InferTask
from tfos_nb.spark.session import SparkJobs, session_and_format
from tfos_nb.state import active_clusters
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, LogLine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from tfos_nb.runtime.control.door import Door

__all__ = ["Cluster", "launch"]

logger = logging.getLogger(__name__)

_LOG_SHOWN = 60  # lines of all nodes in a snapshot
_text_of = functools.lru_cache(str)  # a panel shows a plan again and again


def launch(
    main: Callable[[Any, Any], Any],
    args: Any = None,
    *,
    spark: SparkSession | None = None,
    workers: int = ClusterPlan.workers,
    ps: int = ClusterPlan.ps,
    chief: bool | str | None = ClusterPlan.chief,
    evaluator: bool = ClusterPlan.evaluator,
    input_mode: InputMode | str = ClusterPlan.input_mode,
    cpus: int = ClusterPlan.cpus,
    gpus: int = ClusterPlan.gpus,
    name: str = ClusterPlan.name,
    driver_ps_nodes: bool = ClusterPlan.driver_ps_nodes,
    master_node: str | None = ClusterPlan.master_node,
    protocol: str = ClusterPlan.protocol,
    evaluator_may_fail: bool = ClusterPlan.evaluator_may_fail,
    model_dir: str | os.PathLike[str] | None = Settings.model_dir,
    tensorboard: bool = Settings.tensorboard,
    log_dir: str | os.PathLike[str] | None = Settings.log_dir,
    autolog: bool = Settings.autolog,
    env: Mapping[str, str] | None = None,
    rendezvous_timeout: float = Settings.rendezvous_timeout,
    feed_timeout: float = Settings.feed_timeout,
    grace: float = Settings.grace,
    buffer_bytes: int = Settings.buffer_bytes,
    spill_bytes: int = Settings.spill_bytes,
    queues: Sequence[str] = Settings.queues,
    restarts: int = Settings.restarts,
    heartbeat_timeout: float = Settings.heartbeat_timeout,
    min_workers: int | None = Settings.min_workers,
    warm: bool = Settings.warm,
    warm_idle: float = Settings.warm_idle,
    sources: Mapping[str, str] | None = None,
    wait_until_up: bool = True,
) -> Cluster:
    """Start a TensorFlow cluster on Spark's executors and call ``main(args, ctx)`` on every node.

    Parameters
    ----------
    main : callable
        The program: takes ``args`` and a :class:`~tfos_nb.runtime.program.context.NodeContext`. It travels by value,
        with what it refers to; its results are data.
    args : object, optional
        Handed to ``main``.
    spark : SparkSession, optional
        Where to run. Default: the active session, or else an embedded local Spark.
    workers, ps, chief, evaluator, input_mode, cpus, gpus, name
        The plan: see :class:`ClusterPlan`.
    driver_ps_nodes, master_node, protocol, evaluator_may_fail
        Of the plan too.
    model_dir : str, optional
        Where ``ctx.save`` writes: a path that the chief's host can write, or a URL that fsspec knows. Default:
        ``tfos_models/NAME`` under the driver's working directory; ``NAME-2`` while another of the name runs there.
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
        Seconds for which nodes may leave rows waiting while none of them computes, reports or saves. One that computes
        is waited for, however long its step takes.
    grace : float, optional
        Seconds that ``main`` has to end after :meth:`Cluster.stop`. A ``ctx.save`` under way is finished anyway.
    buffer_bytes : int, optional
        Bytes of rows that may wait in a node's memory; then Spark waits.
    spill_bytes : int, optional
        Bytes of rows that a node may keep on its local disk for later epochs; beyond it Spark is asked again.
    queues : list of str, optional
        Names of queues of rows, each of which is fed and read apart: ``train(df, qname="valid")``, and
        ``ctx.dataset(…, queue="valid")`` in ``main``.
    restarts : int, optional
        How often the nodes start again, and ``main`` is called again on all of them, when one was lost: its
        process, its supervisor, its executor or its host. An exception in ``main`` is not tried again. ``main`` goes
        on from what it has saved: see ``ctx.resume`` and Keras' ``BackupAndRestore``; rows that its state does not
        hold yet are fed again.
    heartbeat_timeout : float, optional
        Seconds after which a node that is silent, or whose process is stopped, is held to be lost; at least 3.
    min_workers : int, optional
        With ``restarts``: go on with so many workers or more while a lost one is not back. It joins the others again
        when they have saved a state. Default: all are waited for.
    warm : bool, optional
        Whether the nodes are forked from a process that has imported TensorFlow, which stays on the executor's host for
        the next cluster. Nodes with GPUs never are.
    warm_idle : float, optional
        How long that process waits for another node before it ends.
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
    roles = driver_ps_nodes, master_node, protocol, evaluator_may_fail
    plan = ClusterPlan(workers, ps, chief, evaluator, input_mode, cpus, gpus, name, *roles)
    settings = Settings(
        model_dir=model_dir,
        tensorboard=tensorboard,
        log_dir=log_dir,
        autolog=autolog,
        env=checked_env(env),
        rendezvous_timeout=rendezvous_timeout,
        feed_timeout=feed_timeout,
        grace=grace,
        buffer_bytes=buffer_bytes,
        spill_bytes=spill_bytes,
        queues=(queues,) if isinstance(queues, str) else tuple(queues or ()),
        restarts=restarts,
        heartbeat_timeout=heartbeat_timeout,
        min_workers=min_workers,
        warm=warm,
        warm_idle=warm_idle,
    ).for_plan(plan)
    payload = pack(main, args, sources)
    check_door_variables()
    session, await_format = session_and_format(spark, len(plan.spark_nodes) + 2)
    cluster = Cluster(plan, settings, payload, session)
    try:
        with interruptible():
            cluster.start()
            if wait_until_up:
                cluster.wait_until_up()
            await_format()
    except BaseException:  # an interrupt too, which may come at the block's end: the caller has no cluster yet to stop
        cluster.close()
        raise
    return cluster


class Cluster:
    """A running (or ended) TensorFlow cluster. Made by :func:`launch`; a context manager.

    Leaving its ``with`` block without an error tells the nodes that no more data come and waits for every ``main`` to
    return; leaving it with an error stops them, and so does an interrupt of that waiting.

    Attributes
    ----------
    history : History
        The metrics of each epoch, as the chief reported them.
    id : str
        Its name among all clusters of the machine.
    """

    def __init__(self, plan: ClusterPlan, settings: Settings, payload: bytes, spark: SparkSession) -> None:
        self._settings = settings
        self._spark = spark
        self._master = str(spark.conf.get("spark.master", ""))
        self._payload = payload
        self.id = uuid.uuid4().hex[:12]
        self._desk = ClusterDesk(plan, settings.restarts, settings.heartbeat_timeout)
        self._jobs = SparkJobs(spark, f"tfos_nb-{self.id}")
        self._outcome = ClusterOutcome(plan.name, self._desk)
        self._lifecycle = ClusterLifecycle(plan.name, self._desk, self._outcome, self._jobs, settings)
        self._model_dir, self._log_dir = settings.model_dir_for(plan.name), settings.log_dir_for(plan.name)
        self._tunnel = ""
        self._training_calls = TrainingCalls(self._outcome, self._desk)

    # --- what the user calls ---

    def start(self) -> None:
        """Ask Spark, open the door and submit the nodes; returns before they are up."""
        settle(self._spark)
        launching = survey(self._spark, self.plan)
        check_keras(self._spark, self.plan, self._settings.env)
        hold, claim = launching.hold, launching.claim
        token = warm_token(self._spark) if self._settings.warm else ""
        door, address = open_door(self._spark, EvaluatorDesk.before(self._desk, self._settings.grace))
        try:
            self._address = replace(address, patience=self._settings.heartbeat_timeout)
            self._lifecycle.begin()
            tasks = NodeTasks(self.plan, self._settings, self._address, hold, self._payload, claim, self.id, token)
            self._payload = b""
            if self._log_dir:
                self._open_tunnel(door)
            description = f"tfos_nb cluster {self.plan.name}"
            self._nodes = nodes = NodeJobs(
                self._spark, self._jobs, launching, tasks, description, self._desk, self._outcome.wake
            )
            nodes.submit()
            self._outcome.jobs = lambda: nodes.running
            self._lifecycle.at_rendezvous(nodes.submit_again)
            self._lifecycle.at_lone_node(nodes.submit_again)
            self._lifecycle.at_rendezvous(self._training_calls.rewind)
        except BaseException:
            self._lifecycle.never_began(door)
            raise
        active_clusters.begin(self)
        self._lifecycle.at_end(self._training_calls.forget)
        self._lifecycle.at_end(nodes.forget)
        self._lifecycle.at_end(partial(active_clusters.end, self))
        self._lifecycle.run(door, self._address)

    def _open_tunnel(self, door: Door) -> None:
        directory = private_directory("tunnel")
        path = os.path.join(directory, "tensorboard")
        door.open_tunnel(path, partial(self._desk.send_to, str(self.plan.chief_node)))
        self._tunnel = path
        remove = partial(remove_directory, directory)
        atexit.register(remove)  # a program that is interrupted may not wait for the cluster's end
        self._lifecycle.at_end(remove)
        self._lifecycle.at_end(partial(atexit.unregister, remove))

    def wait_until_up(self) -> None:
        """Wait until ``main`` has been called on every node; raise what went wrong instead."""
        while True:
            rendezvous = self._desk.rendezvous
            with self._changed:
                self._changed.wait_for(lambda: self._outcome.over.is_set() or self._desk.all_up or self._desk.failures)
            if not self._desk.failures and self._outcome.error is None:
                return
            if not self._outcome.await_decision(rendezvous):
                self._outcome.raise_outcome()

    def announce_train(self) -> None:
        """Say that another thread is about to call :meth:`train`: a :meth:`wait` that comes before waits for that."""
        self._training_calls.announce()

    def train(
        self,
        data: Any,
        epochs: int = 1,
        *,
        spill: bool = True,
        qname: str = "input",
        feed_timeout: float | None = None,
        validation: Any = None,
    ) -> None:
        """Feed the rows of a DataFrame or an RDD: each worker makes ``epochs`` passes over its share.

        Returns when the passes have been delivered, or no node wants more of them; may be called again, and further
        passes follow. Of a stream it feeds each micro-batch as a pass, and returns when the stream has ended. An
        interrupt (Ctrl-C, or that of the notebook) stops the cluster as :meth:`request_stop` does: the rows of a pass
        that was broken off are not taken for a whole one.

        Parameters
        ----------
        data : pyspark.sql.DataFrame or pyspark.RDD
            The rows. Of an RDD: Rows, dictionaries, tuples or single values. Or a stream: a streaming DataFrame, what
            its ``writeStream`` gives (with a trigger and a checkpoint), or a DStream that has not been started.
        epochs : int, optional
            Passes; 1 for a stream.
        spill : bool, optional
            Whether the nodes keep their shares on local disk for the later passes. Otherwise Spark is asked again for
            each.
        qname : str, optional
            The queue to feed, one of the cluster's ``queues``.
        feed_timeout : float, optional
            The cluster's, for this call.
        validation : pyspark.sql.DataFrame or pyspark.RDD, optional
            Rows with the same columns for ``ctx.validation(…)``; they are fed first, once, and kept by the nodes.

        Raises
        ------
        FeedFailed
            If a row cannot be fed, or there is none.
        FeedTimeout
            If for ``feed_timeout`` seconds no row was taken of those that wait, and no node did anything else.
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
            raise PlanError(f"epochs must be a whole number, 1 or more, got {epochs!r}")
        check_queue(qname, self._settings)
        refuse_stream(validation, "validation")
        self._refuse_if_over("train")
        try:
            with interruptible(), self._training_calls.lock:
                self._training_calls.begin()
                self.wait_until_up()
                timeout = self._settings.feed_timeout if feed_timeout is None else feed_timeout
                training = Training(self._outcome, self._desk, self._jobs, timeout, self._address, qname)
                self._feed_or_stop(training, data, epochs, spill, validation)
        except KeyboardInterrupt:  # it may come at the block's end
            self._interrupted()
            raise

    def _feed_or_stop(self, training: Training, data: Any, epochs: int, spill: bool, validation: Any) -> None:
        before = self._desk.feeds.current
        try:
            self._feed(training, data, epochs, spill, validation)
        except BaseException as error:
            begun = self._desk.feeds.is_half_fed and self._desk.feeds.current is not before
            if not isinstance(error, Exception) or (begun and not training.ending):
                self._interrupted()
            raise

    def _interrupted(self) -> None:
        """Stop, once: a part of the rows is no pass, and could not be taken back."""
        if self._outcome.stop is None and not self._lifecycle.status.ended:
            logger.warning("train() was interrupted: %s", self.request_stop())

    def _feed(self, training: Training, data: Any, epochs: int, spill: bool, validation: Any) -> None:
        if is_stream(data):
            if self._settings.restarts:
                raise PlanError("restarts= does not go with a stream yet: launch without, and let Spark's retry it")
            StreamTraining(training).run(data, epochs, validation, self._interrupted)
        else:
            self._training_calls.train(training.call(data, epochs, spill, validation))
            training.tell_if_unread()

    def inference(
        self,
        data: Any,
        schema: str | StructType | None = None,
        *,
        columns: Sequence[str] | None = None,
        keep: bool = True,
        qname: str = "input",
        feed_timeout: float | None = None,
    ) -> Any:
        """Have the rows of a DataFrame or an RDD answered by ``main``: one result a row.

        Nothing happens before somebody asks for the results; then the cluster has to be running still. The rows of a
        partition go to one node, on the same host if there is one, and the results come back in the rows' order, in the
        same partition. A task that Spark repeats has its rows answered anew.

        Parameters
        ----------
        data : pyspark.sql.DataFrame or pyspark.RDD
            The rows. Of an RDD: Rows, dictionaries, tuples or single values.
        schema : str or StructType
            The columns of the results, such as ``"prediction double"``. For a DataFrame only.
        columns : list of str, optional
            The columns that ``main`` gets; all by default. For a DataFrame only.
        keep : bool
            Whether the DataFrame's own columns stand before those of the results.
        qname : str
            The queue from which ``main`` takes the rows.
        feed_timeout : float, optional
            Seconds for which rows may wait while ``main`` neither takes nor answers any; the cluster's by default.

        Returns
        -------
        DataFrame or RDD
            Of the results, lazy. An RDD's elements are what ``main`` gave.

        Raises
        ------
        PlanError
            If the data are neither, the schema is missing or none, or a column is not there.
        ClusterClosed, NodeFailed
            If the cluster has ended.

        Notes
        -----
        The results are computed when somebody asks for them, by a Spark job of the user's. If a node fails meanwhile,
        that job is cancelled, and its error contains the node's. A ``with`` block of the cluster then raises the
        node's own error. Over Spark Connect a job cannot be cancelled from here: Spark tries each task four times.

        Examples
        --------
        >>> def main(args, ctx):  # doctest: +SKIP
        ...     model = keras.models.load_model(args["model"])
        ...     for batch in ctx.requests(512):
        ...         batch.reply({"prediction": model(batch["pixels"])[:, 0]})
        >>> with launch(main, args, workers=2) as cluster:  # doctest: +SKIP
        ...     cluster.inference(df, "prediction float").write.parquet("scored")
        """
        if self.plan.input_mode is InputMode.TENSORFLOW:
            raise PlanError(
                "this cluster reads files itself (input_mode='tensorflow'): launch it with input_mode='spark'"
            )
        check_queue(qname, self._settings)
        timeout = self._settings.feed_timeout if feed_timeout is None else feed_timeout
        timeout = check_seconds("feed_timeout", timeout, above=0)
        self._refuse_if_over("inference")
        task = InferTask(self._address, self.plan.name, uuid.uuid4().hex, qname, timeout)
        return answered(task, data, schema, columns, keep)

    def scale(self, *, workers: int) -> None:
        """Have more workers, or fewer. Returns when Spark was asked for them; the cluster trains on meanwhile.

        A coordinator (:meth:`~tfos_nb.runtime.program.context.NodeContext.coordinator_dataset`) gives a new worker
        steps from its next pass on, and nothing else stops; what is left of a :meth:`train` is shared out anew. In any
        other cluster, and where there are to be fewer workers, the nodes start again when a state has been saved
        from which all can go on: Keras' ``fit`` keeps one after each epoch, a loop of one's own by ``ctx.checkpoint``.
        The workers with the highest numbers go.

        Parameters
        ----------
        workers : int
            How many there are to be.

        Raises
        ------
        PlanError
            If there can be no such cluster, Spark has too few free slots, or no restart is left: the cluster needs
            ``restarts=1`` or more for its nodes to start again.
        ClusterClosed
            If the cluster has ended.

        Examples
        --------
        >>> cluster = launch(main, workers=2, restarts=1)  # doctest: +SKIP
        >>> cluster.scale(workers=3)  # doctest: +SKIP
        """
        self._refuse_if_over("scale")
        plan = replace(self.plan, workers=workers)
        self._settings.check(plan)
        if self._desk.restarts_left <= 0:
            left = "none is left" if self._settings.restarts else "launch the cluster with restarts=1 or more"
            raise PlanError(f"scale(workers={workers}): the nodes start again for it, which takes a restart; {left}")
        # An interrupt while Spark is asked comes when it was: what is half asked for would never come.
        with interruptible():
            found = survey(self._spark, plan, more) if (more := self._desk.lacking(plan)) else None
            self._desk.scale(plan)
            if found is not None:
                self._nodes.submit_more(plan, found)

    def wait(self, timeout: float | None = None) -> None:
        """Tell the nodes that no more data come, and wait until every ``main`` has returned.

        An interrupt ends the waiting; the cluster goes on.

        Raises
        ------
        TimeoutError
            If it takes longer than ``timeout`` seconds; the cluster goes on.
        NodeFailed
            The first failure of a node.
        """
        with interruptible():
            self._wait(timeout)
        if self._outcome.error is not None:
            raise self._outcome.error

    def _wait(self, timeout: float | None) -> None:
        deadline = deadline_after(timeout)
        lock = self._training_calls.lock
        begun = self._training_calls.await_announced(timeout)
        if not begun or not lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"cluster {self.plan.name} is still being fed after {timeout:g} s")
        try:
            self._training_calls.close("wait() has told the nodes that no more rows come")
        finally:
            lock.release()
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._outcome.over.wait(left):
            raise TimeoutError(f"cluster {self.plan.name} still runs after {timeout:g} s")

    def result(self) -> Any:
        """Return what the chief's ``main`` returned, once it is done."""
        return self.results().get(self._desk.first)

    def results(self) -> dict[str, Any]:
        """Return what every node's ``main`` returned, as ``{"worker:0": …}``, once all are done."""
        self.wait()
        return {node: wire.decode(data) for node, data in self._desk.results().items()}

    def stop(self, grace: float | None = None) -> None:
        """Stop the training and free the slots: politely at first, by force after ``grace`` seconds.

        Idempotent, from any thread. Keras' ``fit`` ends at the next step; a loop of one's own looks at
        ``ctx.should_stop``.
        """
        with interruptible():
            self._outcome.ask_to_stop(Stop("stopped by the user", self._settings.grace if grace is None else grace))
            self._lifecycle.join()

    def request_stop(self) -> str:
        """Ask for the end and return at once, from any thread; say what happens now.

        The first time politely: training ends at its next step, ``main`` goes on to its end, and a ``ctx.save`` under
        way is finished. A second time at once.
        """
        if self._lifecycle.status.ended or self._outcome.over.is_set():
            return f"{self.plan.name} has ended already"
        if self._outcome.stop is None:
            grace = self._settings.grace
            self._outcome.ask_to_stop(Stop("stopped by the user", grace))
            return f"stopping {self.plan.name}: its nodes have {grace:g} s to end; ask again to end them at once"
        self._outcome.ask_to_stop(Stop("stopped by the user", 0.0))
        return f"ending {self.plan.name} at once"

    def close(self) -> None:
        """End the cluster at once, if it has not ended, and free all it holds. Idempotent, from any thread."""
        self.stop(grace=0.0)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.close()
            cause = self._outcome.error
            if isinstance(cause, NodeFailed) and str(cause).splitlines()[0] in str(error) and error is not cause:
                raise cause from error  # what Spark said of its own job that was cancelled for it
            return
        try:
            self.wait()
        except KeyboardInterrupt:  # nobody else may hold it
            self.close()
            raise

    # --- what it shows of itself ---

    @property
    def plan(self) -> ClusterPlan:
        """What was asked for, by :func:`tfos_nb.launch` or :meth:`Cluster.scale`."""
        return self._desk.plan

    @property
    def model_dir(self) -> str:
        """Where ``ctx.save`` writes."""
        return self._model_dir

    @property
    def state(self) -> ClusterStatus:
        """Where the cluster is in its life."""
        with self._changed:
            recovers = any(one.lost for one in self._desk.failures) and self._outcome.may_go_on
            return shown_status(self._lifecycle.status, about_to_recover=recovers, all_up=self._desk.all_up)

    def _cause(self, status: ClusterStatus) -> str:
        """Say what ended the cluster, or what it recovers from."""
        if self._outcome.error is not None or status is not ClusterStatus.RECOVERING:
            return str(self._outcome.error or "")
        lost = [failure.error for failure in self._desk.failures if failure.lost]
        return str(lost[0]) if lost else self._lifecycle.cause

    @property
    def history(self) -> History:
        """The metrics of each epoch, as the chief reported them: ``cluster.history["loss"]``."""
        return self._desk.history

    def events(self) -> list[ClusterEvent]:
        """Return what has happened to the nodes, the oldest first: who came, what each said, who was lost.

        A report of a fault needs it. The newest 2,000 are kept, or 20 a node. A heartbeat that changed nothing is left
        out, and so are results.

        Examples
        --------
        >>> for one in cluster.events()[-20:]:  # doctest: +SKIP
        ...     print(f"{one.seconds:8.2f} s  {one.event}")
        """
        return self._desk.events()

    def logs(self, node: str = "") -> str:
        """Return what a node wrote of late to its output, such as ``logs("worker:1")``; the chief's by default."""
        return "\n".join(self._desk.logs(self._node_named(node)))

    def log_lines(self, node: str = "", limit: int = 500) -> Sequence[LogLine]:
        """Return a node's newest lines, each with its time; the chief's by default."""
        return self._desk.log_lines(self._node_named(node), limit=limit)

    @property
    def log_bytes(self) -> int:
        """Bytes of memory that the kept lines of all nodes take, about."""
        return self._desk.log_bytes

    def shorten_logs(self, most: int | None = None) -> None:
        """Keep some of each node's last lines only; so many that they take at most these bytes, all together."""
        self._desk.shorten_logs(most)

    def _node_named(self, node: str) -> str:
        names = [str(known) for known in self.plan.nodes]
        wanted = node or str(self.plan.chief_node)
        if wanted not in names:
            raise ValueError(f"no node {wanted!r}: the cluster has {', '.join(names)}")
        return wanted

    @property
    def tensorboard_socket(self) -> str:
        """The unix socket that leads to TensorBoard on the chief's executor; empty if there is none, or none now."""
        return self._tunnel if self._tunnel and not self._lifecycle.status.ended else ""

    def snapshot(self) -> ClusterState:
        """Return how the cluster looks now."""
        with self._changed:
            feed, status = self._desk.feeds.current, self.state
            return ClusterState(
                name=self.plan.name,
                id=self.id,
                generation=self._desk.generation,
                status=status,
                nodes=self._desk.snapshot(),
                feed=feed.progress if feed is not None else None,
                elapsed=self._lifecycle.elapsed,
                error=self._cause(status),
                spark_master=self._master,
                log=tuple(self._desk.log_tail(_LOG_SHOWN)),
                log_dir=self._log_dir,
                plan=_text_of(self.plan),
            )

    def __repr__(self) -> str:
        state = self.snapshot()
        minutes, seconds = divmod(int(state.elapsed), 60)
        count = "1 node" if len(self.plan.nodes) == 1 else f"{len(self.plan.nodes)} nodes"
        return f"<Cluster {self.plan.name} {state.status.value} {count} {minutes}:{seconds:02}>"

    @property
    def _changed(self) -> threading.Condition:
        return self._desk.changed

    def _refuse_if_over(self, call: str) -> None:
        if self._outcome.error is not None:
            raise self._outcome.error
        if self._desk.failures and not self._outcome.await_decision(self._desk.rendezvous):
            self._outcome.raise_outcome()
        if self._desk.feeds.closed and not self._lifecycle.status.ended and self._outcome.stop is None:
            raise ClusterClosed(f"cluster {self.plan.name}: {self._desk.feeds.closed}; launch it anew to {call} again")
        if self._lifecycle.status.ended or self._outcome.failing:
            state = self.state.value
            raise ClusterClosed(f"cluster {self.plan.name} is {state}: {call} needs a running one; launch it anew")
