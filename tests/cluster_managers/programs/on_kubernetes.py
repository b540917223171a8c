"""Launch a small cluster in a notebook's pod, and print how it ended. ``on_kubernetes.py PROGRAM [OPTIONS]``.

The options are those of ``launch``, in JSON. ``seconds`` of the outcome is how long the error took after the session
was there.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tfos_nb import launch, spark_session
from tfos_nb.errors import NodeFailed, TfosError
from tfos_nb.magics.diagnosis.preflight import preflight
from tfos_nb.runtime.control.plan import ClusterPlan, InputMode


def count(args: Any, ctx: Any) -> list[Any]:
    """Return what the node sees of its pod."""
    import os
    import shutil

    import tensorflow as tf

    memory = shutil.disk_usage("/dev/shm").total
    return [ctx.task_index, os.getuid(), memory, len(tf.config.list_logical_devices("CPU")), list(ctx.gpus)]


def count_in_a_while(args: Any, ctx: Any) -> list[Any]:
    """Return the same after a time in which the pods can be looked at."""
    import threading

    threading.Event().wait(10.0)
    return count(args, ctx)


def wait(args: Any, ctx: Any) -> int:
    """Report a step every 0.1 s, for a minute at most."""
    import threading

    for step in range(600):
        ctx.report(step=step)
        if ctx.should_stop:
            break
        threading.Event().wait(0.1)
    return int(ctx.task_index)


def serve_and_wait(args: Any, ctx: Any) -> int:
    """Do the same with TensorFlow's server listening."""
    ctx.strategy("sync")
    return wait(args, ctx)


def take_memory(args: Any, ctx: Any) -> None:
    """Take memory without an end on the second node; the first one waits."""
    import os
    import threading

    held = []
    for step in range(600):
        ctx.report(step=step)
        if ctx.task_index == 1:
            held.append(os.urandom(50_000_000))
        threading.Event().wait(0.1)


if __name__ == "__main__":
    program, options = globals()[sys.argv[1]], json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")
    found: dict[str, Any] = {}
    began = time.monotonic()
    try:
        spark = spark_session()
        began = time.monotonic()
        if "gpus" in options:
            found["plan"] = preflight(ClusterPlan(input_mode=InputMode.TENSORFLOW, **options))
        with launch(
            program, spark=spark, **{"workers": 2, "name": "pods", "input_mode": "tensorflow", **options}
        ) as it:
            print("running", flush=True)
            it.wait()
            found["executors"] = {node.node: node.executor for node in it.snapshot().nodes}
        found["results"] = it.results()
    except TfosError as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found["node"] = error.node if isinstance(error, NodeFailed) else ""
    found["seconds"] = time.monotonic() - began
    print(json.dumps({"outcome": found}), flush=True)
