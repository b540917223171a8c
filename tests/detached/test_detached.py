"""A detached cluster on a real Spark: the kernel that launches it is killed, and another one attaches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import tfos_nb
from tests.waiting import until
from tfos_nb import errors
from tfos_nb.detached import places
from tfos_nb.state.cluster_state import ClusterStatus

SECONDS = 120.0

KERNEL = """
import json, os, sys, threading
import tfos_nb

def main(args, ctx):
    seen = 0
    if args.get("saves"):
        import keras
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ctx.checkpoint(model, epoch=1)
        ctx.save(model)
    for number, batch in enumerate(ctx.dataset(64, columns=["id"]), 1):
        seen += int(len(batch["id"]))
        ctx.report(epoch=1, step=number, loss=1 / number)
    print("rows", seen)
    while not ctx.should_stop and not os.path.exists(args["end"]):
        threading.Event().wait(0.05)
    if ctx.task_index == args.get("fails"):
        raise ValueError("as asked")
    return {"rows": seen, "stopped": ctx.should_stop, "env": os.environ.get("JPY_PARENT_PID", "")}

def rows(spark):
    assert spark.conf.get("spark.tests.mine") == "kept"
    return spark.range(0, 1000, 1, 4)

if __name__ == "__main__":
    spark = tfos_nb.spark_session(4, conf={"spark.ui.enabled": "false", "spark.tests.mine": "kept"})
    args = json.loads(sys.argv[1])
    cluster = tfos_nb.launch(main, args, workers=2, spark=spark, detach=True, data=rows, name="night", record=False)
    print(cluster.id, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def end(tmp_path: Path) -> Path:
    """The file at which main returns."""
    return tmp_path / "end"


@pytest.fixture
def launched(
    tmp_path: Path, end: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[psutil.Process]:
    """The process of a detached cluster whose kernel was killed; the parameter is what its program does besides."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    program = tmp_path / "kernel.py"
    program.write_text(KERNEL)
    command = [sys.executable, str(program), json.dumps({"end": str(end), **getattr(request, "param", {})})]
    environment = {**os.environ, "JPY_PARENT_PID": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    kernel = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert kernel.returncode == -signal.SIGKILL, kernel.stderr[-3000:]
    (place,) = tfos_nb.clusters()
    assert place.id == kernel.stdout.split()[-1]
    process = psutil.Process(place.process.pid)
    yield process
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [*process.children(recursive=True), process]:
            one.kill()


def test_a_cluster_outlives_its_kernel_and_another_one_gets_its_results(
    launched: psutil.Process, end: Path, tmp_path: Path
) -> None:
    night, other = tfos_nb.attach("night"), tfos_nb.attach()
    assert night.state is ClusterStatus.RUNNING
    assert until(lambda: "rows" in night.logs("worker:1"), SECONDS)
    assert "line" in night.stacks()["worker:0"]
    assert until(lambda: other.curves("loss")["metric"] == "loss", SECONDS), "the chief's come beside worker:1's lines"
    assert night.model_dir == str(tmp_path / "tfos_models" / "night")
    with pytest.raises(TimeoutError, match=r"cluster night still runs after 0\.2 s"):
        night.wait(0.2)
    waiting = threading.Thread(target=night.wait, daemon=True)
    waiting.start()
    end.touch()
    waiting.join(SECONDS)
    results = other.results()
    assert sum(one["rows"] for one in results.values()) == 1000
    assert [one["env"] for one in results.values()] == ["", ""], "nothing of the kernel's"
    assert night.result() == results["worker:0"]
    assert other.history.points()[-1].metrics == {"loss": 1 / 8}, "of the last of its eight steps"
    assert night.snapshot().status is ClusterStatus.DONE
    assert until(lambda: [one.status for one in tfos_nb.clusters()] == ["DONE"])
    assert until(lambda: not launched.children()[0].children(recursive=True), SECONDS), "Spark's tasks have ended"
    night.close()
    assert until(lambda: not launched.is_running() or launched.status() == psutil.STATUS_ZOMBIE, SECONDS)
    assert tfos_nb.clusters() == []
    with pytest.raises(errors.ClusterClosed, match="its process has ended, and keeps its results no longer"):
        other.results()


MISTAKE = """
import tfos_nb

def main(args, ctx):
    for batch in ctx.dataset(64):
        pass

def rows(spark):
    return spark.read.parquet("/no/such/path")

if __name__ == "__main__":
    spark = tfos_nb.spark_session(3, conf={"spark.ui.enabled": "false"})
    try:
        tfos_nb.launch(main, workers=1, spark=spark, detach=True, data=rows, name="night", record=False).wait()
    except tfos_nb.errors.FeedFailed as error:
        print(str(error))
"""


def test_rows_that_cannot_be_read_are_the_error_of_the_launch(tmp_path: Path) -> None:
    kernel = run_kernel(MISTAKE, tmp_path)
    assert "rows could not read the rows: AnalysisException: [PATH_NOT_FOUND]" in kernel.stdout, kernel.stderr[-3000:]
    assert "(line 9 of " in kernel.stdout


@pytest.mark.slow
@pytest.mark.parametrize("launched", [{"fails": 1}], indirect=True)
def test_the_failure_of_a_node_is_raised_in_the_kernel_that_attaches(launched: psutil.Process, end: Path) -> None:
    end.touch()
    night = tfos_nb.attach("night")
    with pytest.raises(errors.NodeFailed, match="ValueError: as asked") as caught:
        night.wait()
    assert caught.value.node == "worker:1"
    assert "in main" in caught.value.remote_traceback
    assert night.snapshot().status is ClusterStatus.FAILED
    night.close()


@pytest.mark.slow
def test_two_kernels_that_stop_at_the_same_time_stop_it_politely(launched: psutil.Process) -> None:
    kernels = [tfos_nb.attach("night") for _ in range(2)]
    assert until(lambda: "rows" in kernels[0].logs("worker:1"), SECONDS)
    said = [kernel.request_stop() for kernel in kernels]
    assert "its nodes have 30 s to end" in said[0]
    assert said[1] == "night is stopping already; ask again to end it at once"
    assert until(lambda: kernels[0].snapshot().status is ClusterStatus.STOPPED, SECONDS)
    assert {one["stopped"] for one in kernels[0].results().values()} == {True}
    kernels[1].close()


@pytest.mark.slow
def test_a_signal_ends_the_process_with_its_nodes_and_files(launched: psutil.Process) -> None:
    nodes = launched.children(recursive=True)
    launched.terminate()
    assert until(lambda: not any(one.is_running() for one in (launched, *nodes)), SECONDS)
    assert list(places.detached_directory().iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("launched", [{"saves": True}], indirect=True)
def test_a_process_that_was_killed_is_named_with_what_it_has_saved(launched: psutil.Process) -> None:
    night = tfos_nb.attach("night")
    assert until(lambda: "rows" in night.logs("worker:0"), SECONDS)
    launched.kill()
    assert until(lambda: [one.status for one in tfos_nb.clusters()] == ["LOST"])
    with pytest.raises(errors.ClusterClosed, match="has gone without a result"):
        night.wait()
    with pytest.raises(errors.PlanError, match="has gone without a result") as caught:
        tfos_nb.attach("night")
    saved = f"{night.model_dir}/checkpoints/{night.id}/00000001"
    assert f"Its last complete checkpoint is {saved}, of 20" in str(caught.value)
    assert f"Its model is {night.model_dir}/model.keras, of 20" in str(caught.value)


FRAME = """
import tfos_nb

def main(args, ctx):
    for batch in ctx.dataset(64):
        pass

if __name__ == "__main__":
    spark = tfos_nb.spark_session(3, conf={"spark.ui.enabled": "false"})
    try:
        with tfos_nb.launch(main, workers=1, spark=spark, detach=True, name="night", record=False) as cluster:
            cluster.train(spark.range(10))
    except tfos_nb.errors.PlanError as error:
        print(error)
    try:
        cluster.wait(100)
    except tfos_nb.errors.NodeFailed as error:
        print(str(error).splitlines()[0])
    print(cluster.state)
    cluster.close()
"""


def test_a_block_that_feeds_nothing_does_not_leave_its_cluster_waiting(tmp_path: Path) -> None:
    ended = run_kernel(FRAME, tmp_path)
    refused, failed, state = ended.stdout.splitlines()[-3:]
    assert refused.startswith("data: a detached cluster reads its rows itself, since a DataFrame of this kernel's")
    assert "no rows will come: the cluster was not given any" in failed, ended.stderr[-3000:]
    assert "FAILED" in state


FORGOTTEN = """
import threading
import tfos_nb

def main(args, ctx):
    return sum(int(len(batch["id"])) for batch in ctx.dataset(64))

if __name__ == "__main__":
    spark = tfos_nb.spark_session(3, conf={"spark.ui.enabled": "false"})
    cluster = tfos_nb.launch(main, workers=1, spark=spark, detach=True, keep=0.003, name="night", record=False)
    cluster.train(lambda spark: spark.range(0, 1000, 1, 4))
    while not cluster.state.ended:
        threading.Event().wait(0.2)
    print(cluster.state.value, cluster.results())
"""


def test_a_cluster_that_no_kernel_feeds_any_more_ends_by_itself(tmp_path: Path) -> None:
    ended = run_kernel(FORGOTTEN, tmp_path)
    assert ended.stdout.splitlines()[-1:] == ["DONE {'worker:0': 1000}"], ended.stderr[-3000:]


def run_kernel(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that launches a detached cluster, to its end."""
    (directory / "kernel.py").write_text(program)
    data = {"XDG_DATA_HOME": str(directory / "data"), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "kernel.py"]
    environment = {**os.environ, **data}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=SECONDS)
