"""``TFSparkNode``: the ``ctx`` that a program gets, under TensorFlowOnSpark's names."""  # noqa: N999 - its name

from __future__ import annotations

from typing import Any, NoReturn

from tfos_nb.compat import TFNode
from tfos_nb.errors import FeedFailed, PlanError

__all__ = ["TFNodeContext", "TFSparkNode", "inference", "run", "shutdown", "train"]


class TFNodeContext:
    """A node's place in its cluster.

    The attributes and methods of this package's own ``ctx``, such as ``ctx.dataset`` and ``ctx.save``, are available
    too. A name that both have has the meaning of TensorFlowOnSpark.

    Attributes
    ----------
    executor_id, worker_num : int
        The node's number among all nodes: parameter servers first, then chief, evaluator and workers.
    job_name : str
        ``"ps"``, ``"chief"`` (or ``"master"``), ``"evaluator"`` or ``"worker"``.
    task_index : int
        The node's index among the nodes of its job.
    cluster_spec : dict of str to list of str
        The addresses of each job.
    num_workers : int
        Number of workers, including the chief.
    defaultFS, working_dir : str
        Hadoop's default file system, and the driver's working directory.
    mgr : NodeManager or None
        The argument of :class:`tfos_nb.compat.TFNode.DataFeed`; None under TFParallel.
    tmp_socket : None
        Always None, because no Python socket of this process reserves the port.
    native : tfos_nb.runtime.program.context.NodeContext
        This package's own ``ctx``.
    """

    def __init__(  # noqa: PLR0917 - its order
        self,
        executor_id: int = 0,
        job_name: str = "",
        task_index: int = 0,
        cluster_spec: dict[str, list[str]] | None = None,
        defaultFS: str = "file://",  # noqa: N803 - its name
        working_dir: str = ".",
        mgr: Any = None,
        tmp_socket: Any = None,
    ) -> None:
        self.worker_num = self.executor_id = executor_id
        self.job_name = job_name
        self.task_index = task_index
        self.cluster_spec = cluster_spec or {}
        self.num_workers = sum(len(self.cluster_spec.get(name, ())) for name in ("master", "chief", "worker"))
        self.defaultFS = defaultFS
        self.working_dir = working_dir
        self.mgr = mgr
        self.tmp_socket = tmp_socket
        self.native: Any = None
        self.user = ""
        self._server: tuple[Any, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        native = self.__dict__.get("native")
        if native is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(native, name)

    def __repr__(self) -> str:
        return f"<TFNodeContext {self.job_name}:{self.task_index}, executor_id={self.executor_id}>"

    def __dir__(self) -> list[str]:
        native = [name for name in dir(self.native) if not name.startswith("_")]
        return sorted({*super().__dir__(), *native})

    def absolute_path(self, path: str) -> str:
        """Return a full path: see :func:`tfos_nb.compat.TFNode.hdfs_path`."""
        return TFNode.hdfs_path(self, path)

    tf_path = absolute_path

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: dict[str, str] | None = None,
        **options: bool,
    ) -> TFNode.DataFeed:
        """Return the rows that are fed to this node, as lists.

        ``options`` are those that this package's own ``ctx.get_data_feed`` has besides: ``across_partitions`` and
        ``arrays``.
        """
        if self.mgr is None:
            raise FeedFailed("this program gets no rows from Spark: it runs independently, under TFParallel")
        return TFNode.DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping, **options)

    def next_batch(self, batch_size: int, qname: str = "input") -> Any:
        """Return the next rows that ``train`` feeds; empty at the end."""
        return self.get_data_feed(True, qname).next_batch(batch_size)

    def start_cluster_server(self, num_gpus: int = 1, rdma: bool = False) -> tuple[Any, Any]:
        """Start TensorFlow's server: see :func:`tfos_nb.compat.TFNode.start_cluster_server`."""
        return TFNode.start_cluster_server(self, num_gpus, rdma)

    @property
    def cluster(self) -> Any:
        """The cluster's ``tf.train.ClusterSpec``."""
        import tensorflow as tf

        return tf.train.ClusterSpec(self.cluster_spec)

    @property
    def server(self) -> Any:
        """TensorFlow's server of this node, started on first use."""
        return self.start_cluster_server()[1]

    def export_saved_model(self, sess: Any, export_dir: str, tag_set: Any, signatures: Any) -> None:
        """Export a session's graph: see :func:`tfos_nb.compat.TFNode.export_saved_model`."""
        TFNode.export_saved_model(sess, export_dir, tag_set, signatures)

    def release_port(self) -> str:
        """Return this node's address. Nothing is released: TensorFlow can listen there while it is still reserved."""
        return "" if self.native is None else str(self.native.release_port())


class TFSparkNode:
    """Class without methods, kept for programs that read its attributes."""

    mgr = None
    cluster_id = None


def run(  # noqa: PLR0917 - its order
    fn: Any, tf_args: Any, cluster_meta: Any, tensorboard: bool, log_dir: Any, queues: Any, background: bool
) -> NoReturn:
    """Raise PlanError: ``TFCluster.run`` starts the nodes."""
    _refuse("run", "TFCluster.run(sc, map_fun, …)")


def train(cluster_info: Any, cluster_meta: Any, feed_timeout: float = 600, qname: str = "input") -> NoReturn:
    """Raise PlanError: ``cluster.train`` feeds rows."""
    _refuse("train", "cluster.train(rdd)")


def inference(cluster_info: Any, feed_timeout: float = 600, qname: str = "input") -> NoReturn:
    """Raise PlanError: ``cluster.inference`` sends rows and returns results."""
    _refuse("inference", "cluster.inference(rdd)")


def shutdown(cluster_info: Any, grace_secs: float = 0, queues: Any = ("input",)) -> NoReturn:
    """Raise PlanError: ``cluster.shutdown`` ends a cluster."""
    _refuse("shutdown", "cluster.shutdown()")


def _refuse(name: str, instead: str) -> NoReturn:
    raise PlanError(f"TFSparkNode.{name} is internal to TensorFlowOnSpark, and has no counterpart here: call {instead}")
