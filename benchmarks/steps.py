"""Compare the steps a second of distributed training with the same program started by hand, by TF_CONFIG and no Spark.

Synchronous: tf_keras' ``fit`` on two workers under MultiWorkerMirroredStrategy (Keras 3's own ``fit`` does not run on
several machines by hand). Asynchronous: a coordinator, two workers and a parameter server. The runs are interleaved;
TensorFlow's start and the first steps are not timed. Ours reports its steps to the driver, as always.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from benchmarks import step_programs
from benchmarks.session import ROOT, spark_session
from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from benchmarks.settings import Settings

__all__ = ["free_ports", "run"]

TARGET = 0.95
WORKERS = 2
_SECONDS = 300.0
_ARGUMENTS = {
    "sync": {"width": 256, "batch_size": 128, "steps": 400},
    "async": {"width": 256, "batch_size": 128, "steps": 1000},
}
_ROLES = {"sync": {"worker": WORKERS}, "async": {"chief": 1, "worker": WORKERS, "ps": 1}}
_MAINS = {"sync": step_programs.sync_in_cluster, "async": step_programs.async_in_cluster}


def run(settings: Settings) -> Result:
    """Measure our clusters and processes started by hand, in turns."""
    figures: dict[str, dict[str, list[float]]] = {kind: {"ours": [], "by hand": []} for kind in _ROLES}
    with spark_session() as spark:
        for number in range(settings.repeat):
            for kind, found in figures.items():
                found["by hand"].append(_by_hand(kind))
                found["ours"].append(_in_cluster(spark, kind))
                newest = ", ".join(f"{name} {values[-1]:.0f} steps/s" for name, values in found.items())
                settings.say(f"steps: {kind} {number + 1}/{settings.repeat}: {newest}")
    ratios = tuple(
        Ratio(
            f"{kind}hronous training / the same program by hand",
            median(found["ours"]),
            median(found["by hand"]),
            "steps/s",
            TARGET,
        )
        for kind, found in figures.items()
    )
    return Result("steps", ratios, dict(figures))


def _in_cluster(spark: SparkSession, kind: str) -> float:
    from tfos_nb import launch

    roles = _ROLES[kind]
    cluster = launch(
        _MAINS[kind],
        _ARGUMENTS[kind],
        spark=spark,
        workers=roles["worker"],
        ps=roles.get("ps", 0),
        input_mode="tensorflow",
        name=f"steps-{kind}",
    )
    cluster.wait(timeout=_SECONDS)
    return float(cluster.result())


def _by_hand(kind: str) -> float:
    """Start the processes; return the rate that the first process of the first role prints."""
    cluster = {role: [f"127.0.0.1:{port}" for port in free_ports(count)] for role, count in _ROLES[kind].items()}
    with ExitStack() as started:
        processes = [
            _start(started, kind, {"cluster": cluster, "task": {"type": role, "index": index}})
            for role, addresses in cluster.items()
            for index in range(len(addresses))
        ]
        told, _ = processes[0].communicate(timeout=_SECONDS)
    return float(json.loads(told.splitlines()[-1]))


def _start(started: ExitStack, kind: str, config: dict[str, Any]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TF_CONFIG": json.dumps(config),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "benchmarks.step_programs", kind, json.dumps(_ARGUMENTS[kind])]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    started.callback(process.wait)
    started.callback(process.kill)
    return process


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens now; without a cluster there is no better way."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
