"""Failures are reported once, with the node's name and traceback, and the next cluster in the same kernel works."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.ml.linalg import Matrices
from pyspark.sql import SparkSession

from tests.conftest import RunScript
from tests.faults import its_supervisor
from tests.waiting import until
from tfos_nb import Cluster, errors, launch, parallel
from tfos_nb.driver.launching import error_of_job
from tfos_nb.driver.node_jobs import NodeJobs
from tfos_nb.driver.settings import Settings
from tfos_nb.runtime.control.processes import private_directory
from tfos_nb.spark.session import slots_busy


def tf_processes() -> list[psutil.Process]:
    """Find the processes of nodes: those that Spark's tasks started, and those that the warm server forked."""
    found = []
    for process in [*psutil.Process().children(recursive=True), *forked_ones()]:
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if any(part.startswith("tfos_nb.runtime.") for part in line):
            found.append(process)
    return found


def forked_ones() -> Iterator[psutil.Process]:
    """Find the forked processes of this process' Spark, except for the warm servers."""
    for process in psutil.process_iter(["name"]):
        name = process.info["name"]
        with contextlib.suppress(psutil.Error):
            forked = name.startswith("tfos_nb ") and name != "tfos_nb warm"
            if forked and process.environ().get("SPARK_HOME") == os.environ["SPARK_HOME"]:
                yield process


def told(process: psutil.Process) -> str:
    """Describe a process that should have ended: its parents, its age, and what it waits for."""
    with process.oneshot():
        waits = Path(f"/proc/{process.pid}/wchan").read_text()
        threads = [f"{thread.user_time + thread.system_time:.1f}" for thread in process.threads()]
        parents = " < ".join(parent.name() for parent in process.parents())
        age = time.time() - process.create_time()
        told = f"{process} < {parents}: {process.cmdline()[1:3]}, {age:.1f} s old, waits in {waits}"
        return f"{told}, its threads' seconds: {threads}"


def own_threads() -> list[threading.Thread]:
    """Return the threads of the package."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("tfos_nb")]


@pytest.fixture(autouse=True)
def nothing_is_left(spark: SparkSession) -> Iterator[None]:
    """Check after each failure that no process and no thread is left and no slot is held."""
    yield
    assert until(lambda: not tf_processes()), [told(process) for process in tf_processes()]
    assert until(lambda: not slots_busy(spark)), slots_busy(spark)
    assert until(lambda: not own_threads()), own_threads()


def raising(args: Any, ctx: Any) -> None:
    if ctx.task_index == 1:
        raise ValueError(f"no good: {args}")
    wait_for_ever()


def wait_for_ever() -> None:
    threading.Event().wait()


def exiting(args: Any, ctx: Any) -> None:
    if ctx.task_index == 1:
        os._exit(3)
    wait_for_ever()


def telling_pid(args: Any, ctx: Any) -> None:
    ctx.report(step=1, pid=os.getpid())
    wait_for_ever()


def counting(args: Any, ctx: Any) -> int:
    return sum(int(batch["label"].shape[0]) for batch in ctx.dataset(16))


def test_an_exception_on_one_of_three_workers_is_shown_with_its_line(spark: SparkSession) -> None:
    cluster = launch(raising, "reason", workers=3, spark=spark, wait_until_up=False)
    with pytest.raises(errors.NodeFailed) as caught, cluster:
        pass
    error = caught.value
    assert error.node == "worker:1"
    assert "ValueError: no good: reason" in error.remote_traceback
    assert 'raise ValueError(f"no good: {args}")' in error.remote_traceback
    assert "tfprocess" not in error.remote_traceback
    assert error.host in str(error)
    assert cluster.state.value == "FAILED"
    with pytest.raises(errors.NodeFailed):  # the error is raised again
        cluster.train(spark.range(3))


def test_a_killed_node_is_named_with_its_signal(spark: SparkSession) -> None:
    with pytest.raises(errors.NodeFailed) as caught, launch(telling_pid, workers=2, spark=spark) as cluster:
        victim = next(node for node in cluster.snapshot().nodes if node.node == "worker:1")
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        cluster.wait()
    assert (caught.value.node, caught.value.signal) == ("worker:1", "SIGKILL")
    assert "killed by SIGKILL" in str(caught.value)


def leaving_a_file(args: Any, ctx: Any) -> None:
    tempfile.mkstemp(prefix=args)
    telling_pid(args, ctx)


def files_named(start: str, root: Path) -> list[str]:
    """Find files by the start of their names. os.walk tolerates directories that others remove meanwhile."""
    return [os.path.join(at, file) for at, _, files in os.walk(root) for file in files if file.startswith(start)]


def test_the_temporary_files_of_a_killed_node_are_removed(spark: SparkSession) -> None:
    name = f"left-{uuid.uuid4()}"
    root = Path(tempfile.gettempdir())
    with (
        pytest.raises(errors.NodeFailed),
        launch(leaving_a_file, name, workers=1, spark=spark, input_mode="tensorflow") as cluster,
    ):
        assert until(lambda: cluster.snapshot().nodes[0].step == 1)
        assert files_named(name, root)
        os.kill(cluster.snapshot().nodes[0].pid or 0, signal.SIGKILL)
        cluster.wait()
    assert until(lambda: not files_named(name, root))


def test_a_node_that_exits_is_named_with_its_exit_code(spark: SparkSession) -> None:
    with pytest.raises(errors.NodeFailed) as caught, launch(exiting, workers=2, spark=spark) as cluster:
        cluster.wait()
    assert (caught.value.node, caught.value.exit_code) == ("worker:1", 3)


def test_a_supervisor_that_is_killed_loses_its_node(spark: SparkSession) -> None:
    with pytest.raises(errors.NodeFailed) as caught, launch(telling_pid, workers=2, spark=spark) as cluster:
        victim = next(node for node in cluster.snapshot().nodes if node.node == "worker:0")
        supervisor = psutil.Process(victim.pid).parent()
        assert supervisor is not None
        supervisor.kill()
        cluster.wait()
    assert caught.value.node == "worker:0"


def supervisor_of(cluster: Cluster, node: str) -> psutil.Process:
    victim = next(known for known in cluster.snapshot().nodes if known.node == node)
    assert victim.pid is not None
    return psutil.Process(its_supervisor(victim.pid))


def count_until_told(args: Any, ctx: Any) -> int:
    dataset = ctx.dataset(16)
    return sum(int(batch["id"].shape[0]) for _ in range(3) for batch in dataset)  # the third pass is empty


def test_a_node_outlives_the_python_process_of_its_task_and_its_slot_stays_taken(spark: SparkSession) -> None:
    with launch(count_until_told, workers=2, spark=spark) as cluster:
        supervisor = supervisor_of(cluster, "worker:1")
        task = supervisor.parent()
        assert task is not None
        task.kill()
        task.wait(20)
        assert until(lambda: supervisor.ppid() != task.pid)
        cluster.train(spark.range(100))
        cluster.train(spark.range(100))
        assert until(lambda: [busy.tasks for busy in slots_busy(spark)] == [2]), slots_busy(spark)
    assert sum(cluster.results().values()) == 200


def test_a_node_outlives_its_executor(spark: SparkSession) -> None:
    with launch(count_until_told, workers=2, spark=spark) as cluster:
        supervisor = supervisor_of(cluster, "worker:0")
        executor = next(process for process in supervisor.parents() if process.name() == "java")
        assert executor.pid != os.getpid()
        cluster.train(spark.range(100))
        executor.kill()
        executor.wait(20)
        cluster.train(spark.range(100))
    assert sum(cluster.results().values()) == 200


@pytest.mark.faults
def test_a_supervisor_that_is_stopped_does_not_outlive_its_cluster(spark: SparkSession) -> None:
    cluster = launch(count_until_told, workers=2, spark=spark)
    supervisor = supervisor_of(cluster, "worker:0")
    processes = [supervisor, *(psutil.Process(node.pid) for node in cluster.snapshot().nodes)]
    supervisor.suspend()
    cluster.close()
    assert until(lambda: not any(is_alive(process) for process in processes))


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_row_of_the_wrong_type_is_named(spark: SparkSession) -> None:
    rows = spark.sparkContext.parallelize([(1.0, 2), (3.0, "four")], 1)
    with pytest.raises(errors.FeedFailed, match=r"column '_2', row 1: 'four' is a str, not int64"):
        with launch(lambda args, ctx: [0 for _ in ctx.dataset(2)], workers=2, spark=spark) as cluster:
            cluster.train(rows)


def test_a_list_of_another_length_is_named(spark: SparkSession) -> None:
    frame = spark.createDataFrame([([1.0, 2.0], 0), ([1.0], 1)], "x array<float>, label int").coalesce(1)
    with pytest.raises(errors.NodeFailed, match="column 'x' holds a list of 1 values where the first row's has 2"):
        with launch(counting, workers=2, spark=spark) as cluster:
            cluster.train(frame)


def test_a_null_is_named_with_what_to_do(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(1.0, 0), (None, 1)], "x float, label int")
    with pytest.raises(errors.NodeFailed, match=r"column 'x' has a null.*dropna\(subset=\['x'\]\)") as caught:
        with launch(counting, workers=2, spark=spark) as cluster:
            cluster.train(frame)
    assert "Traceback" in caught.value.remote_traceback
    assert "ctx.dataset(16)" in caught.value.remote_traceback


def test_a_missing_column_is_named_with_the_nearest(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(1.0, 0)], "x float, label int")
    with pytest.raises(errors.NodeFailed, match="no column 'labl' in the rows that are fed: .*did you mean 'label'"):
        with launch(lambda args, ctx: ctx.dataset(2, columns=["labl"]) and None, workers=2, spark=spark) as cluster:
            cluster.train(frame)


def test_a_column_that_cannot_become_a_tensor_is_refused_before_anything_is_read(spark: SparkSession) -> None:
    frame = spark.sql("select current_timestamp() as at, 1 as label")
    with pytest.raises(errors.PlanError, match="column 'at' is timestamp.*cast"):
        with launch(counting, workers=1, spark=spark) as cluster:
            cluster.train(frame)


def test_data_without_rows_are_refused(spark: SparkSession) -> None:
    frame = spark.createDataFrame([], "x float, label int")
    with pytest.raises(errors.FeedFailed, match="the data have no rows"):
        with launch(counting, workers=2, spark=spark) as cluster:
            cluster.train(frame)


def failing_udf(batches: Any) -> Any:
    for _ in batches:
        raise KeyError("upstream")
    yield from ()


def test_an_error_of_the_users_own_spark_code_is_shown(spark: SparkSession) -> None:
    frame = spark.range(10).mapInArrow(failing_udf, "label long")
    with pytest.raises(errors.FeedFailed, match="KeyError: 'upstream'"):
        with launch(counting, workers=2, spark=spark) as cluster:
            cluster.train(frame)


def test_a_result_that_is_no_data_is_named(spark: SparkSession) -> None:
    with pytest.raises(errors.NodeFailed, match=r"the result\['model'\] is a builtins.object.*ctx.save"):
        with launch(lambda args, ctx: {"model": object()}, workers=1, spark=spark, input_mode="tensorflow"):
            pass


def test_more_nodes_than_slots_are_refused_in_seconds(spark: SparkSession) -> None:
    began = time.monotonic()
    with pytest.raises(errors.PlanError, match=r"needs 9 slots .* Spark has 4 .*ask for 4 nodes"):
        launch(counting, workers=9, spark=spark)
    assert time.monotonic() - began < 60  # far from the ten minutes of Spark's own check


def test_a_second_cluster_is_refused_while_the_first_one_waits_for_its_slots(spark: SparkSession) -> None:
    first = launch(telling_pid, workers=3, spark=spark, name="first", wait_until_up=False)
    try:
        with pytest.raises(errors.PlanError, match=r"needs 3 slots .* Spark has 4 .*cluster first.*ask for 1 node"):
            launch(telling_pid, workers=3, spark=spark, name="second", input_mode="tensorflow")
    finally:
        first.close()


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"env": "A=1"}, "env must be a dictionary"),
        ({"model_dir": 3}, "model_dir must be a path"),
        ({"log_dir": 3}, "log_dir must be a path"),
        ({"queues": None}, "queues must be names"),
        ({"spill_bytes": "1"}, "spill_bytes must be a whole number of bytes"),
        ({"spill_bytes": -1}, "spill_bytes must be .*, got -1"),
        ({"autolog": "no"}, "autolog must be True or False, got 'no'"),
        ({"tensorboard": 1}, "tensorboard must be True or False, got 1"),
        ({"name": ".."}, r"name must have .*, got '\.\.'"),
        ({"name": " "}, "name must have .*, got ' '"),
        ({"name": "_"}, "name must have .*, got '_'"),
        ({"env": {"A=B": "1"}}, "env: a variable's name must not be empty or contain '=' or NUL, got 'A=B'"),
        ({"env": {"": "1"}}, "env: a variable's name must not be empty or contain '=' or NUL, got ''"),
        ({"env": {"A": "1\0"}}, "env: the value of 'A' must not contain NUL"),
        ({"heartbeat_timeout": 0.2}, "heartbeat_timeout must be 3 seconds or more, got 0.2"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout must be a number of seconds, above 0"),
        ({"grace": True}, "grace must be a number of seconds"),
        ({"buffer_bytes": 1.5}, "buffer_bytes must be a whole number of bytes"),
        ({"model_dir": __file__}, r"model_dir='.*test_failures.py' is a file: give a directory"),
        ({"log_dir": __file__}, r"log_dir='.*test_failures.py' is a file: give a directory"),
        ({"restarts": 1, "min_workers": 2}, "min_workers must be at most 1, the number of workers, got 2"),
    ],
)
def test_an_invalid_setting_is_named_before_anything_starts(
    spark: SparkSession, wish: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.PlanError, match=said):
        launch(counting, spark=spark, **wish)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"nodes": 0}, "nodes must be a whole number, 1 or more, got 0"),
        ({"cpus": "2"}, "cpus must be a whole number, 1 or more, got '2'"),
        ({"gpus": -1}, "gpus must be a whole number, 0 or more, got -1"),
        ({"env": "A=1"}, "env must be a dictionary"),
        ({"env": {"A=B": "1"}}, "env: a variable's name must not be empty or contain '=' or NUL, got 'A=B'"),
    ],
)
def test_invalid_options_of_parallel_run_are_refused_before_anything_starts(
    spark: SparkSession, wish: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.PlanError, match=said):
        parallel.run(counting, **{"nodes": 1, "spark": spark, **wish})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TFOS_SERVER_PORT", "http", "TFOS_SERVER_PORT must be one port, or a range .*, got http"),
        ("TFOS_SERVER_RELAY", "yes", "TFOS_SERVER_RELAY must be 1 .*, got yes"),
    ],
)
def test_an_invalid_environment_variable_is_named_before_a_session_starts(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    for module in ("cluster", "parallel"):
        asked = f"tfos_nb.{module}.session_and_format"
        monkeypatch.setattr(asked, lambda spark, slots: pytest.fail(f"a Spark with {slots} slots"))
    with pytest.raises(errors.PlanError, match=said):
        launch(counting)
    with pytest.raises(errors.PlanError, match=said):
        parallel.run(counting, nodes=1)


def test_directories_may_be_paths(tmp_path: Path) -> None:
    settings = Settings(model_dir=tmp_path / "models", log_dir=tmp_path / "logs")
    assert settings.model_dir_for("a") == str(tmp_path / "models")
    assert settings.log_dir_for("a") == str(tmp_path / "logs")


def telling_place(args: Any, ctx: Any) -> str:
    return str(ctx.model_dir)


def test_clusters_with_the_same_name_that_run_at_once_have_their_own_directories(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "tfos_models"
    options: dict[str, Any] = {"spark": spark, "name": "same", "input_mode": "tensorflow"}
    with launch(telling_place, **options) as first, launch(telling_place, **options) as other:
        found = [Path(first.model_dir), Path(other.model_dir)]
        given = Settings(model_dir=found[0]).for_plan(first.plan)
        assert Path(given.model_dir_for("same")) == found[0], "what is asked for is taken as it is"
    assert found == [Path(first.result()), Path(other.result())] == [place / "same", place / "same-2"]
    assert Path(Settings().for_plan(first.plan).model_dir_for("same")) == place / "same", "the first one has ended"


def test_invalid_options_and_columns_of_a_feed_are_refused(spark: SparkSession) -> None:
    frame = spark.range(4)
    with launch(counting, workers=1, spark=spark) as cluster:
        for wish, said in (
            ({"feed_timeout": "3"}, "feed_timeout must be a number of seconds"),
            ({"feed_timeout": 0}, "feed_timeout must be a number of seconds, above 0"),
            ({"spill": "no"}, "spill must be True or False, got 'no'"),
        ):
            with pytest.raises(errors.PlanError, match=said):
                cluster.train(frame, **wish)
        for timeout in ("10", float("nan"), float("inf"), True):
            with pytest.raises(errors.PlanError, match="timeout must be a number of seconds, 0 or more"):
                cluster.wait(timeout)  # type: ignore[arg-type]
        for data, said in (
            (frame.withColumnRenamed("id", "a.b"), r"'a\.b' has a dot or .*withColumnRenamed\('a\.b', 'a_b'\)"),
            (frame.withColumnRenamed("id", "a`b"), r"'a`b' has a dot or a backtick in its name.*, 'a_b'\)"),
            (frame.selectExpr("id", "id + 1 AS id"), "two columns are called 'id'"),
            (frame.selectExpr("id", "id + 1 AS ID"), "columns 'id' and 'ID' are the same to Spark"),
            (
                frame.selectExpr("id", "null AS n"),
                r"'n' is void, which cannot become a tensor: it holds nothing; cast it",
            ),
            (
                frame.selectExpr("now() - now() AS t"),
                r"'t' is interval day to second, which cannot become a tensor: make a number of it: subtract",
            ),
            (
                frame.selectExpr("INTERVAL '1' MONTH AS t"),
                r"'t' is interval month, which cannot become a tensor: make a number",
            ),
            (
                spark.createDataFrame([(Matrices.dense(1, 2, [1.0, 2.0]),)], ["m"]),
                r"'m' is matrix, which cannot become a tensor: it is a type of its own",
            ),
        ):
            with pytest.raises(errors.PlanError, match=said):
                cluster.train(data)
        cluster.train(frame.withColumnRenamed("id", "label"))


def test_a_function_that_cannot_be_sent_is_named_before_anything_starts(spark: SparkSession) -> None:
    lock = threading.Lock()

    def main(args: Any, ctx: Any) -> Any:
        return lock

    with pytest.raises(errors.PlanError, match="main refers to lock, a lock, which cannot be sent"):
        launch(main, spark=spark)
    with pytest.raises(errors.PlanError, match=r"args\['df'\], a DataFrame.*cluster.train"):
        launch(counting, {"df": spark.range(2)}, spark=spark)


def test_stop_ends_nodes_that_do_not_react(spark: SparkSession) -> None:
    cluster = launch(telling_pid, workers=2, spark=spark, grace=1.0)
    assert len(tf_processes()) >= 4
    cluster.stop()
    assert cluster.state.value == "STOPPED"
    cluster.stop()
    cluster.close()
    with pytest.raises(errors.ClusterClosed):
        cluster.train(spark.range(3))


def test_leaving_the_with_block_by_an_error_stops_the_nodes(spark: SparkSession) -> None:
    with pytest.raises(ZeroDivisionError), launch(telling_pid, workers=2, spark=spark) as cluster:
        _ = 1 / 0
    assert cluster.state.value == "STOPPED"


def test_a_node_that_takes_no_rows_causes_a_feed_timeout(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(float(i), 0) for i in range(100)], "x float, label int")
    with pytest.raises(errors.FeedTimeout, match=r"worker:0, worker:1 took no row and did not compute for 3 s"):
        with launch(telling_pid, workers=2, spark=spark, feed_timeout=3) as cluster:
            cluster.train(frame)


def computing_for_long(args: dict[str, float], ctx: Any) -> int:
    """Read the rows, with one step that takes longer than the feed timeout."""
    count = 0
    for number, batch in enumerate(ctx.dataset(10)):
        count += len(batch["id"])
        until_then = time.monotonic() + (args["seconds"] if number == 0 else 0)
        while time.monotonic() < until_then:
            sum(range(10_000))
    return count


def test_a_slow_consumer_that_computes_never_times_out(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    with launch(computing_for_long, {"seconds": 8}, workers=1, spark=spark, feed_timeout=2) as cluster:
        cluster.train(spark.range(0, 100, 1, 1))
    assert cluster.result() == 100
    assert "worker:0 took no row for 2 s, in epoch 1; the feed keeps waiting, because the nodes compute" in caplog.text


def test_a_model_dir_that_cannot_be_written_is_named_before_an_epoch_is_trained(spark: SparkSession) -> None:
    place = "/sys/models"  # not even root can write there
    with pytest.raises(errors.NodeFailed, match=r"/sys/models.* cannot be written on .*Give a model_dir") as caught:
        launch(resuming, workers=1, spark=spark, restarts=1, model_dir=place)  # no row can be fed yet
    assert caught.value.node == "worker:0"


def test_a_cluster_that_cannot_be_submitted_to_spark_leaves_no_directory(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories: list[str] = []

    def noted(kind: str) -> str:
        directories.append(private_directory(kind))
        return directories[-1]

    def refuse(nodes: NodeJobs) -> None:
        assert os.listdir(directories[0]) == ["tensorboard"], "it is there by then"
        raise ConnectionRefusedError("Spark has gone")

    monkeypatch.setattr("tfos_nb.cluster.private_directory", noted)
    monkeypatch.setattr(NodeJobs, "submit", refuse)
    with pytest.raises(ConnectionRefusedError, match="Spark has gone"):
        launch(counting, spark=spark, tensorboard=True, model_dir=str(tmp_path))
    assert [os.path.exists(one) for one in directories] == [False]


def resuming(args: Any, ctx: Any) -> None:
    import tensorflow as tf

    ctx.resume(total=tf.Variable(0))


def test_an_error_of_the_function_that_makes_the_rows_is_shown_with_its_line(spark: SparkSession) -> None:
    def upset(number: int) -> float:
        return 1 / (number - 70)

    with pytest.raises(errors.FeedFailed) as caught:
        with launch(telling_pid, workers=2, spark=spark) as cluster:
            cluster.train(spark.sparkContext.parallelize(range(100), 4).map(upset))
    first, *trace = str(caught.value).splitlines()
    assert first == "Spark could not deliver the rows: ZeroDivisionError: division by zero"
    assert trace[0] == "Traceback (most recent call last), on an executor:"
    assert "test_failures.py" in trace[1]
    assert trace[1].endswith("in upset")
    assert not [line for line in trace if "pyspark" in line]


def test_an_error_of_java_is_shown_with_its_class_and_message(spark: SparkSession) -> None:
    with pytest.raises(Py4JJavaError) as raised:
        spark._jvm.java.lang.Class.forName("no.Such")  # type: ignore[union-attr]
    told = str(error_of_job(raised.value, "the job failed"))
    assert told == "the job failed: ClassNotFoundException: no.Such"


SPARK_ENDS = """
    import os, signal
    from tfos_nb import launch, spark_session
    from tfos_nb.errors import FeedFailed
    from tfos_nb.widgets.words.problems import aside

    def main(args, ctx):
        import threading
        threading.Event().wait()

    def end_of(cluster):
        try:
            cluster.wait()
        except FeedFailed as error:
            print("SAID", error)
            print("ASIDE", aside(cluster.snapshot()))

    spark = spark_session(3, conf={"spark.ui.enabled": "false"})
    cluster = launch(main, workers=1)
    spark.stop()
    end_of(cluster)
    spark = spark_session(3, conf={"spark.ui.enabled": "false"})
    cluster = launch(main, workers=1)
    os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
    end_of(cluster)
"""


@pytest.mark.slow
def test_a_cluster_whose_spark_was_stopped_or_killed_says_so(run_script: RunScript) -> None:
    """It must not say that the session is free, because no session exists."""
    ended = run_script(SPARK_ENDS)
    said = [line for line in ended.stdout.splitlines() if line.startswith("SAID ")]
    assert len(said) == 2
    for line in said:
        assert line.startswith("SAID Spark has ended, and the cluster with it")
        assert "Start a session" in line
    assert ended.stdout.count("ASIDE 1 node was stopped because of it.\n") == 2
