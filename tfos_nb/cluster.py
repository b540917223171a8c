"""Launch and control a TensorFlow cluster on Spark from the driver: :func:`launch` and :class:`Cluster`.

The calls here only send requests and wait. The cluster's own thread decides its outcome
(:mod:`tfos_nb.driver.cluster_lifecycle`).
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from tfos_nb.cluster_inference import answered
from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.driver.cluster_lifecycle import ClusterLifecycle, shown_status
from tfos_nb.driver.executors.decommissioning import DecommissionWatch
from tfos_nb.driver.executors.missing import MissingExecutors
from tfos_nb.driver.feeding.streaming import StreamTraining, is_stream, refuse_stream
from tfos_nb.driver.feeding.training import Training
from tfos_nb.driver.feeding.training_calls import TrainingCalls
from tfos_nb.driver.hangs.watch import HangWatch
from tfos_nb.driver.launching import NodeTasks, check_door_variables, check_keras, find_earlier, open_door, survey
from tfos_nb.driver.membership.journal import ClusterEvent
from tfos_nb.driver.node_jobs import NodeJobs
from tfos_nb.driver.outcome import ClusterOutcome
from tfos_nb.driver.prewarm import settle, warm_token
from tfos_nb.driver.settings import Settings, check_seconds, checked_env, deadline_after
from tfos_nb.errors import ClusterClosed, FeedFailed, NodeFailed, PlanError, TfosError, check_count
from tfos_nb.interrupts import interruptible
from tfos_nb.records.recorder import RunRecorder, write_file
from tfos_nb.records.run import Run, package_versions, plain_arguments, plan_arguments, this_process
from tfos_nb.redaction import without_password, without_secrets
from tfos_nb.rich import Rich
from tfos_nb.runtime.code.payload import DETACHED, FED, pack
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.lifecycle import ModelSaved, Stop
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode
from tfos_nb.runtime.control.processes import private_directory, remove_directory
from tfos_nb.runtime.feed.messages import check_queue
from tfos_nb.runtime.inference.serving import InferTask
from tfos_nb.runtime.node.stacks import NO_ANSWER, no_answer
from tfos_nb.runtime.storage.paths import absolute
from tfos_nb.spark.contexts import context_of
from tfos_nb.spark.partitioning import SteadyPartitions
from tfos_nb.spark.session import SparkJobs, await_executors, session_and_format
from tfos_nb.state import active_clusters
from tfos_nb.state.chart_data import chart_data
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, LogLine
from tfos_nb.state.history import History
from tfos_nb.state.training_curve import thin_points

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from tfos_nb.runtime.control.door import Door

__all__ = ["Cluster", "follower_of", "launch"]

logger = logging.getLogger(__name__)

_DETACHED = "tfos_nb.detached.starting"
_LOG_SHOWN = 60  # lines of all nodes in a snapshot
_POINTS_SHOWN = 400  # of the metrics, in the snapshot of an ended cluster and in the record of a run
_ROWS_FAILED = f"{FeedFailed.__module__}.{FeedFailed.__name__}"  # in Spark's error of a task that had no result
_CAUSE_WITHIN = 2.0  # seconds
_ON_TIMEOUT = "it continues; call wait() again, or stop()"
_NOT_RECORDED = "the run's record %s cannot be written: %s. record=DIR writes it elsewhere, and record=False nowhere"
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
    checkpoint_every: float | None = Settings.checkpoint_every,
    resume: bool | str | os.PathLike[str] = Settings.resume,
    warm: bool = Settings.warm,
    warm_idle: float = Settings.warm_idle,
    record: bool | str | os.PathLike[str] = Settings.record,
    arguments: Mapping[str, Any] | None = None,
    mlflow: bool | str | None = None,
    sources: Mapping[str, str] | None = None,
    wait_until_up: bool = True,
    detach: bool | str = False,
    keep: float = 24.0,
    data: Callable[[SparkSession], Any] | None = None,
    epochs: int = 1,
    validation: Callable[[SparkSession], Any] | None = None,
) -> Cluster:
    """Start a TensorFlow cluster on Spark's executors and call ``main(args, ctx)`` on every node.

    Parameters
    ----------
    main : callable
        The program. It takes ``args`` and a :class:`~tfos_nb.runtime.program.context.NodeContext`. It is sent by value,
        with all that it refers to. Its result must be plain data.
    args : object, optional
        Passed to ``main``.
    spark : SparkSession, optional
        Where to run. Default: the active session, or else an embedded local Spark.
    workers, ps, chief, evaluator, input_mode, cpus, gpus, name
        The plan: see :class:`ClusterPlan`.
    driver_ps_nodes, master_node, protocol, evaluator_may_fail
        More of the plan.
    model_dir : str, optional
        Where ``ctx.save`` writes: a path that the chief's host can write, or a URL that fsspec knows. Default:
        ``tfos_models/NAME`` under the driver's working directory; ``NAME-2`` while another cluster of that name runs.
    tensorboard : bool, optional
        Whether TensorBoard runs on the chief's executor and is shown in the notebook. Keras' ``fit`` then writes its
        epochs there automatically, unless it was given a ``TensorBoard`` callback.
    log_dir : str, optional
        The directory that TensorBoard shows, ``ctx.log_dir`` in ``main``. Default: ``logs`` under ``model_dir``.
        Implies ``tensorboard``.
    autolog : bool, optional
        Whether Keras' ``fit`` and ``evaluate`` report their progress by themselves.
    env : mapping of str to str, optional
        Environment variables of the nodes, such as ``{"TF_USE_LEGACY_KERAS": "1"}``.
    rendezvous_timeout : float, optional
        Seconds within which all nodes must come.
    feed_timeout : float, optional
        Seconds for which nodes may leave rows waiting while none of them computes, reports or saves. A node that
        computes never times out, however long its step takes.
    grace : float, optional
        Seconds that ``main`` has to end after :meth:`Cluster.stop`. A running ``ctx.save`` is always finished.
    buffer_bytes : int, optional
        Bytes of rows that may wait in a node's memory. When it is full, Spark waits.
    spill_bytes : int, optional
        Bytes of rows that a node may keep on its local disk for later epochs. If the rows are more, Spark reads them
        again for each epoch.
    queues : list of str, optional
        Names of queues of rows, each of which is fed and read separately: ``train(df, qname="valid")``, and
        ``ctx.dataset(…, queue="valid")`` in ``main``.
    restarts : int, optional
        How often the nodes may start again when one was lost: its process, its supervisor, its executor or its host.
        ``main`` is then called again on all nodes. An exception in ``main`` is not retried. ``main`` continues from its
        saved state: see ``ctx.resume`` and Keras' ``BackupAndRestore``. Rows that the state does not include are fed
        again.
    heartbeat_timeout : float, optional
        Seconds after which a node that sends nothing, or whose process is stopped, counts as lost; at least 3.
    min_workers : int, optional
        With ``restarts``: continue with at least this many workers while a lost one is not back. It joins the others
        again when they have saved a state. Default: wait for all workers.
    checkpoint_every : float, optional
        With ``restarts``: every so many seconds the chief also writes the state of ``fit``, which the nodes keep in
        memory, to ``model_dir``. So training continues in the middle of the epoch if all nodes are lost at once.
    resume : bool or str, optional
        With ``restarts``: continue the training of an earlier cluster that was lost or stopped, from its last state in
        ``model_dir``. True: of the run that was saved last there. Or a run: its ``ctx.checkpoint_dir``, or a checkpoint
        in it, such as :func:`tfos_nb.attach` names. Feed the same data, with the same ``epochs`` as before: rows that
        the state includes are left out.
    warm : bool, optional
        Whether the nodes are forked from a process that has imported TensorFlow. That process stays on the executor's
        host for the next cluster. Nodes with GPUs are never forked.
    warm_idle : float, optional
        How long that process waits for another node before it ends.
    record : bool or str, optional
        Whether the run is recorded in a small JSON file for :func:`tfos_nb.runs`, in ``tfos_runs`` under ``model_dir``;
        or the directory that gets ``tfos_runs``.
    arguments : mapping of str to object, optional
        The run's arguments in its record. Default: those of ``args`` that are data, without secrets.
    mlflow : bool or str, optional
        Whether the run is logged to MLflow; or the name of the experiment for a new run. Default: to the active run, if
        the program has started one. See :func:`tfos_nb.mlflow.log`.
    sources : mapping of str to str, optional
        Source text by file name, for tracebacks.
    wait_until_up : bool, optional
        Whether to return only after ``main`` was called on every node.
    detach : bool or str, optional
        Whether the cluster outlives this kernel: its driver, and a Spark application with this session's configuration,
        are in a process of their own on this host. With ``"executor"`` and a session of Spark Connect that process is
        on an executor, so the cluster outlives this host, too. See :func:`tfos_nb.attach`.
    keep : float, optional
        With ``detach``: hours for which that process keeps the results after the cluster's end. Without ``data`` also
        those after which the cluster ends if no kernel feeds it; 0 for no such end.
    data, validation : callable, optional
        With ``detach``: functions that take a SparkSession and return the DataFrame, such as
        ``lambda spark: spark.read.parquet(path)``. The cluster ends when it is trained.
    epochs : int, optional
        With ``data``: passes over it.

    Returns
    -------
    Cluster
        With ``detach`` an :class:`~tfos_nb.detached.attached.AttachedCluster`.

    Raises
    ------
    PlanError
        If this Spark cannot run the plan, or ``main`` cannot be pickled; before any node starts.
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
        checkpoint_every=checkpoint_every,
        resume=resume,
        warm=warm,
        warm_idle=warm_idle,
        record=record,
    ).for_plan(plan, () if model_dir else _model_dirs_of_detached())
    if detach not in (True, False, "executor"):
        raise PlanError(f"detach must be True, False or 'executor', got {detach!r}")
    payload = pack(main, args, sources, DETACHED if detach else FED)
    recorded = plain_arguments(args if arguments is None else _checked_arguments(arguments))
    if detach:
        attached = importlib.import_module(_DETACHED).start_detached(  # it is above this module, as it launches, too
            plan,
            settings,
            payload,
            recorded,
            spark=spark,
            mlflow=mlflow,
            keep=keep,
            data=data,
            validation=validation,
            epochs=epochs,
            where=detach,
        )
        try:
            if wait_until_up:
                attached.wait_until_up()
        except BaseException:  # as below
            attached.close()
            raise
        return attached  # type: ignore[no-any-return]
    _refuse_data(data, validation)
    follower = follower_of(mlflow)
    check_door_variables()
    session, await_format = session_and_format(spark, len(plan.spark_nodes) + 2)
    cluster = Cluster(plan, settings, payload, session, arguments=recorded, follower=follower)
    try:
        with interruptible():
            cluster.start()
            if wait_until_up:
                cluster.wait_until_up()
            await_format()
    except BaseException:  # also an interrupt at the block's end: the caller has no cluster yet that it could stop
        cluster.close()
        raise
    return cluster


def _checked_arguments(arguments: Any) -> Mapping[str, Any]:
    if not isinstance(arguments, Mapping):
        raise PlanError(f"arguments must be a dictionary, as in arguments={{'lr': 0.1}}, got {arguments!r:.80}")
    return arguments


def _model_dirs_of_detached() -> list[str]:
    """Return the model directories of detached clusters that run; their package is above this one."""
    return importlib.import_module("tfos_nb.detached.places").model_dirs()  # type: ignore[no-any-return]


def _runs_of_detached() -> set[str]:
    """Return the checkpoints' names of detached clusters that run."""
    return set(importlib.import_module("tfos_nb.detached.places").runs())


def _refuse_data(data: Any, validation: Any) -> None:
    for name, value in (("data", data), ("validation", validation)):
        if value is not None:
            raise PlanError(f"{name}= goes with detach=True: without it, call cluster.train(df)")


def follower_of(option: Any) -> Any:
    """Return the object that logs a cluster to MLflow; None if nothing is logged.

    That package is above this one, and few programs use it, so it is imported by its name. By default it is imported
    only if the program has imported MLflow.
    """
    if option is False or (option is None and sys.modules.get("mlflow") is None):
        return None
    return importlib.import_module("tfos_nb.mlflow.following").follower(option)


class Cluster(Rich):
    """A running (or ended) TensorFlow cluster. Made by :func:`launch`; a context manager.

    Leaving its ``with`` block without an error tells the nodes that no more data come, and waits for every ``main`` to
    return. Leaving it with an error stops the nodes, and so does an interrupt of that waiting.

    Attributes
    ----------
    history : History
        The metrics of each epoch, as the chief reported them.
    id : str
        Its name among all clusters of the machine.
    checkpoint_run : str
        The name of its directory among the ``checkpoints`` in :attr:`model_dir`: its own, or that of the cluster whose
        training it continues.
    """

    _rich = "cluster"

    def __init__(
        self,
        plan: ClusterPlan,
        settings: Settings,
        payload: bytes,
        spark: SparkSession,
        *,
        arguments: Mapping[str, Any] | None = None,
        follower: Any = None,
        id: str = "",
    ) -> None:
        self._follower = follower
        self._settings = settings
        self._spark = spark
        self._master, self._spark_ui = str(spark.conf.get("spark.master", "")), context_of(spark).ui
        self._application = str(spark.conf.get("spark.app.id", ""))
        self._arguments = dict(arguments or {})
        self._process, self._launched_at = this_process(), time.time()
        self._payload = payload
        self.id = id or uuid.uuid4().hex[:12]
        self._controller = ClusterController(
            plan,
            settings.restarts,
            settings.heartbeat_timeout,
            settings.grace,
            durable=settings.checkpoint_every is not None,
        )
        self._jobs = SparkJobs(spark, f"tfos_nb-{self.id}")
        self._outcome = ClusterOutcome(plan.name, self._controller)
        self._lifecycle = ClusterLifecycle(plan.name, self._controller, self._outcome, self._jobs, settings)
        self._model_dir, self._log_dir = settings.model_dir_for(plan.name), settings.log_dir_for(plan.name)
        self._recorded_dir = without_password(absolute(self._model_dir)) if self._model_dir else ""
        self._tunnel = ""
        self._training_calls = TrainingCalls(self._outcome, self._controller)
        self._partitions = SteadyPartitions()
        self.checkpoint_run = self.id

    # --- the user's calls ---

    def start(self) -> None:
        """Check the plan with Spark, open the door and submit the nodes; returns before they are up."""
        settle(self._spark)
        await_executors(self._spark, len(self.plan.spark_nodes), self._settings.rendezvous_timeout)
        launching = survey(self._spark, self.plan)
        check_keras(self._spark, self.plan, self._settings.env)
        first = self._continue_earlier() if self._settings.resume else 1
        hold, claim = launching.hold, launching.claim
        token = warm_token(self._spark) if self._settings.warm else ""
        door, address = open_door(self._spark, self._controller)
        try:
            self._address = replace(address, patience=self._settings.heartbeat_timeout)
            self._lifecycle.begin()
            run, sent = self.checkpoint_run, self._payload
            tasks = NodeTasks(self.plan, self._settings, self._address, hold, sent, claim, run, first, token)
            self._payload = b""
            if self._log_dir:
                self._open_tunnel(door)
            description = f"tfos_nb cluster {self.plan.name}"
            self._nodes = nodes = NodeJobs(
                self._spark, self._jobs, launching, tasks, description, self._controller, self._outcome.wake
            )
            nodes.submit()
            self._outcome.jobs = lambda: nodes.running
            watch = DecommissionWatch(self._spark, self._controller, self._outcome.over)
            missing = MissingExecutors(self._spark, self._controller, self._outcome, nodes.without_slot)
            self._outcome.why_lost, self._outcome.why_missing = watch.why_lost, missing.why
            self._lifecycle.at_rendezvous(nodes.submit_again)
            self._lifecycle.at_resubmission(nodes.submit_again)
            self._lifecycle.at_rendezvous(self._training_calls.rewind)
        except BaseException:
            self._lifecycle.abandon(door)
            raise
        active_clusters.begin(self)
        self._lifecycle.at_end(self._training_calls.forget)
        self._lifecycle.at_end(self._partitions.release)
        self._lifecycle.at_end(nodes.forget)
        self._lifecycle.at_end(partial(active_clusters.end, self))
        self._lifecycle.run(door, self._address)
        self._record()
        HangWatch(self.plan.name, self._controller, self._outcome.over).start()
        watch.start()
        missing.start()

    def _continue_earlier(self) -> int:
        """Find the run that ``resume=`` names; return the generation with which its training goes on."""
        running = {one.checkpoint_run for one in active_clusters.active_clusters()} | _runs_of_detached()
        earlier = find_earlier(self._spark, self._settings, self.plan.name, running)
        self.checkpoint_run = earlier.run
        self._controller.continue_earlier(earlier.generation)
        self._training_calls.resume()
        when = time.strftime(", of %Y-%m-%d %H:%M:%S", time.localtime(earlier.written)) if earlier.written else ""
        logger.info(
            "cluster %s continues run %s from %s%s", self.plan.name, earlier.run, without_password(earlier.state), when
        )
        return self._controller.generation

    def _record(self) -> None:
        """Keep the run's record from now on, and until the outcome is in it."""
        place = self._settings.run_file_for(self.plan.name, self.id, self._launched_at)
        if place:
            tell = partial(logger.warning, _NOT_RECORDED, without_password(place))
            recorder = RunRecorder(lambda: self.run, partial(write_file, place), tell)
            self._lifecycle.at_outcome(recorder.finish)
            recorder.start()
        if self._follower is not None:
            self._lifecycle.at_outcome(self._follower.finish)
            self._follower.begin(self, self._result_so_far, self._settings.env)

    def _result_so_far(self) -> Any:
        """Return the value that the chief's main has returned; None if it has not."""
        found = self._controller.results().get(self._controller.first)
        return None if found is None else wire.decode(found)

    def _open_tunnel(self, door: Door) -> None:
        directory = private_directory("tunnel")
        path = os.path.join(directory, "tensorboard")
        door.open_tunnel(path, partial(self._controller.send_to, str(self.plan.chief_node)))
        self._tunnel = path
        remove = partial(remove_directory, directory)
        atexit.register(remove)  # a program that is interrupted may not wait for the cluster's end
        self._lifecycle.at_end(remove)
        self._lifecycle.at_end(partial(atexit.unregister, remove))

    def wait_until_up(self) -> None:
        """Wait until ``main`` has been called on every node; raise what went wrong instead."""
        while True:
            rendezvous = self._controller.rendezvous
            with self._changed:
                self._changed.wait_for(
                    lambda: self._outcome.over.is_set() or self._controller.all_up or self._controller.failures
                )
            if not self._controller.failures and self._outcome.error is None:
                return
            if not self._outcome.await_decision(rendezvous):
                self._outcome.raise_outcome()

    def announce_train(self) -> None:
        """Announce that another thread is about to call :meth:`train`, so that an earlier :meth:`wait` waits for it."""
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

        Returns when the passes have been delivered, or no node wants more of them. It may be called again for further
        passes. Of a stream it feeds each micro-batch as a pass, and returns when the stream has ended. An interrupt
        (Ctrl-C, or the notebook's) stops the cluster as :meth:`request_stop` does, since an incomplete pass must not
        count as a whole one.

        Parameters
        ----------
        data : pyspark.sql.DataFrame or pyspark.RDD
            The rows. An RDD may have Rows, dictionaries, tuples or single values. Or a stream: a streaming DataFrame,
            its ``writeStream`` (with a trigger and a checkpoint), or a DStream that was not started.
        epochs : int, optional
            Passes; 1 for a stream.
        spill : bool, optional
            Whether the nodes keep their shares on local disk for the later passes. Otherwise Spark reads the rows again
            for each pass.
        qname : str, optional
            The queue to feed, one of the cluster's ``queues``.
        feed_timeout : float, optional
            The cluster's, for this call.
        validation : pyspark.sql.DataFrame or pyspark.RDD, optional
            Rows with the same columns for ``ctx.validation(…)``; they are fed first, once, and kept by the nodes.

        Raises
        ------
        FeedFailed
            If a row cannot be fed, or the data have no rows.
        FeedTimeout
            If for ``feed_timeout`` seconds no node took a waiting row, computed, reported or saved.
        NodeFailed
            If a node fails meanwhile.
        ClusterClosed
            If the cluster has ended.
        """
        if self.plan.input_mode is InputMode.TENSORFLOW:
            raise PlanError(
                "train() feeds rows, and this cluster reads files itself (input_mode='tensorflow'): launch it with "
                "input_mode='spark'"
            )
        check_count("epochs", epochs, 1)
        check_queue(qname, self._settings.queues, PlanError)
        refuse_stream(validation, "validation")
        self._refuse_if_over("train")
        try:
            with interruptible(), self._training_calls.lock:
                self._training_calls.begin()
                self.wait_until_up()
                timeout = self._settings.feed_timeout if feed_timeout is None else feed_timeout
                if self._follower is not None:
                    self._follower.fed(data)
                partitions = self._partitions if self._settings.restarts else None
                training = Training(
                    self._outcome, self._controller, self._jobs, timeout, self._address, qname, partitions
                )
                self._feed_or_stop(training, data, epochs, spill, validation)
        except KeyboardInterrupt:  # it may come at the block's end
            self._interrupted()
            raise

    def _feed_or_stop(self, training: Training, data: Any, epochs: int, spill: bool, validation: Any) -> None:
        before = self._controller.feeds.current
        try:
            self._feed(training, data, epochs, spill, validation)
        except BaseException as error:
            begun = self._controller.feeds.is_half_fed and self._controller.feeds.current is not before
            if not isinstance(error, Exception) or (begun and not training.ending):
                self._interrupted()
            raise

    def _interrupted(self) -> None:
        """Stop the cluster once: an incomplete pass cannot be undone."""
        if self._outcome.stop is None and not self._lifecycle.status.ended:
            logger.warning("train() was interrupted: %s", self.request_stop())

    def _feed(self, training: Training, data: Any, epochs: int, spill: bool, validation: Any) -> None:
        if is_stream(data):
            if self._settings.restarts:
                raise PlanError("restarts= cannot be used with a stream yet: launch without it; Spark retries a stream")
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
        """Have ``main`` answer the rows of a DataFrame or an RDD, with one result for each row.

        It is lazy: nothing happens until the results are used, and the cluster must still run then. The rows of a
        partition go to one node, on the same host if possible. The results come back in the rows' order, in the same
        partition. When Spark retries a task, its rows are answered again.

        Parameters
        ----------
        data : pyspark.sql.DataFrame or pyspark.RDD
            The rows. An RDD may have Rows, dictionaries, tuples or single values.
        schema : str or StructType
            The columns of the results, such as ``"prediction double"``. For a DataFrame only.
        columns : list of str, optional
            The columns that ``main`` gets; all by default. For a DataFrame only.
        keep : bool
            Whether the result keeps the DataFrame's own columns, before the new ones.
        qname : str
            The queue from which ``main`` takes the rows.
        feed_timeout : float, optional
            Seconds for which rows may wait while ``main`` neither takes nor answers any; the cluster's by default.

        Returns
        -------
        DataFrame or RDD
            The results, lazy. An RDD's elements are the values that ``main`` gave.

        Raises
        ------
        PlanError
            If the data are neither, the schema is missing or invalid, or a column does not exist.
        ClusterClosed, NodeFailed
            If the cluster has ended.

        Notes
        -----
        The results are computed when somebody asks for them, by a Spark job of the user's. If a node fails meanwhile,
        that job is cancelled, and the user's action raises the node's error. After the cluster's end an action raises
        ClusterClosed, or the error that ended it. For this, the ports of the last 16 such clusters stay open. Over
        Spark Connect a job cannot be cancelled from here: Spark tries each task four times, and raises its own error.

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
                "inference() feeds rows, and this cluster reads files itself (input_mode='tensorflow'): launch it with "
                "input_mode='spark'"
            )
        check_queue(qname, self._settings.queues, PlanError)
        timeout = self._settings.feed_timeout if feed_timeout is None else feed_timeout
        timeout = check_seconds("feed_timeout", timeout, above=0)
        self._refuse_if_over("inference")
        with self._changed:
            self._controller.answering.may_be_asked = True
        task = InferTask(self._address, self.plan.name, uuid.uuid4().hex, qname, timeout)
        return answered(task, data, schema, columns, keep)

    def scale(self, *, workers: int) -> None:
        """Change the number of workers. Returns when Spark was asked for them; the cluster trains on meanwhile.

        A coordinator (:meth:`~tfos_nb.runtime.program.context.NodeContext.coordinator_dataset`) gives a new worker
        steps from its next pass on, and no other node stops. The rest of a running :meth:`train` is shared again. In
        any other cluster, and to remove workers, the nodes start again once a state was saved from which all can
        continue. Keras' ``fit`` saves one after each epoch; a loop of your own saves one with ``ctx.checkpoint``. The
        workers with the highest numbers are removed.

        Parameters
        ----------
        workers : int
            The new number of workers.

        Raises
        ------
        PlanError
            If such a cluster is not possible, Spark has too few free slots, or no restart is left: the nodes can start
            again only if the cluster has ``restarts=1`` or more.
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
        if self._controller.restarts_left <= 0:
            left = "none is left" if self._settings.restarts else "launch the cluster with restarts=1 or more"
            raise PlanError(f"scale(workers={workers}) starts the nodes again, which needs a restart: {left}")
        # An interrupt is deferred until the request to Spark is complete: nodes of half a request would never come.
        with interruptible():
            found = survey(self._spark, plan, more) if (more := self._controller.lacking(plan)) else None
            self._controller.scale(plan)
            if found is not None:
                self._nodes.submit_more(plan, found)

    def stacks(self, timeout: float = 5.0) -> dict[str, str]:
        """Return where each node's program is: the Python stacks of all its threads, the main thread first.

        It also works while a program hangs. The nodes continue meanwhile.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the nodes' answers.

        Returns
        -------
        dict of str to str
            By node, as faulthandler writes them; for a node that did not answer, why. If `py-spy` is installed on an
            executor, it is asked about a process that was stopped by a signal.

        Raises
        ------
        ClusterClosed
            If the cluster has ended.

        Examples
        --------
        >>> print(cluster.stacks()["worker:1"])  # doctest: +SKIP
        Thread (main) 0x00007f2b1c0fb740 (most recent call first):
          File "/home/ann/clicks.py", line 31 in load
          File "/home/ann/clicks.py", line 44 in main
        """
        seconds = check_seconds("timeout", timeout, above=0)
        if self._lifecycle.status.ended:
            raise ClusterClosed(f"cluster {self.plan.name} has ended, so it has no stacks; read cluster.logs(node)")
        taken = self._controller.stacks(seconds)
        running = [one.node for one in self.snapshot().nodes if one.pid is not None and not one.status.ended]
        return {name: taken[name].text or no_answer(taken[name]) if name in taken else NO_ANSWER for name in running}

    def wait(self, timeout: float | None = None) -> None:
        """Tell the nodes that no more data come, and wait until every ``main`` has returned.

        An interrupt ends the waiting; the cluster continues.

        Raises
        ------
        TimeoutError
            If it takes longer than ``timeout`` seconds; the cluster continues.
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
            raise TimeoutError(f"cluster {self.plan.name} is still being fed after {timeout:g} s: {_ON_TIMEOUT}")
        try:
            self._training_calls.close("wait() or the end of its with block has told the nodes that no more rows come")
        finally:
            lock.release()
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._outcome.over.wait(left):
            raise TimeoutError(f"cluster {self.plan.name} still runs after {timeout:g} s: {_ON_TIMEOUT}")

    def await_end(self, timeout: float | None = None) -> bool:
        """Wait for the end, while the cluster may still be fed; return False after ``timeout`` seconds."""
        return self._outcome.over.wait(timeout)

    def await_model(self, known: ModelSaved | None) -> ModelSaved | None:
        """Wait until ``ctx.save`` has written another model than ``known``; return it, or None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._controller.saved_model not in (None, known) or self._outcome.over.is_set()
            )
            saved = self._controller.saved_model
        return saved if saved != known else None

    def result(self) -> Any:
        """Return the value that the chief's ``main`` returned, once it is done."""
        return self.results().get(self._controller.first)

    def results(self) -> dict[str, Any]:
        """Return the values that all nodes' ``main`` returned, as ``{"worker:0": …}``, once all are done."""
        self.wait()
        return {node: wire.decode(data) for node, data in self._controller.results().items()}

    def stop(self, grace: float | None = None) -> None:
        """Stop the training and free the slots: politely at first, by force after ``grace`` seconds.

        Idempotent, from any thread. Keras' ``fit`` ends at the next step; a loop of your own must check
        ``ctx.should_stop``.
        """
        with interruptible():
            self._outcome.ask_to_stop(Stop("stopped by the user", self._settings.grace if grace is None else grace))
            self._lifecycle.join()

    def request_stop(self) -> str:
        """Request a stop and return at once, from any thread; the returned text says what happens now.

        The first call stops politely: training ends at its next step, ``main`` runs to its end, and a running
        ``ctx.save`` is finished. A second call ends the cluster at once.
        """
        if self._lifecycle.status.ended or self._outcome.over.is_set():
            return f"{self.plan.name} has ended already"
        if self._outcome.stop is None:
            grace = self._settings.grace
            self._outcome.ask_to_stop(Stop("stopped by the user", grace))
            return f"stopping {self.plan.name}: its nodes have {grace:g} s to end; ask again to end them at once"
        self._outcome.ask_to_stop(Stop("stopped by the user", 0.0))
        return f"ending {self.plan.name} at once"

    def end_with(self, error: TfosError) -> None:
        """End the cluster at once with this error, as if a node had failed with it; return at once.

        For a program that drives the cluster for others, such as a script that could not read the rows: every caller of
        :meth:`wait`, and the panel, gets the error.
        """
        self._outcome.abort(error)

    def close(self) -> None:
        """End the cluster at once, if it has not ended, and free its resources. Idempotent, from any thread."""
        self.stop(grace=0.0)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, also within a function that is sent to Spark's executors."""
        raise TypeError(
            f"cluster {self.plan.name} belongs to this process, and cannot be pickled or copied: take what is needed "
            "from it before, such as cluster.run, cluster.history or cluster.result()"
        )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            is_of_a_node = _ROWS_FAILED in str(error)
            if is_of_a_node:  # Spark may report a task's failure before the node has reported its own
                self._outcome.wait_for(lambda: self._outcome.over.is_set(), _CAUSE_WITHIN)
            self.close()
            cause = self._outcome.error
            if not isinstance(cause, NodeFailed) or (isinstance(error, NodeFailed) and str(error) == str(cause)):
                return
            if is_of_a_node or str(cause).splitlines()[0] in str(error):
                raise cause from error  # replace Spark's error of a task, or of a cancellation, by its cause
            return
        try:
            self.wait()
        except KeyboardInterrupt:  # the caller may hold no other reference to the cluster, so end it
            self.close()
            raise

    # --- the state that users see ---

    @property
    def plan(self) -> ClusterPlan:
        """The plan that was requested last, by :func:`tfos_nb.launch` or :meth:`Cluster.scale`."""
        return self._controller.plan

    @property
    def model_dir(self) -> str:
        """Directory in which ``ctx.save`` writes."""
        return self._model_dir

    @property
    def state(self) -> ClusterStatus:
        """The status of the cluster."""
        with self._changed:
            recovers = any(one.lost for one in self._controller.failures) and self._outcome.may_go_on
            return shown_status(self._lifecycle.status, about_to_recover=recovers, all_up=self._controller.all_up)

    def _cause(self, status: ClusterStatus) -> str:
        """Return what ended the cluster, or what it recovers from."""
        if self._outcome.error is not None or status is not ClusterStatus.RECOVERING:
            return str(self._outcome.error or "")
        lost = [failure.error for failure in self._controller.failures if failure.lost]
        return str(lost[0]) if lost else self._lifecycle.cause

    @property
    def history(self) -> History:
        """The metrics of each epoch, as the chief reported them: ``cluster.history["loss"]``.

        ``cluster.history.plot()`` draws them, ``cluster.history.to_pandas()`` returns them as a table. At the end of a
        cell it shows its charts.
        """
        return self._controller.history

    @property
    def run(self) -> Run:
        """Record of the run so far: its plan, arguments, metrics, outcome and versions."""
        state, points = self.snapshot(), self.history.points()
        return Run(
            id=self.id,
            name=self.plan.name,
            status=state.status.value,
            started=self._launched_at,
            updated=time.time(),
            seconds=state.elapsed,
            error=without_secrets(state.error) if state.status is not ClusterStatus.RECOVERING else "",
            plan=plan_arguments(self.plan),
            arguments=self._arguments,
            epochs=tuple(self.history.epochs),
            points=tuple(thin_points(points, _POINTS_SHOWN)),
            rows=sum(node.rows for node in state.nodes),
            generation=state.generation,
            versions=package_versions(),
            spark={"application": self._application, "master": without_password(self._master)},
            model_dir=self._recorded_dir,
            process=self._process,
        )

    def curves(self, metric: str = "", by: str = "", node: str = "") -> dict[str, Any]:
        """Return the numbers of a metric's chart as JSON has them, for a page: see :func:`chart_data`.

        Raises
        ------
        ValueError
            If the cluster has no such node.
        """
        nodes = [str(known) for known in self.plan.finishing_nodes]
        if node:
            self._node_named(node)
        return chart_data(self.history.points(node), metric=metric, by=by, node=node, nodes=nodes)

    def events(self) -> list[ClusterEvent]:
        """Return the events of the nodes, the oldest first: arrivals, messages and losses.

        Add them to a bug report: :func:`tfos_nb.driver.membership.journal.replay` makes the nodes' state of them. The
        newest 2,000 are kept, or 20 for each node if that is more, and those before as the state that they made.
        Heartbeats that changed nothing are left out, and so are results.

        Examples
        --------
        >>> for one in cluster.events()[-20:]:  # doctest: +SKIP
        ...     print(f"{one.seconds:8.2f} s  {one.event}")
        """
        return self._controller.events()

    def logs(self, node: str = "") -> str:
        """Return the last lines of a node's output, such as ``logs("worker:1")``; the chief's by default."""
        return "\n".join(self._controller.logs(self._node_named(node)))

    def log_lines(self, node: str = "", limit: int = 500) -> Sequence[LogLine]:
        """Return a node's newest lines, each with its time; the chief's by default."""
        return self._controller.log_lines(self._node_named(node), limit=limit)

    @property
    def log_bytes(self) -> int:
        """Approximate memory in bytes of the kept lines of all nodes."""
        return self._controller.log_bytes

    def shorten_logs(self, most: int | None = None) -> None:
        """Keep only the last lines of each node, at most ``most`` bytes for all nodes together."""
        self._controller.shorten_logs(most)

    def _node_named(self, node: str) -> str:
        names = [str(known) for known in self.plan.nodes]
        wanted = node or str(self.plan.chief_node)
        if wanted not in names:
            raise ValueError(f"no node {wanted!r}: the cluster has {', '.join(names)}")
        return wanted

    @property
    def tensorboard_socket(self) -> str:
        """The unix socket that leads to TensorBoard on the chief's executor; empty if TensorBoard does not run."""
        return self._tunnel if self._tunnel and not self._lifecycle.status.ended else ""

    def snapshot(self) -> ClusterState:
        """Return the current state of the cluster."""
        with self._changed:
            feed, status = self._controller.feeds.current, self.state
            return ClusterState(
                name=self.plan.name,
                id=self.id,
                generation=self._controller.generation,
                status=status,
                nodes=self._controller.snapshot(),
                feed=feed.progress if feed is not None else None,
                elapsed=self._lifecycle.elapsed,
                error=self._cause(status),
                spark_master=self._master,
                spark_ui=self._spark_ui,
                log=tuple(self._controller.log_tail(_LOG_SHOWN)),
                log_dir=self._log_dir,
                plan=_text_of(self.plan),
                points=tuple(thin_points(self.history.points(), _POINTS_SHOWN)) if status.ended else (),
            )

    def __repr__(self) -> str:
        state = self.snapshot()
        minutes, seconds = divmod(int(state.elapsed), 60)
        count = "1 node" if len(self.plan.nodes) == 1 else f"{len(self.plan.nodes)} nodes"
        return f"<Cluster {self.plan.name} {state.status.value} {count} {minutes}:{seconds:02}>"

    @property
    def _changed(self) -> threading.Condition:
        return self._controller.changed

    def _refuse_if_over(self, call: str) -> None:
        if self._outcome.error is not None:
            raise self._outcome.error
        if self._controller.failures and not self._outcome.await_decision(self._controller.rendezvous):
            self._outcome.raise_outcome()
        if self._controller.feeds.closed and not self._lifecycle.status.ended and self._outcome.stop is None:
            raise ClusterClosed(
                f"cluster {self.plan.name}: {self._controller.feeds.closed}; launch it again to {call} again"
            )
        if self._lifecycle.status.ended or self._outcome.failing:
            state = self.state.value
            raise ClusterClosed(f"cluster {self.plan.name} is {state}: {call} needs a running one; launch it again")
