"""Ends of every kind, a hundred times: nothing of a cluster may be left on the machine.

``make ends COUNT=100``, or ``python -m tests.ends --count 100 --seed 7``: each time a program of its own starts Spark
with executors in separate processes, a cluster with TensorBoard, and training from a feed that is kept on disk. At a
random moment, often before all of that has come up, it is ended in one of the ways below. The heartbeat limit and a few
seconds later there must be no process of tfos_nb's, no TensorFlow, no TensorBoard, and no file of theirs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pyspark

from tests.local_cluster import environment

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


def _kill_the_driver(program: subprocess.Popen[bytes]) -> None:
    program.kill()


def _kill_spark(program: subprocess.Popen[bytes]) -> None:
    for process in _javas(program):
        if "SparkSubmit" in " ".join(process.cmdline()):
            process.kill()


def _kill_the_host(program: subprocess.Popen[bytes]) -> None:
    """All of the driver's side at once, as if its host were gone."""
    _kill_spark(program)
    program.kill()


def _terminate(program: subprocess.Popen[bytes]) -> None:
    program.terminate()


def _interrupt(program: subprocess.Popen[bytes]) -> None:
    program.send_signal(signal.SIGINT)


def _ask(program: subprocess.Popen[bytes]) -> None:
    program.send_signal(signal.SIGUSR1)


def _javas(program: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(program.pid).children(recursive=True)
    return [child for child in children if child.name() == "java"]


WAYS: dict[str, tuple[Callable[[subprocess.Popen[bytes]], None], str]] = {
    "the driver is killed": (_kill_the_driver, "close"),
    "Spark's JVM is killed": (_kill_spark, "close"),
    "the driver's host is gone": (_kill_the_host, "close"),
    "the driver is terminated": (_terminate, "close"),
    "it is interrupted": (_interrupt, "close"),
    "it is closed": (_ask, "close"),
    "Spark is stopped": (_ask, "stop_spark"),
    "the program exits": (_ask, "leave"),
}


def end_once(way: str, after: float) -> tuple[int, list[str]]:
    """Start a program and end it so after some seconds; return how much of it there was then, and what is left."""
    end, by_itself = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="ends-", ignore_cleanup_errors=True) as folder:
        marked = {_MARK: folder, "TMPDIR": folder, "SPARK_LOCAL_DIRS": folder}
        variables = {**os.environ, **environment(Path(pyspark.__file__).parent), **marked}
        text = PROGRAM.format(by_itself=by_itself, heartbeat=_HEARTBEAT)
        program = subprocess.Popen(
            [sys.executable, "-c", text], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            program.wait(after)
            there = 0
        except subprocess.TimeoutExpired:
            there = len(_left(folder))
            end(program)
        left = _left_after(folder, _HEARTBEAT + _AFTER)
        if program.poll() is None:
            program.kill()  # it is a program that goes on when its cluster has been closed
            program.wait()
        for process in _marked(folder):
            process.kill()
        return there, left


def _left_after(folder: str, seconds: float) -> list[str]:
    """Wait until nothing is left, and return what still is after so many seconds."""
    until, never = time.monotonic() + seconds, threading.Event()
    while (left := _left(folder)) and time.monotonic() < until:
        never.wait(0.25)
    return left


def _left(folder: str) -> list[str]:
    processes = [f"{one.pid} {' '.join(one.cmdline()[1:4])}" for one in _marked(folder) if _is_ours(one)]
    files = [str(path) for path in Path(folder).rglob("tfos_nb*") if path.suffix != ".log"]
    return [*processes, *files]


def _marked(folder: str) -> list[psutil.Process]:
    """Return all processes that the program has started, whoever is their parent by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _is_ours(process: psutil.Process) -> bool:
    """Whether it is a node's, and not the program itself, nor Spark's own."""
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "tfos_nb.runtime" in words or "tensorboard" in words


def run(count: int, seed: int) -> int:
    """End so many; return the exit code."""
    pick, kinds, left_over, in_life = random.Random(seed), Counter[str](), 0, 0
    for number in range(1, count + 1):
        way, after = pick.choice(list(WAYS)), pick.uniform(2.0, _LATEST)
        kinds[way] += 1
        there, left = end_once(way, after)
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
