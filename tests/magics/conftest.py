"""An IPython shell with the magics, and a cluster that needs no Spark."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import tfos_nb.magics
from tfos_nb.errors import ClusterClosed
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, NodeState, NodeStatus

DEADLINE = 20


class Rows:
    """An object that the magics accept as a DataFrame, because it has ``mapInArrow``."""

    def mapInArrow(self) -> None:  # noqa: N802 - Spark's name
        raise AssertionError("only the cluster reads rows")


class LocalCluster:
    """A cluster without nodes: main runs in ``wait``, in this process, so that calls and states are real."""

    def __init__(self, main: Any, args: Any, plan: ClusterPlan, options: dict[str, Any]) -> None:
        self.plan = plan
        self.main, self.args, self.options = main, args, options
        self.fed: tuple[Any, int] | None = None
        self.returned: Any = None
        self.calls: list[str] = []
        self.stopped = threading.Event()
        self.hold: threading.Event | None = None
        self.waited_for = threading.Event()
        self.requests, self.stubborn = 0, 1  # the number of requests after which it ends
        self.asked: queue.Queue[int] = queue.Queue()
        self.graces: list[float | None] = []
        self.written: dict[str, list[str]] = {}
        self.cut_short = False
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
        return ClusterState(self.plan.name, status=self._status, nodes=nodes, error=self._error)

    def announce_train(self) -> None:
        """Do nothing: no thread waits for it here."""

    def wait_until_up(self) -> None:
        self.calls.append("wait_until_up")
        self._status = ClusterStatus.RUNNING

    def train(self, data: Any, epochs: int = 1) -> None:
        self.calls.append("train")
        if self.cut_short:  # like a stop with grace in which every main returned
            self._status = ClusterStatus.STOPPED
            raise ClusterClosed(f"cluster {self.plan.name} has ended")
        self.fed = (data, epochs)

    def wait(self, timeout: float | None = None) -> None:
        self.calls.append("wait")
        self.waited_for.set()
        if self.hold is not None:
            while not self.hold.wait(0.01) and not self.stopped.is_set():
                pass
        if self.stopped.is_set():
            self._status = ClusterStatus.STOPPED
            raise ClusterClosed("stopped")
        try:
            self.returned = self.main(self.args, None)
        except Exception as error:
            self._status, self._error = ClusterStatus.FAILED, str(error)
            raise
        self._status = ClusterStatus.DONE

    def request_stop(self) -> str:
        self.calls.append("request_stop")
        self.requests += 1
        if self.requests >= self.stubborn:
            self.stopped.set()
        self.asked.put(self.requests)
        return "stopping" if self.requests == 1 else "ending at once"

    def stop(self, grace: float | None = None) -> None:
        self.graces.append(grace)
        self.stopped.set()
        if not self._status.ended:
            self._status = ClusterStatus.STOPPED

    def result(self) -> Any:
        return self.returned

    def logs(self, node: str) -> str:
        return "\n".join(self.written.get(node, [f"what {node} wrote"]))


class Launcher:
    """Starts local clusters and keeps them; ``hold`` makes their ``wait`` block."""

    def __init__(self) -> None:
        self.clusters: list[LocalCluster] = []
        self.hold: threading.Event | None = None
        self.raises: BaseException | None = None
        self.waited_for = threading.Event()
        self.stubborn = 1
        self.cut_short = False

    def __call__(self, main: Any, args: Any = None, *, wait_until_up: bool = True, **options: Any) -> LocalCluster:
        if self.raises is not None:
            raise self.raises
        assert wait_until_up is False
        plan = ClusterPlan(**{name: options.pop(name) for name in ClusterPlan.field_names()})
        cluster = LocalCluster(main, args, plan, options)
        cluster.hold, cluster.waited_for, cluster.stubborn = self.hold, self.waited_for, self.stubborn
        cluster.cut_short = self.cut_short
        self.clusters.append(cluster)
        return cluster

    @property
    def last(self) -> LocalCluster:
        return self.clusters[-1]


@pytest.fixture
def launcher() -> Launcher:
    return Launcher()


SHOWN = ("show_panel", "show_tensorboard", "predict")


class Provided(dict[str, Any]):
    """Records the line magics' calls to other parts of the package, which return ``returns``."""

    def __init__(self) -> None:
        super().__init__({name: partial(self.called, name) for name in ("attach", *SHOWN)})
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.returns: Any = None

    def called(self, name: str, *args: Any, **options: Any) -> Any:
        self.calls.append((name, args, options))
        return self.returns


@pytest.fixture
def provided() -> Provided:
    return Provided()


@pytest.fixture
def shell(launcher, provided, monkeypatch):
    """An InteractiveShell with the magics, whose clusters are local."""
    monkeypatch.setenv("TFOS_NB_PROGRESS", "text")
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    made = InteractiveShell.instance(config=config)
    tfos_nb.magics.load(made, launcher, provided)
    made.user_ns["train_df"] = Rows()
    yield made
    InteractiveShell.clear_instance()


def interrupt_when(ready: Callable[[], object], *more: Callable[[], object]) -> threading.Thread:
    """Interrupt the main thread by SIGINT after the first function returns, and again after each of the others."""

    def interrupt() -> None:
        for wait in (ready, *more):
            wait()
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.fixture
def run(shell, capsys):
    """Run a cell as a user does; return IPython's result and the output."""

    def run_cell(text: str) -> tuple[Any, str]:
        result = shell.run_cell(text, store_history=True)
        return result, capsys.readouterr().out

    return run_cell
