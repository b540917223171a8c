"""TensorFlowOnSpark's names, argument orders and meanings, over this package's own API."""

from __future__ import annotations

import argparse
import copy
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tfos_nb import parallel
from tfos_nb.compat import (
    TFCluster,
    TFManager,
    TFNode,
    TFParallel,
    TFSparkNode,
    compat,
    dfutil,
    gpu_info,
    marker,
    pipeline,
    reservation,
    util,
)
from tfos_nb.errors import NodeFailed, PlanError, TfosError

SIGNATURES = {
    TFCluster.run: "sc map_fun tf_args num_executors num_ps tensorboard input_mode log_dir driver_ps_nodes master_node "
    "reservation_timeout queues eval_node release_port",
    TFCluster.reserve: "sc num_executors num_ps tensorboard input_mode log_dir queues",
    TFCluster.TFCluster.train: "self dataRDD num_epochs feed_timeout qname",
    TFCluster.TFCluster.inference: "self dataRDD feed_timeout qname",
    TFCluster.TFCluster.shutdown: "self ssc grace_secs timeout",
    TFCluster.TFCluster.tensorboard_url: "self",
    TFNode.hdfs_path: "ctx path",
    TFNode.start_cluster_server: "ctx num_gpus rdma",
    TFNode.export_saved_model: "sess export_dir tag_set signatures",
    TFNode.release_port: "ctx",
    TFNode.next_batch: "mgr batch_size qname",
    TFNode.batch_results: "mgr results qname",
    TFNode.terminate: "mgr qname",
    TFNode.DataFeed: "mgr train_mode qname_in qname_out input_mapping options",
    TFNode.DataFeed.next_batch: "self batch_size",
    TFNode.DataFeed.batch_results: "self results",
    TFSparkNode.TFNodeContext: "executor_id job_name task_index cluster_spec defaultFS working_dir mgr tmp_socket",
    TFSparkNode.TFNodeContext.get_data_feed: "self train_mode qname_in qname_out input_mapping options",
    TFSparkNode.run: "fn tf_args cluster_meta tensorboard log_dir queues background",
    TFSparkNode.train: "cluster_info cluster_meta feed_timeout qname",
    TFSparkNode.inference: "cluster_info feed_timeout qname",
    TFSparkNode.shutdown: "cluster_info grace_secs queues",
    TFParallel.run: "sc map_fn tf_args num_executors use_barrier",
    TFManager.start: "authkey queues mode",
    TFManager.connect: "address authkey",
    gpu_info.get_gpus: "num_gpu worker_index format",
    util.single_node_env: "num_gpus worker_index nodes",
    compat.export_saved_model: "model export_dir is_chief",
    compat.disable_auto_shard: "options",
}


SCHEMES = ["hdfs", "viewfs", "file", "s3", "s3a", "s3n", "adl", "oss", "swift", "wasb", "wasbs"]  # TensorFlowOnSpark's
SCHEMES += ["gs", "abfs", "abfss", "dbfs", "http", "https"]  # which TensorFlowOnSpark does not know


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: f"{function.__module__}.{function.__qualname__}")
def test_arguments_have_tensorflowonsparks_order(function: Any) -> None:
    assert " ".join(inspect.signature(function).parameters) == SIGNATURES[function]


@pytest.mark.parametrize(
    ("default_fs", "path", "expected"),
    [
        ("hdfs://nn:8020", "mnist", "hdfs://nn:8020/user/me/mnist"),
        ("viewfs://nn", "mnist", "viewfs://nn/user/me/mnist"),
        ("hdfs://nn:8020", "/mnist", "hdfs://nn:8020/mnist"),
        ("file://", "mnist", "file:///home/me/mnist"),
        ("file://", "/mnist", "file:///mnist"),
        ("s3a://bucket", "mnist", "s3a://bucket/mnist"),
        *[("hdfs://nn:8020", f"{scheme}://there/mnist", f"{scheme}://there/mnist") for scheme in SCHEMES],
    ],
)
def test_paths_resolve_as_in_tensorflowonspark_with_every_scheme(default_fs: str, path: str, expected: str) -> None:
    ctx = SimpleNamespace(defaultFS=default_fs, working_dir="/home/me", user="me")
    assert TFNode.hdfs_path(ctx, path) == expected
    whole = TFSparkNode.TFNodeContext(defaultFS=default_fs, working_dir="/home/me")
    whole.user = "me"
    assert whole.absolute_path(path) == whole.tf_path(path) == expected


def test_names_without_a_counterpart_say_what_to_call_instead() -> None:
    for call, told in (
        (lambda: TFNode.next_batch(None, 1), "use the class TFNode.DataFeed"),
        (lambda: TFNode.export_saved_model(None, "", None, None), "compat.export_saved_model"),
        (lambda: TFSparkNode.train(None, None), r"cluster.train\(rdd\)"),
        (lambda: TFManager.start(b"", []), "ctx.get_data_feed"),
        (lambda: reservation.Client(("h", 1)), "pickle on an open port"),
        (lambda: reservation.Server(1), "pickle on an open port"),
    ):
        with pytest.raises(TfosError, match=told):
            call()
    for module in (dfutil, pipeline):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = module.nothing


def test_small_helpers_work() -> None:
    assert issubclass(marker.EndPartition, marker.Marker)
    assert (TFCluster.InputMode.TENSORFLOW, TFCluster.InputMode.SPARK) == (0, 1)
    assert (gpu_info.AS_STRING, gpu_info.AS_LIST, gpu_info.MAX_RETRIES) == ("string", "list", 3)
    places = reservation.Reservations(2)
    places.add({"host": "a"})
    assert (places.done(), places.remaining(), places.get()) == (False, 1, [{"host": "a"}])
    assert util.find_in_path(os.environ["PATH"], "sh")
    assert util.find_in_path("/nowhere", "sh") is False
    assert util.get_ip_address().count(".") == 3


def test_the_executor_id_is_stored_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    util.write_executor_id(7)
    assert util.read_executor_id() == 7


FAKE_NVML = SimpleNamespace(  # a host whose GPUs 0 and 2 are busy
    nvmlInit=lambda: None,
    nvmlShutdown=lambda: None,
    nvmlDeviceGetCount=lambda: 5,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetComputeRunningProcesses=lambda handle: [1] if handle in (0, 2) else [],
)


def test_only_free_gpus_are_assigned_and_each_worker_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FAKE_NVML)
    assert gpu_info.is_gpu_available()
    assert gpu_info.get_gpus(1, 0) == "1"
    assert gpu_info.get_gpus(1, 2, gpu_info.AS_LIST) == ["4"]
    assert set(gpu_info.get_gpus(3, -1, gpu_info.AS_LIST)) == {"1", "3", "4"}
    with pytest.raises(TfosError, match="worker 1 asked for 2 GPUs, and only 1 are free on this host"):
        gpu_info.get_gpus(2, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    monkeypatch.setenv("TF_CONFIG", "{}")
    util.single_node_env(1, 2, ["b", "a", "a"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert "TF_CONFIG" not in os.environ


# --- invalid requests ---------------------------------------------------------------------------------------------


def nothing(args: Any, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"num_executors": 2, "num_ps": 2},
            r"num_executors=2 counts all nodes: with 2 ps, only 0 workers are left; raise it",
        ),
        ({"num_executors": 1, "num_ps": 1, "master_node": "chief"}, "with 1 ps, a chief, only 0 workers are left"),
        ({"num_executors": "2", "num_ps": 0}, "num_executors must be .*, got '2'"),
        ({"num_executors": 2, "num_ps": 0, "input_mode": 5}, "input_mode must be InputMode"),
        ({"num_executors": 2, "num_ps": 0, "master_node": "boss"}, "master_node='boss'"),
        (
            {"num_executors": 2, "num_ps": 0, "eval_node": True, "input_mode": 1},
            "need input_mode=InputMode.TENSORFLOW",
        ),
        ({"num_executors": 64, "num_ps": 0}, "needs 64 slots"),
    ],
    ids=str,
)
def test_an_inconsistent_plan_is_refused(spark: SparkSession, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        TFCluster.run(spark.sparkContext, nothing, None, **arguments)


def test_a_session_in_place_of_a_context_is_refused(spark: SparkSession) -> None:
    with pytest.raises(PlanError, match="sc is a SparkSession, not a SparkContext"):
        TFCluster.run(spark, nothing, None, 1, 0)
    with pytest.raises(PlanError, match="sc is a SparkSession, not a SparkContext"):
        TFParallel.run(spark, nothing, None, 1)
    with pytest.raises(PlanError, match="num_executors must be a whole number"):
        TFParallel.run(spark.sparkContext, nothing, None, "2")  # type: ignore[arg-type]


# --- clusters -----------------------------------------------------------------------------------------------------


def look_around(args: Any, ctx: Any) -> dict[str, Any]:
    """Return what TensorFlowOnSpark's ctx has; only in this package can main return a value."""
    feed = ctx.get_data_feed(across_partitions=True)
    rows: list[Any] = []
    while not feed.should_stop():
        rows += feed.next_batch(3)
    assert ctx.release_port() == TFNode.release_port(ctx) == ctx.cluster_spec[ctx.job_name][ctx.task_index]
    assert repr(ctx) == f"<TFNodeContext {ctx.job_name}:{ctx.task_index}, executor_id={ctx.executor_id}>"
    return {
        "argv": sys.argv,
        "args": args,
        "place": (ctx.executor_id, ctx.worker_num, ctx.job_name, ctx.task_index, ctx.num_workers),
        "spec": {job: len(at) for job, at in ctx.cluster_spec.items()},
        "paths": (ctx.defaultFS, ctx.working_dir, ctx.absolute_path("x"), ctx.tmp_socket),
        "state": ctx.mgr.get("state"),
        "rows": rows,
    }


def test_a_fed_cluster_has_tensorflowonsparks_roles_and_default_of_ten_epochs(spark: SparkSession) -> None:
    sc = spark.sparkContext
    cluster = TFCluster.run(
        sc, look_around, ["prog", "--steps", "5"], 2, 0, input_mode=TFCluster.InputMode.SPARK, master_node="master"
    )
    assert [(node["executor_id"], node["job_name"]) for node in cluster.cluster_info] == [(0, "master"), (1, "worker")]
    assert cluster.tensorboard_url() is None
    with pytest.raises(PlanError, match="the queue must be 'input', 'output' or 'error', got 'wrong'"):
        cluster.train(sc.parallelize([1]), qname="wrong")
    with pytest.raises(PlanError, match="num_epochs must be .*, got -1"):
        cluster.train(sc.parallelize([1]), -1)
    cluster.train(sc.parallelize(["1,a", "2,b", "3,c"], 2))
    cluster.shutdown(grace_secs=1)
    results = cluster.native.results()
    one, two = results["chief:0"], results["worker:0"]
    assert (one["place"], two["place"]) == ((0, 0, "master", 0, 2), (1, 1, "worker", 0, 2))
    assert one["argv"] == one["args"] == ["prog", "--steps", "5"]
    assert one["spec"] == {"master": 1, "worker": 1}
    assert one["paths"] == ("file://", os.getcwd(), f"file://{os.getcwd()}/x", None)
    assert sorted(one["rows"] + two["rows"]) == sorted(10 * ["1,a", "2,b", "3,c"])


def two_kinds(args: Any, ctx: Any) -> dict[str, Any]:
    """Read the training queue through the manager, and return an object that is not data."""
    queue, rows = ctx.mgr.get_queue("input"), []
    while (row := queue.get()) is not None:
        queue.task_done()
        rows.append(row)
    assert ctx.mgr.get_queue("nothing") is None
    ctx.mgr.set("seen", len(rows))
    args.found = (ctx.mgr.get("seen"), sorted(rows))
    print("found", args.found)
    return {"model": object(), "found": args.found}


def test_reserve_and_start_work_and_main_may_return_any_object(spark: SparkSession) -> None:
    sc = spark.sparkContext
    cluster = TFCluster.reserve(sc, 1, 0, False, TFCluster.InputMode.SPARK)
    cluster.start(two_kinds, argparse.Namespace(lr=0.5))
    cluster.train(sc.parallelize([(1, [0.5]), (2, [])], 1), num_epochs=1)
    cluster.shutdown()
    assert cluster.native.result() is None
    assert "found (2, [(1, [0.5]), (2, [])])" in cluster.native.logs("worker:0")


def mapped(args: Any, ctx: Any) -> list[Any]:
    feed = TFNode.DataFeed(ctx.mgr, input_mapping={"pixels": "x", "label": "y"})
    found = feed.next_batch(10)
    feed.terminate()
    return [found, feed.done_feeding, ctx.mgr.get("state")]


def test_a_mapping_gives_tensors_and_terminate_ends_the_feed(spark: SparkSession) -> None:
    frame = spark.range(0, 10**8, 1, 500).selectExpr("7 AS label", "array(1.5D, 2.5D) AS pixels")
    cluster = TFCluster.run(spark.sparkContext, mapped, {}, 1, 0, input_mode=TFCluster.InputMode.SPARK)
    cluster.train(frame.rdd, 1)
    cluster.shutdown()
    assert cluster.native.result() == [{"x": [[1.5, 2.5]] * 10, "y": [7] * 10}, True, "terminating"]


def streamed(args: Any, ctx: Any) -> list[int]:
    feed, rows = ctx.get_data_feed(), []
    while not feed.should_stop() and len(rows) < 5:
        rows += feed.next_batch(1)
    feed.terminate()
    return rows


@pytest.mark.filterwarnings("ignore:DStream is deprecated:FutureWarning")
@pytest.mark.slow  # tests/driver/feeding/test_streaming.py also feeds one
def test_a_dstream_is_fed_until_the_nodes_terminate_the_feed(spark: SparkSession) -> None:
    from pyspark.streaming import StreamingContext

    sc = spark.sparkContext
    ssc = StreamingContext(sc, 1)
    stream = ssc.queueStream([sc.parallelize(range(start, start + 2), 2) for start in range(0, 20, 2)])
    cluster = TFCluster.run(sc, streamed, None, 1, 0, input_mode=TFCluster.InputMode.SPARK)
    cluster.train(stream, feed_timeout=86400)
    ssc.start()
    cluster.shutdown(ssc)
    found = cluster.native.result()
    assert len(found) == len(set(found)) == 5
    assert set(found) <= set(range(6))
    assert sc.parallelize([1]).count() == 1


def breaking(args: Any, ctx: Any) -> None:
    raise ValueError("boom")


def test_a_failure_is_raised_and_the_next_run_in_the_process_works(spark: SparkSession) -> None:
    sc = spark.sparkContext
    with pytest.raises(NodeFailed, match="ValueError: boom"):
        cluster = TFCluster.run(sc, breaking, None, 1, 0)
        cluster.shutdown()
    after = TFCluster.run(sc, nothing, None, 1, 0)
    with pytest.raises(PlanError, match="this cluster reads files"):
        after.train(sc.parallelize([1]))
    after.shutdown(timeout=-1)
    assert sc.parallelize([1]).count() == 1


def waiting(args: Any, ctx: Any) -> None:
    import threading

    while not ctx.native.should_stop:
        threading.Event().wait(0.1)


def test_a_shutdown_that_takes_too_long_ends_the_nodes(spark: SparkSession) -> None:
    cluster = TFCluster.run(spark.sparkContext, waiting, None, 1, 0, tensorboard=False)
    with pytest.raises(TimeoutError):
        cluster.shutdown(timeout=0.5)
    assert cluster.native.state.ended


def never_right(args: Any, ctx: Any) -> None:
    ctx.get_data_feed().next_batch(1)
    raise ValueError("boom in a stream")


@pytest.mark.filterwarnings("ignore:DStream is deprecated:FutureWarning")
def test_shutdown_raises_a_failure_within_a_stream_and_ends_the_stream(spark: SparkSession) -> None:
    from pyspark.streaming import StreamingContext

    sc = spark.sparkContext
    ssc = StreamingContext(sc, 1)
    stream = ssc.queueStream([sc.parallelize(range(50), 2) for _ in range(20)])
    cluster = TFCluster.run(sc, never_right, None, 1, 0, input_mode=TFCluster.InputMode.SPARK)
    cluster.train(stream, feed_timeout=86400)
    ssc.start()
    with pytest.raises(NodeFailed, match="ValueError: boom in a stream"):
        cluster.shutdown(ssc)
    assert str(ssc._jssc.getState()) == "STOPPED"
    assert sc.parallelize([1]).count() == 1


def between_graph(args: Any, ctx: Any) -> list[Any]:
    """Train as in TensorFlow 1.x: variables on the ps, sessions on the chief and the workers, each fed by Spark."""
    import tensorflow.compat.v1 as tf

    cluster, server = ctx.start_cluster_server(1, False)
    if ctx.job_name == "ps":
        server.join()
    with tf.Graph().as_default(), tf.Session(server.target) as session:
        here = f"/job:{ctx.job_name}/task:{ctx.task_index}"
        with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=here)):
            total = tf.Variable(0.0, name="total")
            value = tf.placeholder(tf.float32)
            add = total.assign_add(value, use_locking=True)
        if ctx.job_name in ("chief", "master"):
            session.run(total.initializer)
        wait_for(lambda: session.run(tf.is_variable_initialized(total)))
        feed, rows = TFNode.DataFeed(ctx.mgr, True), []
        while not feed.should_stop():
            for row in feed.next_batch(8):
                rows.append(row)
                session.run(add, {value: row})
        return [rows, ctx.num_workers, total.device]


def wait_for(reached: Any) -> None:
    import threading

    while not reached():
        threading.Event().wait(0.1)


@pytest.mark.slow  # tests/end_to_end/strategies trains with parameter servers and a chief
@pytest.mark.parametrize(("nodes", "master"), [(3, "master"), (2, "chief")])
def test_a_chief_with_parameter_servers_is_fed_under_its_own_name(spark: SparkSession, nodes: int, master: str) -> None:
    sc, mode = spark.sparkContext, TFCluster.InputMode.SPARK
    cluster = TFCluster.run(sc, between_graph, None, nodes, 1, input_mode=mode, master_node=master)
    cluster.train(sc.parallelize([float(number) for number in range(4000)], 4), 1)
    cluster.shutdown(timeout=120)
    results = {node: result for node, result in cluster.native.results().items() if not node.startswith("ps")}
    assert sorted(results) == ["chief:0", "worker:0"][: nodes - 1]
    assert all(rows and of == nodes - 1 and "/job:ps" in device for rows, of, device in results.values())
    assert sorted(row for rows, _, _ in results.values() for row in rows) == [float(n) for n in range(4000)]


def test_a_missing_protocol_is_refused_with_the_available_ones() -> None:
    ctx = TFSparkNode.TFNodeContext(job_name="worker", cluster_spec={"worker": ["127.0.0.1:0"]})
    with pytest.raises(PlanError, match=r"protocol='grpc\+verbs': TensorFlow .* was built without it; use one of grpc"):
        TFNode.start_cluster_server(ctx, rdma=True)


def test_the_old_ctx_also_has_the_attributes_of_the_native_one() -> None:
    """A program can be migrated line by line; the old names take precedence."""
    ctx = TFSparkNode.TFNodeContext(job_name="worker")
    for name in ("dataset", "_saving"):
        with pytest.raises(AttributeError, match=f"'TFNodeContext' object has no attribute '{name}'"):
            getattr(ctx, name)
    ctx.native = SimpleNamespace(dataset=lambda size: f"rows in batches of {size}", job_name="chief", _saving=True)
    assert ctx.dataset(64) == "rows in batches of 64"
    assert ctx.job_name == "worker"
    assert {"dataset", "next_batch"} <= set(dir(ctx))
    assert "_saving" not in dir(ctx)
    with pytest.raises(AttributeError, match="'_saving'"):
        _ = ctx._saving
    assert copy.copy(ctx).dataset(1) == "rows in batches of 1"


def serve_or_work(args: Any, ctx: Any) -> int:
    """Join the server on a parameter server of TensorFlow 1, which is ended when the workers are done."""
    if ctx.job_name == "ps":
        ctx.start_cluster_server(1)[1].join()
    cluster, server = ctx.start_cluster_server(num_gpus=0)
    assert server is ctx.server
    assert (ctx.generation, ctx.should_stop, ctx.is_chief) == (1, False, ctx.task_index == 0)
    return len(cluster.as_dict()["ps"]) * 10 + ctx.executor_id


def test_a_parameter_server_that_never_returns_is_ended_with_the_workers(spark: SparkSession) -> None:
    cluster = TFCluster.run(spark.sparkContext, serve_or_work, None, 3, 1)
    assert [node["job_name"] for node in cluster.cluster_info] == ["ps", "worker", "worker"]
    cluster.shutdown()
    results = cluster.native.results()
    assert (results["worker:0"], results["worker:1"]) == (11, 12)


# --- independent programs -----------------------------------------------------------------------------------------


def place(args: Any, ctx: Any) -> tuple[int, int, int]:
    return ctx.index, ctx.count, os.getpid()


def test_independent_programs_run_in_separate_processes_with_results_in_order(spark: SparkSession) -> None:
    for barrier in (True, False):
        found = parallel.run(place, nodes=3, spark=spark, barrier=barrier)
        assert [(index, count) for index, count, _ in found] == [(0, 3), (1, 3), (2, 3)]
        assert len({pid for _, _, pid in found}) == 3
    assert len(parallel.run(place, nodes=7, spark=spark)) == 7  # more than the slots
    with pytest.raises(PlanError, match="needs 7 slots"):
        parallel.run(place, nodes=7, spark=spark, barrier=True)


def leaves_a_file(args: Any, ctx: Any) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile(delete=False) as file:
        return file.name


def test_a_programs_temporary_directory_is_removed_at_its_end(spark: SparkSession) -> None:
    (left,) = parallel.run(leaves_a_file, nodes=1, spark=spark)
    assert not os.path.exists(os.path.dirname(left))


def failing(args: Any, ctx: Any) -> int:
    import signal

    if ctx.index == 1:
        if args == "raise":
            raise ValueError("boom")
        if args == "kill":
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if args == "object":
            return object()  # type: ignore[return-value]
    import threading

    threading.Event().wait(0.0 if args == "object" else 600.0)
    return 0


def returns_its_index(args: Any, ctx: Any) -> int:
    return int(ctx.index)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("raise", r"program 1 .*ValueError: boom"),
        pytest.param("kill", r"(?s)program 1 .*killed by SIGKILL.*last words", marks=pytest.mark.slow),
        pytest.param(
            "object",
            r"program 1 .*the value that main returned cannot be sent: the result is a builtins.object",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_first_failed_program_is_reported_at_once_and_ends_the_others(
    spark: SparkSession, args: str, told: str
) -> None:
    with pytest.raises(NodeFailed, match=told):
        parallel.run(failing, args, nodes=2, spark=spark)
    assert parallel.run(returns_its_index, nodes=4, spark=spark, barrier=True) == [0, 1, 2, 3], (
        "Spark ends a task in 3 s"
    )


def lineage_place(args: Any, ctx: Any) -> object:
    (Path(args.folder) / f"{ctx.worker_num}-{ctx.executor_id}-{ctx.num_workers}").touch()
    assert ctx.mgr is None
    assert ctx.cluster_spec == {}
    return object()


def test_tfparallel_runs_programs_and_returns_nothing(spark: SparkSession, tmp_path: Path) -> None:
    assert TFParallel.run(spark.sparkContext, lineage_place, argparse.Namespace(folder=str(tmp_path)), 2) is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0-0-2", "1-1-2"]
