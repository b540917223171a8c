"""What a cluster shows of itself, running or ended."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

from tfos_nb.driver.cluster_lifecycle import Life
from tfos_nb.driver.membership import Roster
from tfos_nb.driver.outcome import Fate
from tfos_nb.errors import ClusterClosed
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.control.reports import History
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, LogLine

__all__ = ["ClusterView"]

_LOG_SHOWN = 60  # lines of all nodes in a snapshot
_text_of = functools.lru_cache(str)  # a panel shows a plan again and again


class ClusterView:
    """The part of :class:`tfos_nb.Cluster` that only looks."""

    id: str
    _master: str
    _roster: Roster
    _fate: Fate
    _life: Life
    _model_dir: str
    _log_dir: str
    _tunnel: str

    @property
    def plan(self) -> ClusterPlan:
        """What was asked for, by :func:`tfos_nb.launch` or :meth:`Cluster.scale`."""
        return self._roster.plan

    @property
    def model_dir(self) -> str:
        """Where ``ctx.save`` writes."""
        return self._model_dir

    @property
    def state(self) -> ClusterStatus:
        """Where the cluster is in its life."""
        with self._changed:
            status = self._life.status
            if status not in (ClusterStatus.STARTING, ClusterStatus.RECOVERING):
                return status
            # Whether others fail for the same cause is awaited before anything is done.
            if any(one.lost for one in self._roster.failures) and self._fate.may_go_on:
                return ClusterStatus.RECOVERING
            return ClusterStatus.RUNNING if self._roster.all_up else status

    def _cause(self, status: ClusterStatus) -> str:
        """Say what ended the cluster, or what it recovers from."""
        if self._fate.error is not None or status is not ClusterStatus.RECOVERING:
            return str(self._fate.error or "")
        lost = [failure.error for failure in self._roster.failures if failure.lost]
        return str(lost[0]) if lost else self._life.cause

    @property
    def history(self) -> History:
        """The metrics of each epoch, as the chief reported them: ``cluster.history["loss"]``."""
        return self._roster.history

    def logs(self, node: str = "") -> str:
        """Return what a node wrote of late to its output, such as ``logs("worker:1")``; the chief's by default."""
        return "\n".join(self._roster.logs(self._node_named(node)))

    def log_lines(self, node: str = "", limit: int = 500) -> Sequence[LogLine]:
        """Return a node's newest lines, each with its time; the chief's by default."""
        return self._roster.log_lines(self._node_named(node), limit=limit)

    @property
    def log_bytes(self) -> int:
        """Bytes of memory that the kept lines of all nodes take, about."""
        return self._roster.log_bytes

    def shorten_logs(self) -> None:
        """Keep some of each node's last lines only."""
        self._roster.shorten_logs()

    def _node_named(self, node: str) -> str:
        names = [str(known) for known in self.plan.nodes]
        wanted = node or str(self.plan.chief_node)
        if wanted not in names:
            raise ValueError(f"no node {wanted!r}: the cluster has {', '.join(names)}")
        return wanted

    @property
    def tensorboard_socket(self) -> str:
        """The unix socket that leads to TensorBoard on the chief's executor; empty if there is none, or none now."""
        return self._tunnel if self._tunnel and not self._life.status.ended else ""

    def wait_until_up(self) -> None:
        """Wait until ``main`` has been called on every node; raise what went wrong instead."""
        while True:
            gathering = self._roster.gatherings
            with self._changed:
                self._changed.wait_for(lambda: self._fate.over.is_set() or self._roster.all_up or self._roster.failures)
            if not self._roster.failures and self._fate.error is None:
                return
            if not self._fate.await_decision(gathering):
                self._fate.raise_outcome()

    def snapshot(self) -> ClusterState:
        """Return how the cluster looks now."""
        with self._changed:
            feed, status = self._roster.feeds.current, self.state
            return ClusterState(
                name=self.plan.name,
                id=self.id,
                generation=self._roster.generation,
                status=status,
                nodes=self._roster.snapshot(),
                feed=feed.progress if feed is not None else None,
                elapsed=self._life.elapsed,
                error=self._cause(status),
                spark_master=self._master,
                log=tuple(self._roster.log_tail(_LOG_SHOWN)),
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
        return self._roster.changed

    def _refuse_if_over(self, call: str) -> None:
        if self._fate.error is not None:
            raise self._fate.error
        if self._roster.failures and not self._fate.await_decision(self._roster.gatherings):
            self._fate.raise_outcome()
        if self._roster.feeds.closed and not self._life.status.ended and self._fate.stop is None:
            raise ClusterClosed(
                f"cluster {self.plan.name}: {self._roster.feeds.closed}; launch it anew to {call} again"
            )
        if self._life.status.ended or self._fate.failing:
            state = self.state.value
            raise ClusterClosed(f"cluster {self.plan.name} is {state}: {call} needs a running one; launch it anew")
