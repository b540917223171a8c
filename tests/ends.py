"""End clusters in every way, a hundred times: nothing of a cluster may be left on the machine.

``make ends COUNT=100``, or ``python -m tests.ends --count 100 --seed 7``: each time a separate program starts
Spark with executors in separate processes, a cluster with TensorBoard, and training from a feed that is kept on disk.
It is ended in one of the ways below, at a random moment: at most 1.5 times as late as the first step, so often before
everything is up. After the heartbeat timeout and a few more seconds, no process of tfos_nb, TensorFlow or TensorBoard
may be left, and none of their files. The one exception is the directory of the driver's end of the tunnel, if the
driver had no chance to remove it: its next cluster removes it.
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
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark

from tests.local_cluster import environment
from tests.waiting import until

_HEARTBEAT = 5.0
_AFTER = 10.0  # seconds after the timeout: on two busy cores, a process takes some to end
_EARLIEST = 2.0  # seconds after the program's start
_LATEST = 1.5  # times the seconds to its first step
_SLOWEST = 180.0  # most seconds to the first step
_MARK = "TFOS_NB_ENDS"

PROGRAM = """
import os, signal, threading
from tests.local_cluster import builder
from tfos_nb import launch

def main(args, ctx):
    import os, threading
    import tensorflow as tf
    with tf.summary.create_file_writer(ctx.log_dir).as_default():
        tf.summary.scalar("one", 1.0, 0)
    for epoch in range(10_000):
        for number, batch in enumerate(ctx.dataset(64)):
            open(os.path.join(os.environ["TFOS_NB_ENDS"], "trains"), "w").close()
            threading.Event().wait(0.01)
            ctx.report(epoch=epoch, step=number)

has_spark, has_cluster = threading.Event(), threading.Event()

def close():
    has_cluster.wait()
    cluster.close()

def stop_spark():
    has_spark.wait()
    spark.stop()

def leave():
    os._exit(1)

signal.signal(signal.SIGUSR1, lambda number, frame: threading.Thread(target={by_itself}).start())
spark = builder(executors=2, cores=2).getOrCreate()
has_spark.set()
spark.sparkContext.setLogLevel("OFF")
cluster = launch(main, workers=2, spark=spark, tensorboard=True, heartbeat_timeout={heartbeat}, restarts=1,
                 wait_until_up=False, log_dir=os.path.join(os.environ["TMPDIR"], "logs"))
has_cluster.set()
cluster.train(spark.range(0, 20_000, 1, 4), epochs=10_000)
"""


@dataclass(frozen=True)
class End:
    """A way to end a program: a signal, whether Spark's JVM is killed too, and what the program does at SIGUSR1."""

    signal: signal.Signals | None = signal.SIGUSR1
    spark_too: bool = False
    by_itself: str = "close"

    @property
    def abrupt(self) -> bool:
        """Whether the program has no chance to remove its own files."""
        return self.signal in (signal.SIGKILL, signal.SIGTERM) or self.by_itself == "leave"


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
    """Start a program and end it after some seconds; return what of it was up by then, and what is left."""
    with _started(end) as (program, folder):
        try:
            program.wait(after)
            there = 0
        except subprocess.TimeoutExpired:
            there = len(_left(folder))
            _bring(end, program, folder)
        until(lambda: not _left(folder, end.abrupt), _HEARTBEAT + _AFTER, every=0.25)
        return there, _left(folder, end.abrupt)


def seconds_to_life() -> float:
    """Return the seconds from a program's start to its first step on this machine."""
    with _started(End()) as (program, folder):
        start = time.monotonic()
        lives = until(lambda: os.path.exists(f"{folder}/trains") or program.poll() is not None, _SLOWEST, every=0.1)
        if not lives or program.poll() is not None:
            sys.exit("ends: the program does not come to train")
        return time.monotonic() - start


@contextlib.contextmanager
def _started(end: End) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a program in a new directory; end the program and remove the directory after the block."""
    with tempfile.TemporaryDirectory(prefix="ends-", ignore_cleanup_errors=True) as folder:
        marked = {_MARK: folder, "TMPDIR": folder, "SPARK_LOCAL_DIRS": folder}
        variables = {**os.environ, **environment(Path(pyspark.__file__).parent), **marked}
        text = PROGRAM.format(by_itself=end.by_itself, heartbeat=_HEARTBEAT)
        program = subprocess.Popen(
            [sys.executable, "-c", text], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield program, folder
        finally:
            program.kill()  # some programs continue after their cluster was closed
            program.wait()
            for process, _ in _marked(folder):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _bring(end: End, program: subprocess.Popen[bytes], folder: str) -> None:
    for process, words in _marked(folder):
        if end.spark_too and "org.apache.spark.deploy.SparkSubmit" in words:
            process.kill()
    if end.signal is not None:
        program.send_signal(end.signal)


def _left(folder: str, without_tunnel: bool = False) -> list[str]:
    """Return what is left of the cluster: processes except the program and Spark's, and files except logs."""
    without = ("tfos_nb-tunnel-",) if without_tunnel else ()
    modules = [(process, words[2]) for process, words in _marked(folder) if words[1:2] == ["-m"]]
    ours = [f"{process.pid} {module}" for process, module in modules if module.startswith("tfos_nb.")]
    files = [
        os.path.join(parent, name)
        for parent, folders, names in os.walk(folder)  # it skips files that vanish meanwhile
        for name in [*folders, *names]
        if name.startswith("tfos_nb") and not name.endswith(".log") and not name.startswith(without)
    ]
    return ours + files


def _marked(folder: str) -> list[tuple[psutil.Process, list[str]]]:
    """Return all processes that the program has started, whatever their parent is now, with their command lines."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # the process has ended or belongs to another user
            if process.environ().get(_MARK) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, process.cmdline()))
    return found


def run(count: int, seed: int, at_once: int) -> int:
    """End this number of programs, some at the same time; return the exit code."""
    pick, kinds, left_over, in_life = random.Random(seed), Counter[str](), 0, 0
    with ThreadPoolExecutor(at_once) as pool:
        life = max(pool.map(lambda _: seconds_to_life(), range(at_once)))
        print(f"it trains {life:.1f} s after its start", flush=True)
        drawn = [(pick.choice(list(ENDS)), pick.uniform(_EARLIEST, _LATEST * life)) for _ in range(count)]
        ended = pool.map(lambda one: end_once(ENDS[one[0]], one[1]), drawn)
        for number, ((way, after), (there, left)) in enumerate(zip(drawn, ended, strict=True), 1):
            kinds[way] += 1
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
    parser.add_argument("--at-once", type=int, default=1, help="how many beside each other (default: 1)")
    given = parser.parse_args()
    sys.exit(run(given.count, given.seed, given.at_once))


if __name__ == "__main__":
    main()
