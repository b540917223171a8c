"""A shell as IPython makes it, with the magics in it, and a cluster that needs no Spark."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tfos_nb.errors import ClusterClosed
from tfos_nb.magics.cluster import TfosMagics
from tfos_nb.runtime.plan import ClusterPlan
from tfos_nb.state import ClusterState, ClusterStatus, NodeState, NodeStatus

DEADLINE = 20


class Rows:
    """What the magics take for a DataFrame: it has ``mapInArrow``."""

    def mapInArrow(self) -> None:  # noqa: N802 - Spark's name
        raise AssertionError("only the cluster reads rows")


class LocalCluster:
    """A cluster without nodes: main runs in ``wait``, in this process, so that every call and state is a real one."""

    def __init__(self, main: Any, args: Any, plan: ClusterPlan, options: dict[str, Any]) -> None:
        self.plan = plan
        self.main, self.args, self.options = main, args, options
        self.fed: tuple[Any, int] | None = None
        self.returned: Any = None
        self.calls: list[str] = []
        self.stopped = threading.Event()
        self.hold: threading.Event | None = None
        self.waited_for = threading.Event()
        self._status, self._error = ClusterStatus.STARTING, ""

    def snapshot(self) -> ClusterState:
        status = {
            ClusterStatus.STARTING: NodeStatus.STARTING,
            ClusterStatus.RUNNING: NodeStatus.TRAINING,
            ClusterStatus.DONE: NodeStatus.DONE,
            ClusterStatus.FAILED: NodeStatus.FAILED,
            ClusterStatus.STOPPED: NodeStatus.STOPPED,
        }[self._status]
        nodes = tuple(NodeState(str(node), status) for node in self.plan.nodes)
        return ClusterState(self.plan.name, self._status, nodes, error=self._error)

    def wait_until_up(self) -> None:
        self.calls.append("wait_until_up")
        self._status = ClusterStatus.RUNNING

    def train(self, data: Any, epochs: int = 1) -> None:
        self.calls.append("train")
        self.fed = (data, epochs)

    def wait(self, timeout: float | None = None) -> None:
        self.calls.append("wait")
        self.waited_for.set()
        if self.hold is not None:
            while not self.hold.wait(0.01) and not self.stopped.is_set():
                pass
        if self.stopped.is_set():
            raise ClusterClosed("stopped")
        try:
            self.returned = self.main(self.args, None)
        except Exception as error:
            self._status, self._error = ClusterStatus.FAILED, str(error)
            raise
        self._status = ClusterStatus.DONE

    def stop(self) -> None:
        self.stopped.set()
        if not self._status.ended:
            self._status = ClusterStatus.STOPPED

    def logs(self, node: str) -> str:
        return f"what {node} wrote"


class Launcher:
    """Starts local clusters and keeps them; ``hold`` lets their ``wait`` wait."""

    def __init__(self) -> None:
        self.clusters: list[LocalCluster] = []
        self.hold: threading.Event | None = None
        self.raises: BaseException | None = None
        self.waited_for = threading.Event()

    def __call__(self, main: Any, args: Any = None, *, wait_until_up: bool = True, **options: Any) -> LocalCluster:
        if self.raises is not None:
            raise self.raises
        assert wait_until_up is False
        plan = ClusterPlan(**{name: options.pop(name) for name in ClusterPlan.field_names()})
        cluster = LocalCluster(main, args, plan, options)
        cluster.hold, cluster.waited_for = self.hold, self.waited_for
        self.clusters.append(cluster)
        return cluster

    @property
    def last(self) -> LocalCluster:
        return self.clusters[-1]


@pytest.fixture
def launcher() -> Launcher:
    return Launcher()


@pytest.fixture
def shell(launcher, monkeypatch):
    """An InteractiveShell with the magics, whose clusters are local."""
    monkeypatch.setenv("TFOS_NB_PROGRESS", "text")
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    made = InteractiveShell.instance(config=config)
    made.register_magics(TfosMagics(made, launcher))
    made.user_ns["train_df"] = Rows()
    yield made
    InteractiveShell.clear_instance()


@pytest.fixture
def run(shell, capsys):
    """Run a cell as a user does; return what IPython made of it and what the user sees."""

    def run_cell(text: str) -> tuple[Any, str]:
        result = shell.run_cell(text, store_history=True)
        return result, capsys.readouterr().out

    return run_cell
