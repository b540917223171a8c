"""``TFParallel``: run independent programs, under TensorFlowOnSpark's name."""  # noqa: N999 - its name

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfos_nb import parallel
from tfos_nb.compat._program import ParallelProgram
from tfos_nb.compat.TFCluster import _gpus_wanted, _meta, _spark_user, check_context
from tfos_nb.errors import check_count

__all__ = ["run"]


def run(sc: Any, map_fn: Callable[[Any, Any], Any], tf_args: Any, num_executors: int, use_barrier: bool = True) -> None:
    """Call ``map_fn(tf_args, ctx)`` in ``num_executors`` processes on Spark's executors, and wait for all.

    ``ctx.worker_num`` is the index of the process, and ``ctx.num_workers`` the number of processes.
    """
    check_context(sc)
    check_count("num_executors", num_executors, 1)
    from pyspark.sql import SparkSession

    meta = _meta(sc, num_executors, 0, None, False)
    parallel.run(
        ParallelProgram(map_fn, meta["default_fs"], meta["working_dir"], _spark_user(sc)),
        tf_args,
        nodes=num_executors,
        spark=SparkSession(sc),
        barrier=bool(use_barrier),
        gpus=_gpus_wanted(sc, tf_args),
        name="TFParallel",
    )
