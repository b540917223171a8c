"""A client of Spark Connect whose detached clusters lose nodes, and the driver side; ``connect_losses.py URL FOLDER``.

The last line of its output has what it has seen.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession

import tfos_nb
from tfos_nb.errors import PlanError, TfosError

ROWS, EPOCHS, SECONDS = 3000, 4, 120


def fit(args: Any, ctx: Any) -> dict[str, Any]:
    """Train at a rate of zero: each epoch's loss is the mean of the rows' squares, if each row is used once."""
    import keras

    with ctx.strategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.0))
    pause = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: threading.Event().wait(0.02))
    data = ctx.dataset(32, x="id", y="y")
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[pause])
    return {"generation": ctx.generation, "loss": history.history["loss"], "epochs": history.epoch}


def rows(spark: Any) -> Any:
    """Read the rows, in the session of the detached process."""
    return spark.range(0, ROWS, 1, 4).selectExpr("id", "double(id) as y")


def wait_for(what: str, found: Callable[[], Any]) -> Any:
    """Wait until something is found, and return it."""
    deadline = threading.Event()
    for _ in range(SECONDS * 10):
        if value := found():
            return value
        deadline.wait(0.1)
    raise TimeoutError(what)


def page(cluster: Any) -> str:
    """Return the first page of the chief's TensorBoard; nothing if it has not started."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(SECONDS)
    try:
        connection.sock.connect(cluster.tensorboard_socket)
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def is_in(cluster: Any, epoch: int) -> bool:
    """Whether the chief has reached an epoch; raise if the cluster has ended."""
    state = cluster.snapshot()
    if state.status.ended:
        raise TfosError(f"{state.status}: {state.error}")
    return (state.nodes[0].epoch or 0) >= epoch


def executor_of(pid: int) -> int:
    """Return the JVM of a node's executor."""
    name = psutil.Process(pid).parent().name()
    supervisor = int(name.split()[1]) if name.startswith("tfos_nb ") else psutil.Process(pid).ppid()
    return next(one.pid for one in psutil.Process(supervisor).parents() if one.name() == "java")


def main() -> None:
    """Lose a node's process, an executor, and another cluster's driver side."""
    spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
    options: dict[str, Any] = {"workers": 2, "spark": spark, "detach": "executor", "data": rows, "epochs": EPOCHS}
    options |= {"restarts": 3, "model_dir": str(Path(sys.argv[2], "models"))}
    cluster = tfos_nb.launch(fit, name="board", tensorboard=True, **options)
    seen: dict[str, Any] = {"page": "<title>TensorBoard</title>" in wait_for("TensorBoard", lambda: page(cluster))}
    seen["mode"] = stat.S_IMODE(os.stat(cluster.tensorboard_socket).st_mode)
    wait_for("epoch 2", lambda: is_in(cluster, 2))
    os.kill(cluster.snapshot().nodes[1].pid, signal.SIGKILL)
    wait_for("recovery", lambda: cluster.snapshot().generation == 2 and is_in(cluster, 3))
    os.kill(executor_of(cluster.snapshot().nodes[0].pid), signal.SIGKILL)
    cluster.wait(SECONDS)
    seen |= {"board": cluster.result(), "ended": cluster.state.value, "socket": cluster.tensorboard_socket}
    cluster.close()

    cluster = tfos_nb.launch(fit, name="lost", checkpoint_every=0.5, **options)
    wait_for("epoch 2", lambda: is_in(cluster, 2))
    nodes = [psutil.Process(node.pid) for node in cluster.snapshot().nodes]
    place = next(one for one in tfos_nb.clusters() if one.name == "lost")
    os.kill(place.process.pid, signal.SIGKILL)
    wait_for("the loss", lambda: cluster.state.ended)
    seen |= {"state": cluster.state.value, "error": cluster.snapshot().error}
    try:
        tfos_nb.attach("lost")
    except PlanError as error:
        seen["attach"] = str(error)
    gone = psutil.wait_procs(nodes, SECONDS)[0]
    seen |= {"gone": len(gone), "listed": [one.status for one in tfos_nb.clusters()]}
    cluster.close()
    resumed = tfos_nb.launch(fit, name="lost", checkpoint_every=0.5, resume=True, **options)
    resumed.wait(SECONDS)
    seen["resumed"] = resumed.result()
    resumed.close()
    seen["left"] = len(tfos_nb.clusters())
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
