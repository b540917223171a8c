"""``TFCluster``: start a cluster, feed it, shut it down, as TensorFlowOnSpark calls it."""  # noqa: N999 - its name

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
from tfos_nb.errors import ClusterClosed, PlanError

__all__ = ["InputMode", "TFCluster", "reserve", "run"]

logger = logging.getLogger(__name__)

_EPOCHS = 10  # what num_epochs=0 means
_SHUTDOWN_SECONDS = 259200
_NOT_FED = ("output", "error", "control")


class InputMode:
    """Where the nodes' data come from: plain numbers, as programs pass them on."""

    TENSORFLOW = 0
    SPARK = 1


class TFCluster:
    """A running cluster. Made by :func:`run`.

    Attributes
    ----------
    native : tfos_nb.Cluster
        The cluster itself: its state, logs, results and more.
    sc : pyspark.SparkContext
        Spark's.
    cluster_meta, meta : dict
        What the cluster was started with.
    input_mode : int
        Of :class:`InputMode`.
    queues : list of str
        As given.
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
            Passes; 0 means 10.
        feed_timeout : float
            Seconds for which a node may take no row while rows wait for it.
        qname : str
            The queue.
        """
        self._check_fed("train", qname)
        if type(num_epochs) is not int or num_epochs < 0:
            raise PlanError(f"num_epochs must be a whole number, 0 or more, got {num_epochs!r}; 0 means {_EPOCHS}")
        if hasattr(type(dataRDD), "foreachRDD"):
            dataRDD.foreachRDD(lambda rdd: self._feed(rdd, num_epochs or 1, feed_timeout, qname))
            return
        self.native.train(dataRDD, num_epochs or _EPOCHS, qname=qname, feed_timeout=feed_timeout)

    def _feed(self, rdd: Any, epochs: int, feed_timeout: float, qname: str) -> None:
        """Feed one interval of a stream; many have no row."""
        if not self.native.state.ended and not rdd.isEmpty():
            with contextlib.suppress(ClusterClosed):  # the nodes had enough in the meantime
                self.native.train(rdd, epochs, qname=qname, feed_timeout=feed_timeout)

    def inference(self, dataRDD: Any, feed_timeout: float = 600, qname: str = "input") -> Any:  # noqa: N803
        """Return the RDD of what ``main`` gives for the rows of an RDD: lazy, one result a row, in order."""
        self._check_fed("inference", qname)
        rdd = dataRDD.rdd if hasattr(dataRDD, "mapInArrow") else dataRDD
        return self.native.inference(rdd, qname=qname, feed_timeout=feed_timeout)

    def _check_fed(self, call: str, qname: str) -> None:
        if self.input_mode != InputMode.SPARK:
            raise PlanError(f"{call} feeds rows, and this cluster reads files: run it with input_mode=InputMode.SPARK")
        if qname not in self.queues:
            raise PlanError(f"qname={qname!r}: this cluster has the queues {self.queues}. Run it with queues=[…]")

    def shutdown(self, ssc: Any = None, grace_secs: float = 0, timeout: float | None = _SHUTDOWN_SECONDS) -> None:
        """Say that no more rows come, and wait until every ``main`` has returned; raise what went wrong.

        Parameters
        ----------
        ssc : pyspark.streaming.StreamingContext, optional
            One that feeds the cluster: it is waited for first, and stopped when the nodes are done.
        grace_secs : float
            Not needed: a node that still exports is waited for.
        timeout : float
            Seconds; then the nodes are ended. -1: as long as it takes.

        Raises
        ------
        TimeoutError
            If it took longer.
        NodeFailed
            If a node failed.
        """
        if ssc is not None:
            self._await_stream(ssc)
        try:
            self.native.wait(None if timeout is None or timeout < 0 else timeout)
        except TimeoutError:
            if not self.native.state.ended:  # an error of the cluster's own may be a TimeoutError too
                self.native.close()
            raise

    def _await_stream(self, ssc: Any) -> None:
        """Wait for the end of the streams, or of the nodes; a failure of the nodes is for :meth:`shutdown` to raise."""
        try:
            while not ssc.awaitTerminationOrTimeout(1):
                if self.native.state.ended:
                    ssc.stop(stopSparkContext=False, stopGraceFully=True)
                    return
        except Exception as error:
            ssc.stop(stopSparkContext=False, stopGraceFully=False)
            if not self.native.state.ended:  # an error of the program's own streams, of which the nodes know nothing
                self.native.close()
                raise error_of_job(error, "the stream ended by an error") from error

    def tensorboard_url(self) -> str | None:
        """Return a link to TensorBoard on this machine, which opens once; None if there is none."""
        if not self.native.snapshot().log_dir:
            return None
        from tfos_nb.jupyter.endpoint import the_endpoint

        endpoint = the_endpoint()
        endpoint.serve(self.native)
        return f"http://127.0.0.1:{endpoint.open_port()}/{endpoint.invitation(self.native.id)}"


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
        Spark's.
    map_fun : callable
        The program.
    tf_args : object
        Handed to it: a Namespace, a dictionary, or a list, which is also its ``sys.argv``.
    num_executors : int
        How many nodes: parameter servers, chief, evaluator and workers together.
    num_ps : int
        How many of them are parameter servers.
    tensorboard : bool
        Whether there is TensorBoard.
    input_mode : int
        Of :class:`InputMode`.
    log_dir : str, optional
        What TensorBoard shows.
    driver_ps_nodes : bool
        Whether the parameter servers run on the driver's host.
    master_node : str, optional
        ``"chief"`` (or ``"master"``) for a chief beside the workers.
    reservation_timeout : float
        Seconds within which all nodes must come.
    queues : list of str
        The queues; those called output, error and control are not fed.
    eval_node : bool
        Whether one node is an evaluator.
    release_port : bool
        Not needed: a node's port is held open until TensorFlow has it.

    Raises
    ------
    PlanError
        If the numbers do not add up, or Spark cannot take the plan.
    RendezvousTimeout, NodeFailed
        If the nodes did not come up.
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


def _check(sc: Any, num_executors: int, num_ps: int, input_mode: int, refused: bool) -> None:
    if not hasattr(sc, "parallelize"):
        raise PlanError(f"sc is a {type(sc).__name__}, not a SparkContext: give spark.sparkContext")
    for name, value in (("num_executors", num_executors), ("num_ps", num_ps)):
        if type(value) is not int or value < 0:
            raise PlanError(f"{name} must be a whole number, 0 or more, got {value!r}")
    if input_mode not in (InputMode.TENSORFLOW, InputMode.SPARK):
        raise PlanError(f"input_mode must be InputMode.TENSORFLOW (0) or InputMode.SPARK (1), got {input_mode!r}")
    if refused:
        raise PlanError("driver_ps_nodes and eval_node need input_mode=InputMode.TENSORFLOW")


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
    """Return the GPUs of each worker: what the arguments ask for as ``num_gpus``, or else what Spark gives a task."""
    found = tf_args.get("num_gpus") if isinstance(tf_args, dict) else getattr(tf_args, "num_gpus", None)
    if type(found) is int:
        return max(found, 0)
    return math.ceil(float(sc.getConf().get("spark.task.resource.gpu.amount", "0")))


class _Reserved:
    """What :func:`reserve` gives: a cluster that is yet to be started."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments

    def start(self, map_fun: Callable[[Any, Any], Any], tf_args: Any) -> TFCluster:
        """Start it; what is returned is also this object, as older programs expect."""
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
    """Prepare a cluster, as programs of 2017 do; its ``start(map_fun, tf_args)`` starts it."""
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
