"""``TFCluster``: start, feed and shut down a cluster, under TensorFlowOnSpark's names."""  # noqa: N999 - its name

from __future__ import annotations

import contextlib
import logging
import math
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tfos_nb.cluster import Cluster, launch
from tfos_nb.compat._program import Program
from tfos_nb.driver.launching import error_of_job
from tfos_nb.errors import ClusterClosed, PlanError, check_count
from tfos_nb.runtime.feed.messages import check_queue

__all__ = ["InputMode", "TFCluster", "reserve", "run"]

logger = logging.getLogger(__name__)

_EPOCHS = 10  # number of passes for num_epochs=0
_SHUTDOWN_SECONDS = 259200
_NOT_FED = ("output", "error", "control")


class InputMode:
    """Source of the nodes' rows, as plain numbers, since programs pass them on."""

    TENSORFLOW = 0
    SPARK = 1


class TFCluster:
    """A running cluster, made by :func:`run`.

    Attributes
    ----------
    native : tfos_nb.Cluster
        This package's own object of the cluster, with its state, logs, results and more.
    sc : pyspark.SparkContext
        The SparkContext.
    cluster_meta, meta : dict
        The settings with which the cluster was started.
    input_mode : int
        One of :class:`InputMode`.
    queues : list of str
        The queues that were given to :func:`run`.
    """

    nodeRDD = None  # noqa: N815 - its name; no RDD stands behind the nodes
    server = None

    def __init__(
        self, native: Cluster, sc: Any, meta: dict[str, Any], *, input_mode: int, queues: Sequence[str]
    ) -> None:
        self.native = native
        self.sc = sc
        self.cluster_meta = self.meta = meta
        self.input_mode = input_mode
        self.queues = list(queues)

    @property
    def cluster_info(self) -> list[dict[str, Any]]:
        """The nodes, in the order of their executor ids."""
        ids = {node: index for index, nodes in self.cluster_meta["cluster_template"].items() for node in [nodes]}
        found = []
        for state in self.native.snapshot().nodes:
            role, _, index = state.node.partition(":")
            found.append(
                {
                    "executor_id": ids.get(state.node, -1),
                    "host": state.host,
                    "job_name": self.cluster_meta["master_node"] if role == "chief" else role,
                    "task_index": int(index),
                    "pid": state.pid,
                }
            )
        return sorted(found, key=lambda node: node["executor_id"])

    def train(self, dataRDD: Any, num_epochs: int = 0, feed_timeout: float = 600, qname: str = "input") -> None:  # noqa: N803
        """Feed the rows of an RDD (or a DataFrame, or of each RDD of a DStream) to the workers.

        Parameters
        ----------
        dataRDD : pyspark.RDD
            The rows.
        num_epochs : int
            Number of passes; 0 means 10.
        feed_timeout : float
            Seconds for which a node may take no row while rows wait for it.
        qname : str
            The queue to which the rows are fed.
        """
        self._check_fed("train", qname)
        if type(num_epochs) is not int or num_epochs < 0:
            raise PlanError(f"num_epochs must be a whole number, 0 or more, got {num_epochs!r}; 0 means {_EPOCHS}")
        if hasattr(type(dataRDD), "foreachRDD"):
            dataRDD.foreachRDD(lambda rdd: self._feed(rdd, num_epochs or 1, feed_timeout, qname))
            return
        self.native.train(dataRDD, num_epochs or _EPOCHS, qname=qname, feed_timeout=feed_timeout)

    def _feed(self, rdd: Any, epochs: int, feed_timeout: float, qname: str) -> None:
        """Feed the rows of one interval of a stream. Intervals without rows are skipped."""
        if not self.native.state.ended and not rdd.isEmpty():
            with contextlib.suppress(ClusterClosed):  # the nodes have ended in the meantime
                self.native.train(rdd, epochs, qname=qname, feed_timeout=feed_timeout)

    def inference(self, dataRDD: Any, feed_timeout: float = 600, qname: str = "input") -> Any:  # noqa: N803
        """Return the RDD of the program's results for the rows of an RDD: lazy, one result per row, in order."""
        self._check_fed("inference", qname)
        rdd = dataRDD.rdd if hasattr(dataRDD, "mapInArrow") else dataRDD
        return self.native.inference(rdd, qname=qname, feed_timeout=feed_timeout)

    def _check_fed(self, call: str, qname: str) -> None:
        if self.input_mode != InputMode.SPARK:
            raise PlanError(f"{call} feeds rows, and this cluster reads files: run it with input_mode=InputMode.SPARK")
        check_queue(qname, self.queues, PlanError)

    def shutdown(self, ssc: Any = None, grace_secs: float = 0, timeout: float | None = _SHUTDOWN_SECONDS) -> None:
        """Tell the nodes that no more rows come, and wait until every program has returned; raise any failure.

        Parameters
        ----------
        ssc : pyspark.streaming.StreamingContext, optional
            A StreamingContext that feeds the cluster. Its end is awaited first. It is stopped when the nodes are done.
        grace_secs : float
            Not used, because the end of a node that still exports is awaited.
        timeout : float
            Seconds to wait before the nodes are ended. -1: no limit.

        Raises
        ------
        TimeoutError
            If the nodes did not end within ``timeout``.
        NodeFailed
            If a node failed.
        """
        if ssc is not None:
            self._await_stream(ssc)
        try:
            self.native.wait(None if timeout is None or timeout < 0 else timeout)
        except TimeoutError:
            if not self.native.state.ended:  # the cluster's own error may be a TimeoutError too
                self.native.close()
            raise

    def _await_stream(self, ssc: Any) -> None:
        """Wait for the end of the streams or of the nodes. :meth:`shutdown` raises a failure of the nodes."""
        try:
            while not ssc.awaitTerminationOrTimeout(1):
                if self.native.state.ended:
                    ssc.stop(stopSparkContext=False, stopGraceFully=True)
                    return
        except Exception as error:
            ssc.stop(stopSparkContext=False, stopGraceFully=False)
            if not self.native.state.ended:  # an error in the program's streams, which does not end the nodes
                self.native.close()
                raise error_of_job(error, "the stream ended by an error") from error

    def tensorboard_url(self) -> str | None:
        """Return a link to TensorBoard on this machine, which works once; None without TensorBoard."""
        if not self.native.snapshot().log_dir:
            return None
        from tfos_nb.jupyter.endpoint import the_endpoint

        endpoint = the_endpoint()
        endpoint.serve(self.native)
        return f"http://127.0.0.1:{endpoint.open_port()}/{endpoint.access_link(self.native.id)}"


def run(  # noqa: PLR0917 - its order
    sc: Any,
    map_fun: Callable[[Any, Any], Any],
    tf_args: Any,
    num_executors: int,
    num_ps: int,
    tensorboard: bool = False,
    input_mode: int = InputMode.TENSORFLOW,
    log_dir: str | None = None,
    driver_ps_nodes: bool = False,
    master_node: str | None = None,
    reservation_timeout: float = 600,
    queues: Sequence[str] = ("input", "output", "error"),
    eval_node: bool = False,
    release_port: bool = True,
) -> TFCluster:
    """Start a cluster and call ``map_fun(tf_args, ctx)`` on every node.

    Parameters
    ----------
    sc : pyspark.SparkContext
        The SparkContext.
    map_fun : callable
        The program.
    tf_args : object
        Passed to the program: a Namespace, a dictionary, or a list, which is also its ``sys.argv``.
    num_executors : int
        Number of all nodes: parameter servers, chief, evaluator and workers.
    num_ps : int
        Number of parameter servers.
    tensorboard : bool
        Whether to run TensorBoard.
    input_mode : int
        One of :class:`InputMode`.
    log_dir : str, optional
        The directory that TensorBoard shows.
    driver_ps_nodes : bool
        Whether the parameter servers run on the driver's host.
    master_node : str, optional
        ``"chief"`` (or ``"master"``) for a chief beside the workers.
    reservation_timeout : float
        Seconds within which all nodes must register.
    queues : list of str
        The queues. Queues named output, error or control are not fed.
    eval_node : bool
        Whether one node is an evaluator.
    release_port : bool
        Not used, because a node's port stays reserved until TensorFlow has it.

    Raises
    ------
    PlanError
        If the numbers of nodes do not fit, or Spark cannot run the plan.
    RendezvousTimeout, NodeFailed
        If the nodes did not start.
    """
    fed = input_mode == InputMode.SPARK
    _check(sc, num_executors, num_ps, input_mode, fed and (driver_ps_nodes or eval_node))
    chief = master_node is not None
    workers = num_executors - num_ps - int(chief) - int(bool(eval_node))
    if workers < 0 or (workers == 0 and not chief):
        parts = f"{num_ps} ps" + ", a chief" * chief + ", an evaluator" * bool(eval_node)
        raise PlanError(
            f"num_executors={num_executors} counts all nodes: with {parts}, only {max(workers, 0)} workers are left; "
            "raise it"
        )
    if master_node not in (None, "chief", "master"):
        raise PlanError(
            f"master_node={master_node!r}: master_node must be 'chief', or 'master', which means the same here"
        )
    from pyspark.sql import SparkSession

    meta = _meta(sc, num_executors, num_ps, master_node, bool(eval_node))
    extra: dict[str, Any] = {"driver_ps_nodes": True} if driver_ps_nodes else {}
    native = launch(
        Program(map_fun, meta["default_fs"], meta["working_dir"], master_node or "chief", _spark_user(sc)),
        tf_args,
        spark=SparkSession(sc),
        workers=workers,
        ps=num_ps,
        chief="trains" if chief else False,
        evaluator=bool(eval_node),
        input_mode="spark" if fed else "tensorflow",
        gpus=_gpus_wanted(sc, tf_args),
        tensorboard=bool(tensorboard),
        log_dir=log_dir if tensorboard else None,
        rendezvous_timeout=reservation_timeout,
        queues=[name for name in queues if name not in _NOT_FED] or ["input"],
        **extra,
    )
    return TFCluster(native, sc, meta, input_mode=input_mode, queues=queues)


def check_context(sc: Any) -> None:
    """Raise PlanError if ``sc`` is not a SparkContext."""
    if not hasattr(sc, "parallelize"):
        raise PlanError(f"sc is a {type(sc).__name__}, not a SparkContext: give spark.sparkContext")


def _check(sc: Any, num_executors: int, num_ps: int, input_mode: int, refused: bool) -> None:
    check_context(sc)
    for name, value in (("num_executors", num_executors), ("num_ps", num_ps)):
        check_count(name, value, 0)
    if input_mode not in (InputMode.TENSORFLOW, InputMode.SPARK):
        raise PlanError(f"input_mode must be InputMode.TENSORFLOW (0) or InputMode.SPARK (1), got {input_mode!r}")
    if refused:
        raise PlanError("driver_ps_nodes and eval_node need input_mode=InputMode.TENSORFLOW, got InputMode.SPARK")


def _meta(sc: Any, num_executors: int, num_ps: int, master_node: str | None, eval_node: bool) -> dict[str, Any]:
    roles = [*(f"ps:{index}" for index in range(num_ps)), *(["chief:0"] if master_node else [])]
    roles += ["evaluator:0"] if eval_node else []
    roles += [f"worker:{index}" for index in range(num_executors - len(roles))]
    default_fs = str(sc._jsc.hadoopConfiguration().get("fs.defaultFS"))
    return {
        "id": uuid.uuid4().int >> 64,
        "cluster_template": dict(enumerate(roles)),
        "num_executors": num_executors,
        "master_node": master_node,
        "default_fs": "file://" if default_fs.startswith("file:") else default_fs,
        "working_dir": os.getcwd(),
    }


def _spark_user(sc: Any) -> str:
    return str(sc.sparkUser())


def _gpus_wanted(sc: Any, tf_args: Any) -> int:
    """Return the number of GPUs of each worker: ``num_gpus`` of the arguments, or else Spark's GPUs per task."""
    found = tf_args.get("num_gpus") if isinstance(tf_args, dict) else getattr(tf_args, "num_gpus", None)
    if type(found) is int:
        return max(found, 0)
    return math.ceil(float(sc.getConf().get("spark.task.resource.gpu.amount", "0")))


class _Reserved:
    """Result of :func:`reserve`: a cluster that is not started yet."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments

    def start(self, map_fun: Callable[[Any, Any], Any], tf_args: Any) -> TFCluster:
        """Start the cluster and return it. This object becomes that cluster too, as older programs expect."""
        started = run(map_fun=map_fun, tf_args=tf_args, **self._arguments)
        self.__dict__ = started.__dict__
        self.__class__ = TFCluster  # type: ignore[assignment]
        return started


def reserve(  # noqa: PLR0917 - its order
    sc: Any,
    num_executors: int,
    num_ps: int,
    tensorboard: bool = False,
    input_mode: int = InputMode.TENSORFLOW,
    log_dir: str | None = None,
    queues: Sequence[str] = ("input", "output"),
) -> Any:
    """Return a prepared cluster, as programs from 2017 expect. Its ``start(map_fun, tf_args)`` starts it."""
    _check(sc, num_executors, num_ps, input_mode, False)
    return _Reserved(
        {
            "sc": sc,
            "num_executors": num_executors,
            "num_ps": num_ps,
            "tensorboard": tensorboard,
            "input_mode": input_mode,
            "log_dir": log_dir,
            "queues": queues,
        }
    )
