"""``TFNode``: functions that a program calls on a node, under TensorFlowOnSpark's names."""  # noqa: N999 - its name

from __future__ import annotations

import logging
import re
from typing import Any, NoReturn

from tfos_nb.errors import FeedFailed, TfosError
from tfos_nb.runtime.program.strategies import check_protocol
from tfos_nb.runtime.storage.paths import user_name

__all__ = [
    "DataFeed",
    "batch_results",
    "export_saved_model",
    "hdfs_path",
    "next_batch",
    "release_port",
    "start_cluster_server",
    "terminate",
]

logger = logging.getLogger(__name__)

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


class DataFeed:
    """The rows of a node, as lists.

    Parameters
    ----------
    mgr : NodeManager
        ``ctx.mgr``.
    train_mode : bool
        True: the rows of ``train``. False: the rows of ``inference``, each of which needs a result.
    qname_in, qname_out : str
        Names of the queues of rows and of results.
    input_mapping : dict of str to str, optional
        The tensor of each column: batches are then ``{tensor: list}``.
    **options
        ``across_partitions`` and ``arrays``, as in this package's own ``ctx.get_data_feed``.
    """

    def __init__(
        self,
        mgr: Any,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: dict[str, str] | None = None,
        **options: bool,
    ) -> None:
        native = getattr(mgr, "native", None)
        if native is None:
            raise FeedFailed(f"mgr must be ctx.mgr, as in DataFeed(ctx.mgr), got a {type(mgr).__name__}")
        self.mgr = mgr
        self.train_mode = train_mode
        self.qname_in, self.qname_out = qname_in, qname_out
        self._feed = native.get_data_feed(train_mode, qname_in, qname_out, input_mapping, **options)

    @property
    def done_feeding(self) -> bool:
        """Whether the feed is at its end."""
        return bool(self._feed.done_feeding)

    def next_batch(self, batch_size: int) -> Any:
        """Wait for rows; return a list of at most ``batch_size``, or ``{tensor: list}``. Empty at the end."""
        return self._feed.next_batch(batch_size)

    def should_stop(self) -> bool:
        """Whether the feed is at its end."""
        return bool(self._feed.should_stop())

    def batch_results(self, results: Any) -> None:
        """Send the results of the rows of the last batch, one per row."""
        self._feed.batch_results(results)

    def terminate(self) -> None:
        """Request no more rows. Spark does not read the remaining rows."""
        self.mgr.set("state", "terminating")
        self._feed.terminate()


def hdfs_path(ctx: Any, path: str) -> str:
    """Return a full path for the cluster's file systems.

    A URL is returned unchanged. An absolute path is put on ``ctx.defaultFS``. A relative path is put under the user's
    directory there, or under the driver's working directory if ``ctx.defaultFS`` is the local file system.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> ctx = SimpleNamespace(defaultFS="hdfs://nn:8020", working_dir="/home/me", user="me")
    >>> hdfs_path(ctx, "mnist"), hdfs_path(ctx, "/mnist"), hdfs_path(ctx, "gs://bucket/mnist")
    ('hdfs://nn:8020/user/me/mnist', 'hdfs://nn:8020/mnist', 'gs://bucket/mnist')
    """
    if _URL.match(path):
        return path
    root = str(ctx.defaultFS)
    if path.startswith("/"):
        return root + path
    if root.startswith("file:"):
        return f"{root}/{str(ctx.working_dir)[1:]}/{path}"
    if root.startswith(("hdfs:", "viewfs:")):
        return f"{root}/user/{getattr(ctx, 'user', '') or user_name(path)}/{path}"
    logger.warning("relative path on %s: resolved against the root of that file system", root)
    return f"{root}/{path}"


def start_cluster_server(ctx: Any, num_gpus: int = 1, rdma: bool = False) -> tuple[Any, Any]:
    """Start TensorFlow's server on this node; return the cluster's specification and the server.

    It is for programs of ``tf.compat.v1``, and for parameter servers, which then call ``server.join()``. A strategy of
    TensorFlow 2 starts its own server.
    """
    import tensorflow as tf

    if ctx._server is None:
        protocol = check_protocol("grpc+verbs" if rdma else "grpc")
        # Use the program's own names of jobs, also "master", because its device strings contain them.
        cluster = tf.train.ClusterSpec(ctx.cluster_spec)
        server = tf.distribute.Server(cluster, job_name=ctx.job_name, task_index=ctx.task_index, protocol=protocol)
        ctx._server = cluster, server
    found: tuple[Any, Any] = ctx._server
    return found


def export_saved_model(sess: Any, export_dir: str, tag_set: Any, signatures: Any) -> NoReturn:
    """Raise TfosError: the function works only with TensorFlow 1."""
    raise TfosError(
        "export_saved_model(sess, …) works only with TensorFlow 1: call compat.export_saved_model(model, export_dir)"
    )


def release_port(ctx: Any) -> str:
    """Return the node's address: see :meth:`tfos_nb.compat.TFSparkNode.TFNodeContext.release_port`."""
    return str(ctx.release_port())


def next_batch(mgr: Any, batch_size: int, qname: str = "input") -> NoReturn:
    """Raise TfosError, because the function was removed in TensorFlowOnSpark too."""
    _refuse()


def batch_results(mgr: Any, results: Any, qname: str = "output") -> NoReturn:
    """Raise TfosError, because the function was removed in TensorFlowOnSpark too."""
    _refuse()


def terminate(mgr: Any, qname: str = "input") -> NoReturn:
    """Raise TfosError, because the function was removed in TensorFlowOnSpark too."""
    _refuse()


def _refuse() -> NoReturn:
    raise TfosError("the functions next_batch, batch_results and terminate were removed: use the class TFNode.DataFeed")
