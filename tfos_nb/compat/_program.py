"""Run a TensorFlowOnSpark program on a node, with TensorFlowOnSpark's ``ctx``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfos_nb.compat.TFManager import NodeManager
from tfos_nb.compat.TFSparkNode import TFNodeContext
from tfos_nb.runtime.control import wire

__all__ = ["ParallelProgram", "Program"]


@dataclass(frozen=True)
class Program:
    """TensorFlowOnSpark program that runs on each node of a cluster.

    Parameters
    ----------
    map_fun : callable
        The program's function.
    default_fs, working_dir : str
        The driver's default Hadoop file system and its working directory.
    master : str
        The program's name for the chief: ``"chief"`` or ``"master"``.
    user : str
        The user in whose directory relative paths are, on a file system with user directories.
    """

    map_fun: Callable[[Any, Any], Any]
    default_fs: str
    working_dir: str
    master: str
    user: str

    @property
    def __wrapped__(self) -> Callable[[Any, Any], Any]:
        return self.map_fun

    def __call__(self, tf_args: Any, ctx: Any) -> Any:
        """Call the program with TensorFlowOnSpark's ``ctx``; return its result if it is data, else None."""
        spec = {self._named(role): addresses for role, addresses in ctx.cluster_spec.items()}
        ours = TFNodeContext(
            executor_id=ctx.executor_id,
            job_name=self._named(ctx.job_name),
            task_index=ctx.task_index,
            cluster_spec=spec,
            defaultFS=self.default_fs,
            working_dir=self.working_dir,
            mgr=NodeManager(ctx),
        )
        ours.num_workers = sum(len(spec.get(role, ())) for role in ("master", "chief", "worker"))
        ours.native, ours.user = ctx, self.user
        return _called(self.map_fun, tf_args, ours)

    def _named(self, role: str) -> str:
        return self.master if role == "chief" else role


@dataclass(frozen=True)
class ParallelProgram:
    """TensorFlowOnSpark program that runs independently, without a cluster."""

    map_fun: Callable[[Any, Any], Any]
    default_fs: str
    working_dir: str
    user: str

    @property
    def __wrapped__(self) -> Callable[[Any, Any], Any]:
        return self.map_fun

    def __call__(self, tf_args: Any, ctx: Any) -> Any:
        """Call the program with TensorFlowOnSpark's ``ctx``; return its result if it is data, else None."""
        ours = TFNodeContext(executor_id=ctx.index, defaultFS=self.default_fs, working_dir=self.working_dir)
        ours.num_workers = ctx.count
        ours.native, ours.user = ctx, self.user
        return _called(self.map_fun, tf_args, ours)


def _called(map_fun: Callable[[Any, Any], Any], tf_args: Any, ctx: TFNodeContext) -> Any:
    """Call the program; return its result if it is data, else None. TensorFlowOnSpark ignores the result."""
    if isinstance(tf_args, list):
        sys.argv = list(tf_args)
    result = map_fun(tf_args, ctx)
    try:
        wire.encode_result(result)
    except wire.NotData:
        return None
    return result
