"""Cause random faults in a cluster, again and again: it must still count every row once an epoch.

``make soak MINUTES=30``, or ``python -m tests.soak --minutes 30 --seed 7``: real Spark in separate processes, real
TensorFlow, real signals. It prints each fault and its node, and fails if the count is not exact at the end. With
``--fit``, Keras' ``fit`` continues from state in memory. With ``--min-workers 1``, the others do not wait for a lost
worker. With ``--amid 50``, the state is also saved within the epochs, and with ``--in-memory`` it is in memory alone.
With ``--checkpoint-every 5``, the chief also writes the state of ``fit`` to the disk every five seconds, and at times
all hosts are lost at once. With ``--detach``, the cluster is detached, the session that launched it ends at once, and
each look at it attaches anew.

After some faults it asks for all stacks, which must come at once. A hang that is reported must be that of a process
that a signal has stopped, since nothing else hangs.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyspark
from pyspark.sql import SparkSession

from tests.faults import (
    counting_fit,
    counting_loop,
    its_executor,
    its_host,
    its_supervisor,
    its_warm_process,
    itself,
    itself_for_good,
    sum_of_ids,
)
from tests.local_cluster import builder, environment
from tfos_nb import Cluster, attach, launch
from tfos_nb.detached.attached import AttachedCluster

_ROWS = 20_000
_EPOCHS = 100_000
_FIT_EPOCHS_A_MINUTE = 10
_HEARTBEAT = 5.0
_HARM = (
    ("the process", itself, signal.SIGKILL, 4),
    ("the supervisor", its_supervisor, signal.SIGKILL, 2),
    ("the warm process", its_warm_process, signal.SIGKILL, 1),
    ("the executor", its_executor, signal.SIGKILL, 1),
    ("the host", its_host, signal.SIGKILL, 1),
    ("the process, stopped", itself, signal.SIGSTOP, 1),
    ("the process, stopped for good", itself_for_good, signal.SIGSTOP, 1),
    ("the executor, decommissioned", its_executor, signal.SIGPWR, 1),
)
_ASKED = 0.2  # of the faults: all stacks are asked for after them
_STACKS_WITHIN = 10.0  # seconds
_LEAST_A_MINUTE = 2  # faults
_ALL_AT_ONCE = ("all hosts", its_host, signal.SIGKILL, 3)


@dataclass
class Harm:
    """Causes faults in a cluster for some seconds."""

    find: Callable[[], Cluster | AttachedCluster]
    seconds: float
    pick: random.Random
    all_at_once: bool = False
    done: list[str] = field(default_factory=list)
    error: BaseException | None = None
    slowest: float = 0.0  # seconds until the stacks had come

    def run(self) -> None:
        """Cause a fault every few seconds, until the time is over."""
        until, never = time.monotonic() + self.seconds, threading.Event()
        try:
            while time.monotonic() < until and not self.find().state.ended:
                never.wait(self.pick.uniform(3, 15))
                self._hurt()
        except BaseException as error:
            self.error = error
            raise

    def _hurt(self) -> None:
        cluster = self.find()
        nodes = [node for node in cluster.snapshot().nodes if node.pid and not node.status.ended]
        if not nodes:
            return
        known = (*_HARM, _ALL_AT_ONCE) if self.all_at_once else _HARM
        name, find, how, _ = what = self.pick.choices(known, [weight for *_, weight in known])[0]
        hurt = nodes if what is _ALL_AT_ONCE else [self.pick.choice(nodes)]
        for node in hurt:
            try:
                os.kill(find(node.pid or 0), how)
            except (psutil.Error, ProcessLookupError, StopIteration):
                return  # it has just ended by itself
        snapshot, of = cluster.snapshot(), ", ".join(node.node for node in hurt)
        if self.pick.random() < _ASKED:
            began = time.monotonic()
            cluster.stacks()
            self.slowest = max(self.slowest, time.monotonic() - began)
        self.done.append(name)
        print(f"{time.strftime('%X')} {name} of {of}, generation {snapshot.generation}", flush=True)


class Hangs(logging.Handler):
    """Collects the hangs that clusters of this process report."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a report, and print it."""
        if " no step for " in (said := record.getMessage()):
            self.said.append(said)
            print(said, flush=True)

    @property
    def wrong(self) -> list[str]:
        """Return the reports of something else than a stopped process."""
        return [said for said in self.said if "was stopped by a signal" not in said]

    def read(self, log: Path) -> None:
        """Take the reports from the log of a detached cluster's process."""
        self.said += [line for line in log.read_text(encoding="utf-8").splitlines() if " no step for " in line]


def _session() -> SparkSession:
    os.environ.update(environment(Path(pyspark.__file__).parent))
    session = (
        builder(executors=2, cores=3)
        .config("spark.task.maxFailures", "1000")
        .config("spark.deploy.maxExecutorRetries", "-1")
        .config("spark.decommission.enabled", "true")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    return session


def _rows(spark: SparkSession, fit: bool) -> Any:
    rows = spark.range(0, _ROWS, 1, 8)
    return rows.selectExpr("id", "double(0) as y") if fit else rows


def run(given: argparse.Namespace) -> int:
    """Train, cause faults and check the count; return the exit code."""
    minutes, epochs, fit = given.minutes, given.epochs, given.fit
    pick = random.Random(given.seed)
    if fit:  # fit cannot end by time at the same epoch on all workers
        epochs = min(epochs, round(minutes * _FIT_EPOCHS_A_MINUTE))
    spark = _session()
    hangs = Hangs()
    logging.getLogger("tfos_nb").addHandler(hangs)
    with tempfile.TemporaryDirectory() as folder:
        args: dict[str, Any] = {"epochs": epochs, "pause": 0.0, "until": time.time() + minutes * 60}
        options: dict[str, Any] = {"restarts": 10**6, "heartbeat_timeout": _HEARTBEAT, "model_dir": folder}
        options |= {"min_workers": given.min_workers, "checkpoint_every": given.checkpoint_every}
        if given.amid:
            args["amid"] = given.amid
        args["in_memory"] = given.in_memory
        if given.detach:
            options |= {"detach": True, "data": partial(_rows, fit=fit), "epochs": epochs, "keep": 1}
        cluster: Any = launch(counting_fit if fit else counting_loop, args, workers=2, spark=spark, **options)
        find = partial(attach, cluster.id) if given.detach else lambda: cluster
        harm = Harm(find, minutes * 60, pick, all_at_once=given.checkpoint_every is not None)
        threading.Thread(target=harm.run, daemon=True).start()
        if given.detach:
            spark.stop()
            cluster.wait()
            hangs.read(cluster._place.log)
        else:
            with cluster:
                cluster.train(_rows(spark, fit), epochs=epochs)
        total, generation, passes = cluster.result()
        cluster.close()
        passes = epochs if fit else passes
    spark.stop()
    exact = total == sum_of_ids(passes, _ROWS)
    print(f"{len(harm.done)} times hurt, {generation} generations, {passes} epochs of {_ROWS} rows: ", end="")
    print("every row counted once an epoch" if exact else f"counted {total}, not {sum_of_ids(passes, _ROWS)}")
    print(f"{len(hangs.said)} hangs reported, {len(hangs.wrong)} of them false; stacks within {harm.slowest:.1f} s")
    if harm.error is not None or len(harm.done) < minutes * _LEAST_A_MINUTE or generation < 2:
        print(f"too little was hurt: {harm.error or ', '.join(harm.done) or 'nothing'}")
        return 1
    return 0 if exact and not hangs.wrong and harm.slowest < _STACKS_WITHIN else 1


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="for how long it is hurt (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of what is done to whom (default: 0)")
    parser.add_argument("--epochs", type=int, default=_EPOCHS, help="at most so many (default: enough)")
    parser.add_argument("--fit", action="store_true", help="train by Keras' fit, whose state is in memory alone")
    parser.add_argument("--min-workers", type=int, help="do not wait for a lost worker")
    parser.add_argument("--checkpoint-every", type=float, help="write fit's state so often, and hurt all hosts at once")
    parser.add_argument("--detach", action="store_true", help="hurt a detached cluster, without the session's Spark")
    parser.add_argument("--amid", type=int, help="save after so many batches, too, and not after an epoch alone")
    parser.add_argument("--in-memory", action="store_true", help="keep the state of the loop in memory alone")
    sys.exit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
