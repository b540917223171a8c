"""A node without Spark: a real supervisor, its TensorFlow process, and the driver's controller with a real door."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PYTHONPATH
from tfos_nb.driver.cluster_controller import ClusterController
from tfos_nb.runtime.code.payload import pack
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.door import Door
from tfos_nb.runtime.control.lifecycle import EndNode, NodeJob
from tfos_nb.runtime.control.plan import ClusterPlan
from tfos_nb.runtime.control.processes import kill_group, start_module, write_frame
from tfos_nb.runtime.control.reports import Heartbeat
from tfos_nb.state.cluster_state import NodeState, NodeStatus

SECONDS = 120.0
NODE = "worker:0"
SETTINGS: dict[str, object] = {"buffer_bytes": 1 << 20, "spill_bytes": 1 << 20, "warm_idle": 600.0}


class Node:
    """One node that runs a main, and the driver's state of it."""

    def __init__(
        self,
        main: Callable[..., Any],
        model_dir: str,
        *,
        fed: bool = False,
        of_job: dict[str, Any] | None = None,
        **variables: str,
    ) -> None:
        self.controller = ClusterController(ClusterPlan(1, input_mode="spark" if fed else "tensorflow"))
        self.beats: list[Heartbeat] = []
        beat = self.controller._handlers[Heartbeat]
        self.controller._handlers[Heartbeat] = lambda name, message: (self.beats.append(message), beat(name, message))
        self.door = Door(self.controller, host="127.0.0.1", bind="127.0.0.1")
        address = self.door.open()
        self.supervisor = start_module(
            "tfos_nb.runtime.node.supervisor",
            env={**os.environ, "PYTHONPATH": PYTHONPATH, **variables},
            stdin=subprocess.PIPE,
        )
        assert self.supervisor.stdin is not None
        job = NodeJob(
            node=NODE,
            cluster="test",
            attempt=0,
            executor="0",
            door_host=address.host,
            door_port=address.port,
            settings={**SETTINGS, "model_dir": model_dir, "fed": fed},
            certificate=address.certificate,
            token=address.token,
            payload=pack(main, {}),
            **(of_job or {}),
        )
        write_frame(self.supervisor.stdin, job)

    def until(self, reached: Callable[[], object]) -> None:
        with self.controller.changed:
            assert self.controller.changed.wait_for(reached, SECONDS), self.controller.logs(NODE)[-20:]

    def result(self) -> Any:
        self.until(lambda: self.state.status.ended)
        assert self.state.status is NodeStatus.DONE, (self.controller.failures, self.controller.logs(NODE)[-20:])
        return wire.decode(self.controller.results()[NODE])

    @property
    def state(self) -> NodeState:
        return self.controller.snapshot()[0]

    def close(self) -> None:
        self.controller.dismiss(EndNode())
        try:
            self.supervisor.wait(20)
        finally:
            kill_group(self.supervisor)
            self.supervisor.communicate()
            self.door.close()


@pytest.fixture
def start(tmp_path: Any) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def run(main: Callable[..., Any], **options: Any) -> Node:
        nodes.append(Node(main, str(tmp_path), **options))
        return nodes[-1]

    yield run
    for node in nodes:
        node.close()


def test_a_node_with_endless_output_still_trains_and_reports_omitted_lines(
    start: Callable[..., Node], tmp_path: Any
) -> None:
    enough = tmp_path / "enough"

    def main(args: Any, ctx: Any) -> int:
        from itertools import count

        line = "x" * 89
        for step in count():
            print("\n".join(f"{step * 1000 + i:9d} {line}" for i in range(1000)))
            ctx.report(step=step + 1, loss=1 / (step + 1))
            # On a machine of any speed: enough lines to fill every buffer, and a heartbeat during the output.
            if step + 1 >= 1000 and enough.exists():
                break
        print("the last line")
        return step + 1

    node = start(main)
    node.until(lambda: sum(bool(beat.reports) for beat in node.beats) > 2)
    enough.touch()
    steps = node.result()
    assert steps >= 1000
    node.until(lambda: "the last line" in node.controller.logs(NODE))
    node.until(lambda: node.state.step == steps)
    assert node.controller.failures == []
    logs = node.controller.logs(NODE)
    assert len(logs) <= 10_000
    left_out = [line for line in logs if line.startswith("…")]
    assert left_out
    assert all(line.endswith("left out") for line in left_out)
    numbers = [int(line.split()[0]) for line in logs if line.endswith("xxx")]
    assert numbers == sorted(numbers)
    assert numbers[-1] == steps * 1000 - 1


@pytest.mark.slow
def test_cpu_and_memory_include_the_process_and_its_children(start: Callable[..., Node], tmp_path: Any) -> None:
    enough = tmp_path / "enough"

    def main(args: Any, ctx: Any) -> None:
        import subprocess
        import sys

        code = """
import os, sys
held = bytearray(1 << 30)
held[::4096] = bytes(len(held) // 4096)
while not os.path.exists(sys.argv[1]):
    pass
"""
        subprocess.run([sys.executable, "-c", code, str(enough)], check=True)

    node = start(main)
    # TensorFlow alone takes some 0.7 GiB.
    node.until(lambda: any((beat.memory_bytes or 0) > 5 << 28 and (beat.cpu_percent or 0) > 1 for beat in node.beats))
    enough.touch()
    node.result()


def test_fit_reports_its_progress_without_code_from_the_user(start: Callable[..., Node]) -> None:
    def main(args: Any, ctx: Any) -> None:
        import keras
        import numpy as np

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        x, y = np.ones((64, 2)), np.ones((64, 1))
        model.fit(x, y, epochs=3, batch_size=8, verbose=0, validation_data=(x, y))

    node = start(main)
    node.result()
    node.until(lambda: len(node.controller.history.get("val_loss", ())) == 3)
    assert (node.state.epoch, node.state.step) == (3, 8)
    assert {"loss", "mae", "val_loss", "val_mae"} <= node.state.metrics.keys()
    assert len(node.state.curves["val_loss"]) == 3
    assert node.state.phase == ""


def test_a_node_accepts_rows_if_the_temporary_directory_has_a_long_name(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    def main(args: Any, ctx: Any) -> str:
        import tempfile

        return tempfile.gettempdir()

    long = tmp_path / ("a-name-that-some-scheduler-gives-" * 3)
    long.mkdir()
    node = start(main, fed=True, TMPDIR=str(long))
    assert node.result().startswith(f"{long}/tfos_nb-scratch-")
    assert len(node.controller.membership.feed_places[NODE].socket) < 104, "more than that no socket's path may have"
