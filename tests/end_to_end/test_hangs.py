"""A training that hangs is explained: which node is behind, and where. The stack of every node is available."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from tests.waiting import until
from tfos_nb import Cluster, errors, launch

ROWS = 3000


def wait_for_ever(args: dict[str, Any]) -> None:
    threading.Event().wait(120)


def deadlock(args: dict[str, Any]) -> None:
    first, second = threading.Lock(), threading.Lock()

    def other() -> None:
        with second:
            threading.Event().wait(0.2)
            first.acquire()

    with first:
        threading.Thread(target=other, daemon=True).start()
        threading.Event().wait(0.1)
        second.acquire()


def download(args: dict[str, Any]) -> None:
    socket.create_connection(tuple(args["server"])).makefile("rb").read(1)


def write_to_pipe(args: dict[str, Any]) -> None:
    _, end = os.pipe()
    while True:
        os.write(end, b"x" * 65536)


def write_to_slow_disk(args: dict[str, Any]) -> None:
    Path(args["frozen"], "file").write_bytes(b"x")


def stop(args: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


WRONG = {one.__name__: one for one in (wait_for_ever, deadlock, download, write_to_pipe, write_to_slow_disk, stop)}


def main(args: dict[str, Any], ctx: Any) -> None:
    """Train with Keras' fit; the second worker hangs in the sixth step."""
    import keras
    import tensorflow as tf

    class Hangs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5 and ctx.task_index == 1 and args["how"]:
                WRONG[args["how"]](args)

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
    model.fit(ctx.dataset(32, x="id", y="y"), verbose=0, callbacks=[Hangs()])


def while_validating(args: dict[str, Any], ctx: Any) -> None:
    """Train with Keras' fit; the second worker hangs in the second step of the validation."""
    import keras
    import tensorflow as tf

    class Hangs(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and ctx.task_index == 1:
                wait_for_ever(args)

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
    rows, validation = ctx.dataset(32, x="id", y="y"), ctx.validation(32, x="id", y="y")
    model.fit(rows, validation_data=validation, epochs=2, verbose=0, callbacks=[Hangs()])


def in_input_pipeline(args: dict[str, Any], ctx: Any) -> None:
    """Train with Keras' fit; the second worker's input pipeline waits for a server after some batches."""
    import keras
    import tensorflow as tf

    batches = iter(range(ROWS))

    def look_up(x: Any) -> Any:
        if next(batches) > 6 and ctx.task_index == ctx.num_workers - 1:
            download(args)
        return x

    def looked_up(x: Any, y: Any) -> tuple[Any, Any]:
        return tf.ensure_shape(tf.py_function(look_up, [x], tf.int64), [None]), y

    with ctx.strategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
    model.fit(ctx.dataset(32, x="id", y="y").map(looked_up), verbose=0)


def before_fit(args: dict[str, Any], ctx: Any) -> None:
    """The second worker waits for a server before it makes its model, for which the first one needs it."""
    if ctx.task_index == 1:
        download(args)
    main(args, ctx)


def loads_slowly(args: dict[str, Any], ctx: Any) -> None:
    """Train with Keras' fit, after the second worker has waited for many small packets."""
    if ctx.task_index == 1:
        with socket.create_connection(tuple(args["server"])) as connection:
            while connection.recv(1 << 16):
                pass
    main({"how": ""}, ctx)


ELSEWHERE = {one.__name__: one for one in (while_validating, in_input_pipeline, before_fit)}


def own_loop(args: dict[str, Any], ctx: Any) -> None:
    """Train in a custom loop; the first worker does one more collective, or the second one skips a step."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def step(number: Any) -> Any:
        def on_replica(own: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(own))

        return strategy.experimental_local_results(strategy.run(on_replica, (number,)))[0]

    for number, batch in enumerate(ctx.dataset(32)):
        if number == 5 and ctx.task_index == 0 and args["how"] == "one_more":
            tf.function(step.python_function)(tf.reduce_sum(batch["id"]))
        if number != 5 or ctx.task_index == 0 or args["how"] != "leave_out":
            step(tf.reduce_sum(batch["id"]))
        ctx.report(epoch=1, step=number + 1)


def leaves_too_soon(args: dict[str, Any], ctx: Any) -> Any:
    """Train with Keras' fit; then the first worker does something that needs the second one."""
    import keras
    import numpy as np
    import tensorflow as tf

    first = ctx.task_index == 0
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
    rows = np.ones((64, 1), "float32")
    if args["how"] == "epochs":
        return model.fit(rows, rows, epochs=3 if first else 2, verbose=0) and None
    if args["how"] == "train_on_batch":
        model.fit(rows, rows, verbose=0)
        return first and model.train_on_batch(rows, rows) and None
    if args["how"] == "build":
        model.fit(rows, rows, verbose=0)
        with model.distribute_strategy.scope():
            return first and keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]) and None
    model.fit(ctx.dataset(32, x="id", y="y"), verbose=0)
    return getattr(model, args["how"])(rows, verbose=0, **args["more"]) if first else None


def evaluates_alone(args: None, ctx: Any) -> None:
    """Train twice; in between, the first worker alone evaluates the model."""
    import keras
    import numpy as np
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
    rows = np.ones((64, 1), "float32")
    model.fit(rows, rows, verbose=0)
    if ctx.task_index == 0:
        model.evaluate(rows, rows, verbose=0)
    model.fit(rows, rows, verbose=0)


def reads_alone(args: dict[str, Any], ctx: Any) -> Any:
    """Train with Keras' fit; then the first worker evaluates its own model, whose data come late."""
    import keras
    import numpy as np
    import tensorflow as tf

    def late() -> Iterator[Any]:
        yield np.ones((4, 1), "float32"), np.ones((4, 1), "float32")
        threading.Event().wait(14)
        yield np.ones((4, 1), "float32"), np.ones((4, 1), "float32")

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
    model.fit(ctx.dataset(32, x="id", y="y"), verbose=0)
    if ctx.task_index == 0:
        signature = (tf.TensorSpec((None, 1)), tf.TensorSpec((None, 1)))
        own = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        own.compile(loss="mse")
        own.evaluate(tf.data.Dataset.from_generator(late, output_signature=signature), verbose=0)


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """A server that accepts connections and never sends anything."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield listener.getsockname()
    listener.close()


LEFT_ALONE = "worker:0 waits in TensorFlow for the other nodes, line .* in own_loop; main of worker:1 has returned"
Hung = Callable[..., "tuple[Cluster, str]"]


@pytest.fixture
def hung(
    spark: SparkSession, tmp_path: Path, server: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> Iterator[Hung]:
    """Return a function that runs a cluster until its hang is reported, and returns the cluster and the report."""
    clusters: list[Cluster] = []
    feeders: list[threading.Thread] = []

    def feed(cluster: Cluster, how: str) -> None:
        rows = spark.range(0, ROWS, 1, 4).selectExpr("id", "double(id) as y")
        with pytest.raises(errors.TfosError):
            cluster.train(rows, epochs=1 + (how in ELSEWHERE), validation=rows if how == "while_validating" else None)
            cluster.wait()

    def run(how: str, workers: int = 2) -> tuple[Cluster, str]:
        args = {"how": how, "server": list(server), "frozen": str(tmp_path / "frozen")}
        program = ELSEWHERE.get(how) or (main if how in WRONG else own_loop)
        cluster = launch(program, args, workers=workers, spark=spark, heartbeat_timeout=60.0)
        clusters.append(cluster)
        feeders.append(threading.Thread(target=feed, args=(cluster, how)))
        feeders[-1].start()

        def told() -> str:
            return next((r.getMessage() for r in caplog.records if ": no step for " in r.getMessage()), "")

        with caplog.at_level(logging.WARNING):
            assert until(lambda: bool(told()), 60)
        return cluster, told()

    yield run
    for cluster in clusters:
        cluster.stop(0.0)
    for feeder in feeders:
        feeder.join(60)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("wait_for_ever", r"worker:1 is behind: it is in your program, line \d+ of test_hangs\.py, in wait_for_ever"),
        pytest.param(
            "deadlock",
            r"worker:1 is behind: it is in your program, line \d+ of test_hangs\.py, in deadlock",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "download",
            r"worker:1 is behind: it waits for an answer from the network, line \d+ of test_hangs\.py, in download",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "write_to_pipe",
            r"worker:1 is behind: it is in your program, line \d+ of test_hangs\.py, in write_to_pipe",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "write_to_slow_disk",
            r"worker:1 is behind: it waits for a disk or a network file system, line \d+ of test_hangs\.py, in write",
            marks=pytest.mark.slow,
        ),
        pytest.param("stop", r"worker:1 is behind: it was stopped by a signal \(SIGSTOP\)", marks=pytest.mark.slow),
        pytest.param("leave_out", LEFT_ALONE, marks=pytest.mark.slow),
        pytest.param("one_more", LEFT_ALONE, marks=pytest.mark.slow),
    ],
)
def test_a_hang_is_explained(hung: Hung, how: str, told: str, tmp_path: Path) -> None:
    with frozen(tmp_path / "frozen") if how == "write_to_slow_disk" else contextlib.nullcontext():
        check_hang(hung, how, told)


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Mount a file system whose writers wait until the block is left, as for a disk that does not answer."""
    image = folder.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(16 << 20)
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        for command, undo in (
            (["mkfs.ext4", "-q", str(image)], ["true"]),
            (["mount", "-o", "loop", str(image), str(folder)], ["umount", "--lazy", str(folder)]),
            (["fsfreeze", "--freeze", str(folder)], ["fsfreeze", "--unfreeze", str(folder)]),
        ):
            try:
                subprocess.run(command, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no file system can be frozen here (root and a loop device are needed): {error}")
            stack.callback(subprocess.run, undo, check=True)
        yield


def check_hang(hung: Hung, how: str, told: str) -> None:
    cluster, said = hung(how)
    assert (3 if how == "stop" else 10) <= float(said.split(" no step for ")[1].split(" s")[0]) <= 15
    assert re.search(told, said), said
    with ThreadPoolExecutor() as pool:  # two at once, as a page and a program may ask
        stacks, again = pool.map(lambda _: cluster.stacks(), range(2))
    assert 'test_hangs.py", line' in stacks["worker:0"].split("\n\n")[0]
    assert 'test_hangs.py", line' in again["worker:0"].split("\n\n")[0]
    nodes = {node.node: node for node in cluster.snapshot().nodes}
    assert "waits in TensorFlow for the other nodes" in cluster.logs("worker:0")
    if how not in WRONG:
        assert nodes["worker:0"].stuck
        assert stacks.keys() == {"worker:0"}
        return
    assert [node.node for node in nodes.values() if node.stuck] == ["worker:1"]
    assert "nothing moves: this node" in cluster.logs("worker:1")
    if how == "stop":
        assert "stopped by a signal" in stacks["worker:1"]
    else:
        assert f"in {how}" in stacks["worker:1"].split("\n\n")[0]


@pytest.mark.parametrize(
    ("how", "workers", "told"),
    [
        (
            "while_validating",
            2,
            r"worker:1 is behind: it is in your program, line \d+ of test_hangs\.py, in wait_for_ever\.",
        ),
        (
            "in_input_pipeline",
            2,
            r"worker:1 is behind: it waits for an answer from the network, line \d+ of \S+, in download, which runs",
        ),
        pytest.param(
            "before_fit",
            2,
            r"worker:1 is behind: it waits for an answer from the network, line \d+ of test_hangs\.py, in download; "
            r"for \d+ s it has been at the same line, and used no CPU\.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "in_input_pipeline",
            1,
            r"worker:0 is behind: it waits for an answer from the network, line \d+ of test_hangs\.py, in download, ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_hang_outside_of_the_training_steps_is_explained(hung: Hung, how: str, workers: int, told: str) -> None:
    cluster, said = hung(how, workers)
    assert how == "before_fit" or pytest.approx(10, abs=6) == float(said.split(" no step for ")[1].split(" s")[0])
    assert re.search(told, said), said
    assert [node.node for node in cluster.snapshot().nodes if node.stuck] == [f"worker:{workers - 1}"]


@pytest.mark.slow
def test_a_slow_download_before_the_first_step_is_no_hang(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            for _ in range(400):
                connection.sendall(b"x" * 500)
                time.sleep(0.05)

    caplog.set_level(logging.WARNING)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        with launch(loads_slowly, {"server": list(listener.getsockname())}, workers=2, spark=spark) as cluster:
            cluster.train(spark.range(0, ROWS, 1, 4).selectExpr("id", "double(id) as y"))
            cluster.wait()
    assert " no step for " not in caplog.text


@pytest.mark.parametrize(
    "how",
    [
        "evaluate",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("epochs", "predict", "train_on_batch", "build")),
    ],
)
def test_a_wait_for_a_worker_whose_main_has_returned_fails_the_cluster(
    spark: SparkSession, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails soon, and is not restarted, because a restart would hang again."""
    args = {"how": how, "more": {"batch_size": 16} if how == "predict" else {"y": np.ones((64, 1), "float32")}}
    caplog.set_level(logging.WARNING)
    with (
        pytest.raises(errors.NodeFailed) as caught,
        launch(leaves_too_soon, args, workers=2, spark=spark, restarts=1) as cluster,
    ):
        if how in ("evaluate", "predict"):
            cluster.train(spark.range(0, ROWS, 1, 4).selectExpr("id", "double(id) as y"))
        cluster.wait()
    (told,) = [record for record in caplog.records if ": no step for " in record.getMessage()]
    assert re.search(r" no step for 1\d s: worker:0 waits in TensorFlow for the other nodes", told.getMessage())
    assert time.time() - told.created < 8
    assert caught.value.node == "worker:0"
    assert caught.value.host
    assert re.search(
        r"waits in TensorFlow for the other nodes, line \d+ of test_hangs\.py, in leaves_too_soon, "
        "and main of worker:1 has returned, so this never ends",
        str(caught.value),
    )
    assert "starts its nodes again" not in caplog.text


def test_workers_that_meet_in_different_calls_fail_with_what_to_do(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    """The program is wrong: no node was lost, so nothing is restarted."""
    caplog.set_level(logging.WARNING)
    with (
        pytest.raises(
            errors.NodeFailed, match="made another call than the others.*evaluate and predict on all"
        ) as caught,
        launch(evaluates_alone, None, workers=2, spark=spark, restarts=1) as cluster,
    ):
        cluster.wait()
    assert "in evaluates_alone\n    model." in caught.value.remote_traceback
    assert re.search("TensorFlow's reason: (Collective instance|Shape mismatch)", str(caught.value))
    assert "starts its nodes again" not in caplog.text


@pytest.mark.slow
def test_a_worker_that_waits_for_its_own_data_does_not_fail(spark: SparkSession) -> None:
    with launch(reads_alone, {}, workers=2, spark=spark) as cluster:
        cluster.train(spark.range(0, ROWS, 1, 4).selectExpr("id", "double(id) as y"))
        cluster.wait()


def lags(args: None, ctx: Any) -> None:
    """Train with Keras' fit; the second worker is slow for 80 steps, then both are equally fast."""
    import keras
    import numpy as np
    import tensorflow as tf

    class Augments(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch >= 80 or ctx.task_index == 1:
                time.sleep(0.15 if batch < 80 else 0.1)

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
    rows = np.ones((180 * 8, 1), "float32")
    model.fit(rows, rows, batch_size=8, verbose=0, callbacks=[Augments()])


def test_a_slow_worker_is_named_with_its_activity_and_the_load_of_its_host(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with launch(lags, None, workers=2, input_mode="tensorflow", spark=spark) as cluster:
        assert until(lambda: any(node.slow for node in cluster.snapshot().nodes), 60)
        (slow,) = [node for node in cluster.snapshot().nodes if node.slow]
        cluster.wait()
    first, last = [
        text for text in (record.getMessage() for record in caplog.records) if re.search(" is (no longer )?slow", text)
    ]
    assert re.search(
        r": worker:1 is slow: its own part of a step is \d+%, that of the others \d+%; it is in your program, "
        r"line \d+ of test_hangs\.py, in on_train_batch_end; its host: CPU \d+ % of \d+, memory pressure \d+ %, "
        r"network ",
        first,
    ), first
    assert last.endswith("worker:1 is no longer slow")
    assert slow.node == "worker:1"
    assert f"worker:1 {slow.detail}" in first
    assert slow.detail in cluster.logs("worker:1")
