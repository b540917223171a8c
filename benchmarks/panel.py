"""Measure what the panel sends to the page at 64 nodes: messages a second and bytes a message, against the bounds.

The panel's own screen and view show a cluster for some seconds in which every node's numbers always change. The
messages are counted where the widget hands them to the kernel.
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.table import Ratio, Result

if TYPE_CHECKING:
    from benchmarks.settings import Settings
    from tfos_nb.state.cluster_state import ClusterState

__all__ = ["Busy", "count_messages", "run"]

NODES = 64
SECONDS = 20.0
MOST_BYTES = 20_000
MOST_A_SECOND = 2.0


class Busy:
    """A cluster of 64 workers whose numbers change all the time."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def snapshot(self) -> ClusterState:
        """Return the state of this moment."""
        from tfos_nb.state.cluster_state import (
            ClusterState,
            ClusterStatus,
            FeedProgress,
            GpuUse,
            LogLine,
            NodeState,
            NodeStatus,
        )

        elapsed = time.monotonic() - self._began
        step = int(40 * elapsed)
        curve = tuple(1 / (1 + place / 9) for place in range(48))
        metrics = {
            "loss": 1 / (1 + elapsed),
            "accuracy": 0.9431 + elapsed / 1000,
            "val_loss": 0.22,
            "val_accuracy": 0.9,
        }
        node = NodeState(
            "",
            NodeStatus.TRAINING,
            gpus=("0",),
            gpu_use=(GpuUse("NVIDIA H100 80GB HBM3", 83.0 + step % 7, 41_100_000_000, 85_000_000_000),),
            epoch=2,
            epochs=30,
            step=step,
            steps=100_000,
            metrics=metrics,
            curves=dict.fromkeys(metrics, curve),
            seconds_left=1000.0,
            rows_per_second=21_400.0 + step % 99,
            cpu_percent=71.0 + step % 9,
            memory_bytes=2_300_000_000 + step,
            heartbeat_age=0.4,
        )
        nodes = [
            replace(
                node, node=f"worker:{i}", host=f"ip-10-20-30-{i}.eu-west-1.internal", executor=str(i), step=step + i % 5
            )
            for i in range(NODES)
        ]
        log = tuple(LogLine(1.7e9 + i, f"worker:{i}", f"step {step} loss 0.1873 " + "x" * 120) for i in range(60))
        feed = FeedProgress(step % 1000, 1000, 128 * step, 30)
        return ClusterState(
            "imagenet", "0123456789ab", 3, ClusterStatus.RUNNING, tuple(nodes), feed, elapsed=elapsed, log=log
        )


def count_messages() -> list[int]:
    """Replace the kernel's comm by one that is not connected; return the list of its messages' sizes."""
    import comm
    from comm.base_comm import BaseComm

    sizes: list[int] = []

    class Counting(BaseComm):
        """A comm that is not connected."""

        def publish_msg(
            self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **more: Any
        ) -> None:
            """Record the size of a message instead of sending it."""
            if msg_type == "comm_msg":
                sizes.append(len(json.dumps(data, ensure_ascii=False).encode()))

    comm.create_comm = Counting
    return sizes


def run(settings: Settings) -> Result:
    """Count messages for some seconds."""
    sizes = count_messages()
    from tfos_nb.widgets.live import LiveView
    from tfos_nb.widgets.panel import PanelScreen

    # Without a notebook, displayed values would be printed.
    with contextlib.redirect_stdout(io.StringIO()), LiveView(Busy(), screen=PanelScreen()):
        sizes.clear()
        threading.Event().wait(SECONDS)
        counted = list(sizes)
    settings.say(f"panel: {len(counted)} messages in {SECONDS:.0f} s")
    ratios = (
        Ratio(f"panel, {NODES} nodes, largest message", float(max(counted)), MOST_BYTES, "bytes", 1.0, at_most=True),
        Ratio(f"panel, {NODES} nodes, messages", len(counted) / SECONDS, MOST_A_SECOND, "a second", 1.0, at_most=True),
    )
    return Result("panel", ratios, {"bytes": counted, "seconds": SECONDS}, ())
