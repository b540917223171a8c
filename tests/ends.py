"""Ends of every kind, a hundred times: nothing of a cluster may be left on the machine.

``make ends COUNT=100``, or ``python -m tests.ends --count 100 --seed 7``: each time a program of its own starts Spark
with executors in separate processes, a cluster with TensorBoard, and training from a feed that is kept on disk. At a
random moment, often before all of that has come up, it is ended in one of the ways below. The heartbeat limit and a few
seconds later there must be no process of tfos_nb's, no TensorFlow, no TensorBoard, and no file of theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark

from tests.local_cluster import environment
from tests.waiting import until

_HEARTBEAT = 5.0
_AFTER = 10.0  # seconds beyond the limit: on two busy cores a process that ends takes some
_LATEST = 22.0  # seconds after the program's start; at about half of them it trains
_MARK = "TFOS_NB_ENDS"

PROGRAM = """
import os, signal, threading
from tests.local_cluster import builder
from tfos_nb import launch

def main(args, ctx):
    import tensorflow as tf
    with tf.summary.create_file_writer(ctx.log_dir).as_default():
        tf.summary.scalar("one", 1.0, 0)
    for epoch in range(10_000):
        for number, batch in enumerate(ctx.dataset(64)):
            threading.Event().wait(0.01)
            ctx.report(epoch=epoch, step=number)

def close():
    cluster.close()

def stop_spark():
    spark.stop()

def leave():
    os._exit(1)

signal.signal(signal.SIGUSR1, lambda number, frame: threading.Thread(target={by_itself}).start())
spark = builder(executors=2, cores=2).getOrCreate()
spark.sparkContext.setLogLevel("OFF")
cluster = launch(main, workers=2, spark=spark, tensorboard=True, heartbeat_timeout={heartbeat}, restarts=1,
                 wait_until_up=False, log_dir=os.path.join(os.environ["TMPDIR"], "logs"))
cluster.train(spark.range(0, 20_000, 1, 4), epochs=10_000)
"""


@dataclass(frozen=True)
class End:
    """How a program is ended: by which signal, whether Spark's JVM is killed too, and what SIGUSR1 has it do itself."""

    signal: signal.Signals | None = signal.SIGUSR1
    spark_too: bool = False
    by_itself: str = "close"


ENDS = {
    "the driver is killed": End(signal.SIGKILL),
    "Spark's JVM is killed": End(None, spark_too=True),
    "the driver's host is gone": End(signal.SIGKILL, spark_too=True),
    "the driver is terminated": End(signal.SIGTERM),
    "it is interrupted": End(signal.SIGINT),
    "it is closed": End(),
    "Spark is stopped": End(by_itself="stop_spark"),
    "the program exits": End(by_itself="leave"),
}


def end_once(end: End, after: float) -> tuple[int, list[str]]:
    """Start a program and end it so after some seconds; return how much of it there was then, and what is left."""
    with tempfile.TemporaryDirectory(prefix="ends-", ignore_cleanup_errors=True) as folder:
        marked = {_MARK: folder, "TMPDIR": folder, "SPARK_LOCAL_DIRS": folder}
        variables = {**os.environ, **environment(Path(pyspark.__file__).parent), **marked}
        text = PROGRAM.format(by_itself=end.by_itself, heartbeat=_HEARTBEAT)
        program = subprocess.Popen(
            [sys.executable, "-c", text], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            program.wait(after)
            there = 0
        except subprocess.TimeoutExpired:
            there = len(_left(folder))
            _bring(end, program, folder)
        until(lambda: not _left(folder), _HEARTBEAT + _AFTER, every=0.25)
        left = _left(folder)
        program.kill()  # it may be one that goes on when its cluster has been closed
        program.wait()
        for process, _ in _marked(folder):
            process.kill()
        return there, left


def _bring(end: End, program: subprocess.Popen[bytes], folder: str) -> None:
    for process, words in _marked(folder):
        if end.spark_too and "org.apache.spark.deploy.SparkSubmit" in words:
            process.kill()
    if end.signal is not None:
        program.send_signal(end.signal)


def _left(folder: str) -> list[str]:
    """Return what there is of the cluster: processes, but not the program nor Spark's own, and files, but no logs."""
    modules = [(process, words[2]) for process, words in _marked(folder) if words[1:2] == ["-m"]]
    ours = [f"{process.pid} {module}" for process, module in modules if module.startswith("tfos_nb.")]
    files = [
        os.path.join(parent, name)
        for parent, folders, names in os.walk(folder)  # which passes over what vanishes meanwhile
        for name in [*folders, *names]
        if name.startswith("tfos_nb") and not name.endswith(".log")
    ]
    return ours + files


def _marked(folder: str) -> list[tuple[psutil.Process, list[str]]]:
    """Return all processes that the program has started, whoever is their parent by now, with their command lines."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(_MARK) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, process.cmdline()))
    return found


def run(count: int, seed: int) -> int:
    """End so many; return the exit code."""
    pick, kinds, left_over, in_life = random.Random(seed), Counter[str](), 0, 0
    for number in range(1, count + 1):
        way, after = pick.choice(list(ENDS)), pick.uniform(2.0, _LATEST)
        kinds[way] += 1
        there, left = end_once(ENDS[way], after)
        left_over += bool(left)
        in_life += there > 0
        said = "".join(f"\n    left: {one}" for one in left)
        print(f"{number}/{count}: {way} after {after:.1f} s, {there} processes and files there{said}", flush=True)
    listed = ", ".join(f"{way} {times}" for way, times in kinds.most_common())
    print(f"{count} ends ({listed}), {in_life} of them with nodes: something was left after {left_over}")
    return int(left_over > 0)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of what ends when (default: 0)")
    given = parser.parse_args()
    sys.exit(run(given.count, given.seed))


if __name__ == "__main__":
    main()
