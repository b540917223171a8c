"""Compare docs/scaling.md's model of a synchronous step with 1, 2 and 4 workers on this machine's cores.

The workers are TensorFlow processes with one thread each, which train nothing: each computes the gradients of a dense
network, and all add them up by TensorFlow's ring. The time of a ring is fitted to two workers and two sizes. Steps of
two workers, and all times of four workers, are then predicted. All workers share the cores and the loopback, and the
prediction takes this into account: it does not measure a network.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from benchmarks.session import ROOT
from benchmarks.table import Ratio, Result

if TYPE_CHECKING:
    from benchmarks.settings import Settings

__all__ = ["predict_ring", "run"]

WORKERS = (1, 2, 4)
SMALL, LARGE = 4 << 10, 32 << 20  # bytes that the ring adds up
WIDTH, BATCH = 1024, 256
TIMES = 30
_SECONDS = 300.0


def run(settings: Settings) -> Result:
    """Measure each number of workers, `settings.repeat` times, in turns."""
    rounds: dict[int, list[dict[str, float]]] = {workers: [] for workers in WORKERS}
    for number in range(settings.repeat):
        for workers in WORKERS:
            rounds[workers].append(_measure(workers))
            settings.say(f"scaling: {workers} workers {number + 1}/{settings.repeat}: {rounds[workers][-1]}")
    found = {
        workers: {what: statistics.median(one[what] for one in taken) for what in taken[0]}
        for workers, taken in rounds.items()
    }
    compute = found[1]["compute"]
    latency, bandwidth = _fit(found[2])
    ratios = []
    for workers in WORKERS[1:]:
        shared = max(1.0, workers / min(os.cpu_count() or 1, 2))
        ring = predict_ring(workers, found[1]["bytes"], latency * shared, bandwidth / shared)
        measured = found[workers]
        ratios += [
            Ratio(f"{workers} workers, compute / predicted", measured["compute"], compute * shared, "s"),
            Ratio(f"{workers} workers, a step / predicted", measured["step"], compute * shared + ring, "s"),
        ]
    four = predict_ring(4, LARGE, 2 * latency, bandwidth / 2)
    ratios.append(Ratio("4 workers, a ring of 32 MiB / predicted", found[4]["large"], four, "s"))
    figures = {"rounds": rounds, "medians": found, "latency": latency, "bandwidth": bandwidth}
    return Result("scaling", tuple(ratios), figures, ("all workers on two cores: no network is measured",))


def predict_ring(workers: int, size: float, latency: float, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce: 2(N-1) turns, each of which sends 1/N of the bytes to the next worker.

    Examples
    --------
    >>> predict_ring(1, 1e6, 1e-4, 1e9), predict_ring(2, 1e6, 0.0, 1e9), predict_ring(4, 1e6, 0.0, 1e9)
    (0.0, 0.001, 0.0015)
    """
    return 2 * (workers - 1) * (latency + size / workers / bandwidth)


def _fit(two: dict[str, float]) -> tuple[float, float]:
    """Return the latency and the bandwidth of a turn, from two sizes with two workers."""
    bandwidth = (LARGE - SMALL) / (two["large"] - two["small"])
    return max(0.0, (two["small"] - SMALL / bandwidth) / 2), bandwidth


def _measure(workers: int) -> dict[str, float]:
    from benchmarks.steps import free_ports

    cores = sorted(os.sched_getaffinity(0))[:2]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
    with ExitStack() as started:
        processes = []
        for index in range(workers):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            processes.append(_start(started, config, cores[index % len(cores)]))
        told, _ = processes[0].communicate(timeout=_SECONDS)
        if processes[0].returncode:
            raise RuntimeError(f"the first of {workers} workers ended with code {processes[0].returncode}")
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    return found


def _start(started: ExitStack, config: dict[str, Any], core: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TF_CONFIG": json.dumps(config),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "benchmarks.scaling", str(core)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    started.callback(process.wait)
    started.callback(process.kill)
    return process


def _worker(core: int) -> dict[str, float]:
    """Run one of the workers, on one core."""
    os.sched_setaffinity(0, {core})
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    layers = [tf.random.normal((rows, columns)) for rows, columns in ((784, WIDTH), (WIDTH, WIDTH), (WIDTH, 10))]
    rows = tf.random.normal((BATCH, 784))

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(layers)
            values = rows
            for layer in layers:
                values = tf.nn.relu(values @ layer)
            loss = tf.reduce_mean(values**2)
        return tf.concat([tf.reshape(one, [-1]) for one in tape.gradient(loss, layers)], 0)

    def add_up(values: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(values))

    compute = tf.function(lambda: strategy.run(lambda: tf.reduce_sum(gradients())))
    step = tf.function(lambda: strategy.run(lambda: tf.reduce_sum(add_up(gradients()))))
    sizes = {"small": tf.ones(SMALL // 4), "large": tf.ones(LARGE // 4)}
    rings = {
        name: tf.function(lambda values=values: strategy.run(lambda: tf.reduce_sum(add_up(values))))
        for name, values in sizes.items()
    }
    found = {"bytes": 4.0 * sum(layer.shape.num_elements() for layer in layers), "step": _seconds(step)}
    found |= {name: _seconds(one) for name, one in rings.items()}
    return {**found, "compute": _seconds(compute)}


def _seconds(function: Any) -> float:
    """Return the median time of a call; all workers make the same number of calls, or the ring would hang."""
    taken = []
    for _ in range(3 + TIMES):
        began = time.perf_counter()
        float(function())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[3:])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_worker(int(sys.argv[1]))) + "\n")
