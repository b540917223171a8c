"""States of a cluster as the driver returns them, at several moments of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tfos_nb.state.cluster_state import (
    ClusterState,
    ClusterStatus,
    FeedProgress,
    GpuUse,
    LogLine,
    NodeState,
    NodeStatus,
)

TRACEBACK = """Traceback (most recent call last):
  File "Cell In[4]", line 12, in main
    model.fit(ctx.dataset(batch_size=128), epochs=3)
ValueError: label 10 is outside 0…9"""


def falling(points: int = 48) -> tuple[float, ...]:
    """Return a falling loss."""
    return tuple(2.3 / (1 + i / 4) for i in range(points))


def node(name: str, status: NodeStatus = NodeStatus.TRAINING, number: int = 0, **changes: object) -> NodeState:
    """Make a node in the middle of its second epoch."""
    trains = name.startswith(("worker", "chief")) and status is not NodeStatus.PLANNED
    made = NodeState(
        name,
        status,
        host=f"hdp-{'abcdef'[number % 6]}{number:02d}" if status is not NodeStatus.PLANNED else "",
        executor=str(number) if status is not NodeStatus.PLANNED else "",
        epoch=2 if trains else None,
        epochs=3 if trains else None,
        step=412 if trains else None,
        steps=600 if trains else None,
        metrics={"loss": 0.1873 + number / 1000, "accuracy": 0.943} if trains else {},
        curves={"loss": falling(), "accuracy": tuple(1 - y / 3 for y in falling())} if trains else {},
        rows_per_second=21_400.0 - 137 * (number % 7) if trains else None,
        cpu_percent=71.0,
        memory_bytes=2_300_000_000,
        heartbeat_age=0.4,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """IPython's shell, without which displayed values would be printed."""
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    yield InteractiveShell.instance(config=config)
    InteractiveShell.clear_instance()


@pytest.fixture
def planned() -> ClusterState:
    """Two workers and a parameter server before launch."""
    slots = ("1 CPU, fed from Spark", "1 CPU, fed from Spark", "1 CPU")
    names = ("worker:0", "worker:1", "ps:0")
    nodes = tuple(NodeState(name, detail=slot) for name, slot in zip(names, slots, strict=True))
    return ClusterState("mnist", nodes=nodes, spark_master="local-cluster[2,2,1024]")


@pytest.fixture
def running() -> ClusterState:
    """Two workers in their second epoch."""
    return ClusterState(
        "mnist",
        status=ClusterStatus.RUNNING,
        nodes=(node("worker:0", number=1), node("worker:1", number=2)),
        feed=FeedProgress(partitions_done=5, partitions=7, rows=30_720, epochs=3),
        elapsed=131.4,
        spark_master="spark://hdp-a01:7077",
        id="k3f9a2b7c1",
        log=tuple(LogLine(1.7e9 + i, f"worker:{i % 2}", f"line {i} of the log") for i in range(8)),
        log_dir="/data/logs/mnist",
        plan="cluster mnist: 2 nodes, input from spark",
    )


@pytest.fixture
def on_gpus(running: ClusterState) -> ClusterState:
    """A worker with a GPU whose use is known, one whose GPU's use is not, and a parameter server without a GPU."""
    use = GpuUse("NVIDIA H100 80GB HBM3", 83.0, 41_100_000_000, 85_000_000_000)
    nodes = (
        node("worker:0", number=1, gpus=("0",), gpu_use=(use,)),
        node("worker:1", number=2, gpus=("1",)),
        node("ps:0", number=3),
    )
    return replace(running, nodes=nodes)


@pytest.fixture
def failed(running: ClusterState) -> ClusterState:
    """A cluster of two workers, one of which raised an error."""
    nodes = (
        replace(running.nodes[0], status=NodeStatus.STOPPED),
        replace(running.nodes[1], status=NodeStatus.FAILED, detail="raised ValueError"),
    )
    error = f"worker:1 on hdp-c02 (executor 2): ValueError: label 10 is outside 0…9\n{TRACEBACK}"
    return replace(running, status=ClusterStatus.FAILED, nodes=nodes, error=error)


@pytest.fixture
def many(running: ClusterState) -> ClusterState:
    """Sixty-four workers; one is lost and two are slow."""
    odd: dict[int, dict[str, object]] = {
        37: {"status": NodeStatus.LOST, "step": 388, "rows_per_second": None, "detail": "executor 37 was lost"},
        11: {"step": 401, "rows_per_second": 11_000.0},
        52: {"step": 404, "rows_per_second": 12_200.0},
    }
    nodes = tuple(node(f"worker:{i}", number=i, **odd.get(i, {})) for i in range(64))
    return replace(running, nodes=nodes)


@pytest.fixture
def make_node() -> Callable[..., NodeState]:
    """Return the function that makes a node."""
    return node
