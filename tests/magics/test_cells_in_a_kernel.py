"""The magic in a real kernel, with real Spark and TensorFlow: errors, an interrupt, and the cells after them."""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.conftest import ENVIRONMENT

CELL_SECONDS = 120

SESSION = """
%load_ext tfos_nb
import tfos_nb
spark = tfos_nb.spark_session(4)
train = spark.createDataFrame([([float(i), 1.0], i % 2) for i in range(400)], "x array<float>, label int")
"""

GOOD = """
%%tfos_cluster good --workers 2 --data train --epochs 2
def main(args, ctx):
    passes = [sum(int(b["label"].shape[0]) for b in ctx.dataset(16)) for _ in range(2)]
    ctx.report(epoch=2, epoch_end=True, loss=0.25)
    return passes
"""

FAILING = """
%%tfos_cluster bad --workers 2 --data train
def helper(ctx):
    if ctx.task_index == 1:
        raise ValueError("made to fail")
    return [0 for _ in ctx.dataset(16)]

def main(args, ctx):
    return helper(ctx)
"""

ENDLESS = """
%%tfos_cluster endless --workers 2 --data train
def main(args, ctx):
    import time
    ctx.report(step=1)
    print("main runs", flush=True)
    while not ctx.should_stop:
        time.sleep(0.1)
    return "stopped politely"
"""


@dataclass
class Outcome:
    """Outcome of a cell: its status, error and output."""

    status: str = ""
    error: str = ""
    shown: str = ""
    streams: str = ""
    seen: list[str] = field(default_factory=list)


class Kernel:
    """A kernel that runs cells and can be interrupted."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, interrupt_at: str = "") -> Outcome:
        """Run a cell; interrupt the kernel once its output holds a text."""
        outcome, interrupted = Outcome(), False

        def take(message: dict[str, Any]) -> None:
            nonlocal interrupted
            content = message["content"]
            if message["msg_type"] in ("display_data", "update_display_data", "execute_result"):
                outcome.shown = content["data"].get("text/plain", "")
                outcome.seen.append(content["data"].get("text/html", ""))
            elif message["msg_type"] == "stream":
                outcome.streams += content["text"]
            if interrupt_at and not interrupted and re.search(interrupt_at, outcome.shown):
                interrupted = True
                self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(code, output_hook=take, timeout=CELL_SECONDS, stop_on_error=False)
        outcome.status = reply["content"]["status"]
        outcome.error = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(reply["content"].get("traceback", [])))
        return outcome


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(env={**ENVIRONMENT, "TEST_KERNEL": uuid.uuid4().hex})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    kernel = Kernel(manager, client)
    assert kernel.run(SESSION).status == "ok"
    yield kernel
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def no_node_is_left(kernel: Kernel) -> bool:
    code = """
import os, psutil
mine = psutil.Process().children(recursive=True)
def runs(process):
    try:
        forked = process.name().startswith("tfos_nb ") and process.name() != "tfos_nb warm"
        if forked:  # of the warm process that this kernel's executors have: other tests have their own
            return process.environ().get("TEST_KERNEL") == os.environ["TEST_KERNEL"]
        parts = process.cmdline()  # Spark keeps its own daemon
        return process in mine and any("tfos_nb.runtime" in p and not p.endswith("python_daemon") for p in parts)
    except psutil.Error:  # it has just ended, whatever it was
        return False
print("left:", [p.pid for p in psutil.process_iter() if runs(p)],
      tfos_nb.spark.session.slots_busy(spark))
"""
    return "left: [] ()" in kernel.run(code).streams


def test_a_cell_trains_and_shows_its_nodes(kernel: Kernel) -> None:
    outcome = kernel.run(GOOD)
    assert outcome.status == "ok", outcome.error
    assert "worker:0" in outcome.shown
    assert "worker:1" in outcome.shown
    assert any("<table" in html for html in outcome.seen)
    told = kernel.run("print([sum(rows) for rows in zip(*good.results().values())], good.history['loss'])").streams
    assert told == "[400, 400] [0.25]\n"


def test_an_error_is_shown_in_the_cell_and_the_next_cell_works(kernel: Kernel) -> None:
    outcome = kernel.run(FAILING)
    assert outcome.status == "error"
    assert outcome.error.count("made to fail") >= 1
    assert "worker:1" in outcome.error
    assert 'raise ValueError("made to fail")' in outcome.error  # the user's own line
    assert "tfos_nb/" not in outcome.error
    assert no_node_is_left(kernel)
    assert kernel.run(GOOD).status == "ok"


def test_an_interrupt_stops_the_cluster_and_leaves_the_session_usable(kernel: Kernel) -> None:
    outcome = kernel.run(ENDLESS, interrupt_at=r"worker:1 .*(waiting|training)")
    assert outcome.status == "error"
    assert "stopped by you" in outcome.error
    assert "Traceback" not in outcome.error
    assert no_node_is_left(kernel)
    assert kernel.run(GOOD).status == "ok"


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%%tfos_cluster --worker 2\ndef main(args, ctx): pass", "did you mean --workers"),
        ("%%tfos_cluster --data trian\ndef main(args, ctx): pass", "did you mean train"),
        ("%%tfos_cluster\ndef one(): pass\ndef two(x): pass", r"one\(\).*two\(x\)"),
        ("%%tfos_cluster --workers 99\ndef main(args, ctx): pass", "needs 99 slots .*ask for 4 nodes"),
        ("%%tfos_cluster\ndef main(args, ctx): return spark.range(1)", "main refers to spark, a SparkSession"),
        ("%%tfos_cluster\nx = train\ndef main(args, ctx): return x.count()", "main refers to x, a DataFrame"),
    ],
)
def test_mistakes_are_reported_in_one_line_before_any_node_starts(kernel: Kernel, cell: str, said: str) -> None:
    outcome = kernel.run(cell)
    assert outcome.status == "error"
    assert re.search(said, outcome.error), outcome.error
    assert len(outcome.error.strip().splitlines()) == 1


def test_help_names_every_option(kernel: Kernel) -> None:
    reply = kernel.client.execute_interactive("%%tfos_cluster?", output_hook=lambda message: None, timeout=30)
    text = reply["content"]["payload"][0]["data"]["text/plain"]
    for option in (
        "--workers",
        "--ps",
        "--data",
        "--epochs",
        "--args",
        "--fn",
        "--input",
        "--cpus",
        "--gpus",
        "--background",
    ):
        assert option in text
