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
    """A node of a cluster.

    Parameters
    ----------
    map_fun : callable
        The program.
    default_fs, working_dir : str
        The driver's Hadoop file system and folder.
    master : str
        What the program calls the chief.
    user : str
        Whose folder a relative path is in, on a file system that has such.
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
        """Call the program."""
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
    """A program of its own, without a cluster."""

    map_fun: Callable[[Any, Any], Any]
    default_fs: str
    working_dir: str
    user: str

    @property
    def __wrapped__(self) -> Callable[[Any, Any], Any]:
        return self.map_fun

    def __call__(self, tf_args: Any, ctx: Any) -> Any:
        """Call the program."""
        ours = TFNodeContext(executor_id=ctx.index, defaultFS=self.default_fs, working_dir=self.working_dir)
        ours.num_workers = ctx.count
        ours.native, ours.user = ctx, self.user
        return _called(self.map_fun, tf_args, ours)


def _called(map_fun: Callable[[Any, Any], Any], tf_args: Any, ctx: TFNodeContext) -> Any:
    """Call the program; what it returns was never asked for, so only data are passed on."""
    if isinstance(tf_args, list):
        sys.argv = list(tf_args)
    result = map_fun(tf_args, ctx)
    try:
        wire.encode_result(result)
    except wire.NotData:
        return None
    return result
