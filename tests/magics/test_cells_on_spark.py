"""Cells on real nodes: the status of a main that asks for no rows, and failures after the end of the cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from pyspark.sql import SparkSession
from traitlets.config import Config

import tfos_nb.magics
from tests.waiting import until
from tfos_nb.errors import NodeFailed, PlanError
from tfos_nb.state.cluster_state import ClusterStatus, NodeStatus

MAIN = """\
def main(args, ctx):
    import os, time
    def wait_for(name):
        deadline = time.monotonic() + 120
        while not os.path.exists(os.path.join(args, name)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    wait_for("go on")
    if os.path.exists(os.path.join(args, "fail")):
        raise ValueError("label 10")
    return sum(len(batch["x"]) for batch in ctx.dataset(4))
"""


@pytest.fixture
def shell(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A shell with the magics as a user has them."""
    monkeypatch.setenv("TFOS_NB_PROGRESS", "text")
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    made = InteractiveShell.instance(config=config)
    tfos_nb.magics.load(made)
    rows = spark.createDataFrame([(float(number),) for number in range(8)], "x double")
    made.user_ns.update(folder=str(tmp_path), rows=rows, spark=spark)
    yield made
    for value in list(made.user_ns.values()):
        if isinstance(value, tfos_nb.Cluster):
            value.close()
    InteractiveShell.clear_instance()


def run(shell: InteractiveShell, text: str) -> tuple[Any, str]:
    with capture_output() as captured:
        result = shell.run_cell(text, store_history=True)
    return result, captured.stdout


def test_a_main_is_shown_as_waiting_only_after_it_asked_for_rows(shell: InteractiveShell, tmp_path: Path) -> None:
    result, shown = run(shell, f"%%tfos_cluster quiet --workers 1 --args folder --model-dir {tmp_path}/m\n{MAIN}")
    assert result.success
    assert "quiet is up: quiet.train(df) feeds it, quiet.wait() waits for its end." in shown
    quiet = shell.user_ns["quiet"]
    (node,) = quiet.snapshot().nodes
    assert until(lambda: (quiet.snapshot().nodes[0].cpu_percent or 0) >= 0 and quiet.snapshot().nodes[0].memory_bytes)
    assert (node.status, "main runs on worker:0." in run(shell, "%tfos_status")[1]) == (NodeStatus.TRAINING, True)
    (tmp_path / "go on").touch()
    assert until(lambda: quiet.snapshot().nodes[0].status is NodeStatus.FEEDING)
    assert "worker:0 waits for rows." in run(shell, "%tfos_status")[1]
    result, shown = run(shell, "%tfos_train rows")
    assert result.success
    quiet.wait()
    assert quiet.result() == 8


IN_CELLS = """
import tensorflow as tf
from typing import Any

def turned(x: Any) -> Any:
    if tf.reduce_sum(x) > 0:
        return x
    return -x

def whole(x: tf.Tensor) -> Any:
    return tf.reduce_sum(turned(x)) + tf.zeros_like(x)
"""


def test_functions_of_cells_are_compiled_on_the_executors(shell: InteractiveShell) -> None:
    """It reads their source, which no file there has, and the names in their annotations, which are not sent."""
    for cell in (IN_CELLS, "one = rows.coalesce(1)\nfrom tfos_nb import map_batches"):
        assert run(shell, cell)[0].success
    for function, expected in (("whole", [28.0] * 8), ("lambda x: x if tf.reduce_sum(x) < 0 else -x", [0.0, -1.0])):
        text = f"found = [row.y for row in map_batches(one, {function}, 'y float').collect()]"
        assert run(shell, text)[0].success
        assert shell.user_ns["found"][: len(expected)] == expected


def test_a_failure_after_the_cell_is_shown_and_raised_by_each_later_call(
    shell: InteractiveShell, tmp_path: Path
) -> None:
    result, _ = run(shell, f"%%tfos_cluster late --workers 1 --args folder --model-dir {tmp_path}/m\n{MAIN}")
    assert result.success, "the nodes are up, and nothing has failed yet"
    late = shell.user_ns["late"]
    (tmp_path / "fail").touch()
    (tmp_path / "go on").touch()
    assert until(lambda: late.state is ClusterStatus.FAILED)
    assert "ValueError: label 10" in run(shell, "%tfos_status late")[1]
    for _ in range(2):
        assert isinstance(run(shell, "%tfos_train rows late")[0].error_in_exec, NodeFailed)
        with pytest.raises(NodeFailed, match="label 10"):
            late.train(shell.user_ns["rows"])
        with pytest.raises(NodeFailed, match="label 10"):
            late.result()


def test_with_wait_a_late_failure_of_main_is_raised_in_its_cell(shell: InteractiveShell, tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    (tmp_path / "go on").touch()
    result, _ = run(shell, f"%%tfos_cluster own --workers 1 --wait --args folder --model-dir {tmp_path}/m\n{MAIN}")
    assert isinstance(result.error_in_exec, NodeFailed)


def test_waiting_for_a_background_cell_includes_its_feed(shell: InteractiveShell, tmp_path: Path) -> None:
    (tmp_path / "go on").touch()
    line = f"%%tfos_cluster back --data rows --args folder --model-dir {tmp_path}/m --background"
    result, _ = run(shell, f"{line}\n{MAIN}")
    assert result.success
    back = shell.user_ns["back"]
    assert back.state is not ClusterStatus.RUNNING, "its nodes are not up yet"
    with pytest.raises(TimeoutError, match="is still being fed after 0.1 s"):
        back.wait(0.1)
    assert back.result() == 8


def test_waiting_for_a_background_cell_raises_its_failure(shell: InteractiveShell, tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    (tmp_path / "go on").touch()
    run(shell, f"%%tfos_cluster back --data rows --args folder --model-dir {tmp_path}/m --background\n{MAIN}")
    with pytest.raises(NodeFailed, match="label 10"):
        shell.user_ns["back"].result()


def test_rows_given_before_the_nodes_are_up_are_fed_later(shell: InteractiveShell, tmp_path: Path) -> None:
    (tmp_path / "go on").touch()
    run(shell, f"%%tfos_cluster early --args folder --model-dir {tmp_path}/m --background\n{MAIN}")
    early = shell.user_ns["early"]
    early.train(shell.user_ns["rows"])
    assert early.result() == 8


def test_a_cluster_whose_variable_was_overwritten_is_found_by_name(shell: InteractiveShell) -> None:
    run(shell, f"%%tfos_cluster lost --data rows --args folder --background\n{MAIN}")
    cluster = shell.user_ns["lost"]
    run(shell, "lost = 5")
    assert "lost" in run(shell, "%tfos_status")[1]
    assert "stopped" in run(shell, "%tfos_stop lost --now")[1]
    assert cluster.state is ClusterStatus.STOPPED
    assert "no cluster exists yet" in run(shell, "%tfos_status")[1]


def test_unsuitable_rows_are_refused_before_any_node_starts(shell: InteractiveShell) -> None:
    shell.run_cell("import datetime; days = spark.createDataFrame([(datetime.date(2026, 1, 1),)], 'day date')")
    result, shown = run(shell, f"%%tfos_cluster dated --data days\n{MAIN}")
    assert isinstance(result.error_in_exec, PlanError)
    assert "column 'day' is date, which cannot become a tensor: cast it to a number" in str(result.error_in_exec)
    assert "dated" not in shell.user_ns
    assert "Starting" not in shown


REPORTS = """\
def main(args, ctx):
    for epoch in (1, 2, 3):
        for step in (1, 2):
            metrics = {"loss": 1 / epoch, "val_loss": 2 / epoch}
            ctx.report(epoch=epoch, epochs=3, step=step, steps=2, epoch_end=step == 2, **metrics)
"""


def test_a_cluster_and_its_history_are_shown_at_the_end_of_a_cell(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = f"%%tfos_cluster told --workers 1 --input tensorflow --model-dir {tmp_path}/m"
    assert run(shell, f"{line}\n{REPORTS}")[0].success
    told = shell.user_ns["told"]
    monkeypatch.setenv("TFOS_NB_PROGRESS", "html")
    with capture_output() as captured:
        assert shell.run_cell("display(told); display(told.history); display(told.plan)").success
    cluster, history, plan = (output.data for output in captured.outputs)
    assert "Done in" in cluster["text/html"]
    assert "<summary>curves</summary>" in cluster["text/html"]
    assert cluster["text/plain"].startswith("told · Done · 1 worker")
    assert "Loss by epoch; training from 1.0000 to 0.3333" in history["text/html"]
    assert history["text/plain"].splitlines()[0] == "History: 3 epochs"
    assert "fed from Spark" not in plan["text/html"]
    assert told.history.to_pandas()["val_loss"].tolist() == [2.0, 1.0, 2 / 3]
    assert told.snapshot().points[-1].metrics["loss"] == 1 / 3
    chart = told.curves("loss", "epoch", "worker:0")
    assert (chart["nodes"], chart["lines"][0]["x"]) == (["worker:0"], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="no node 'worker:7': the cluster has worker:0"):
        told.curves(node="worker:7")
