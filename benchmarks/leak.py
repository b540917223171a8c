"""Run many clusters in one kernel, and count what they leave behind in its process, on its host and on disk."""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import programs
from benchmarks.cluster_runs import BATCH_SIZE, WORKERS
from benchmarks.data import VECTORS
from benchmarks.session import executors_folder, spark_session
from benchmarks.table import Ratio, Result

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from benchmarks.settings import Settings

__all__ = ["run"]

WARM_UP = 2
MEMORY_MIB = 50.0
TRAINS, TRAINED_ROWS = 100, 200_000
_SETTLE_SECONDS = 15.0
# Counts that must not grow. Memory has a separate bound, and Spark decides how many Python workers it keeps. The
# remaining node process is the warm one, from which the next cluster is forked.
_STEADY = ("node_processes", "zombies", "threads", "descriptors", "sockets", "files")


def run(settings: Settings) -> Result:
    """Count, launch and close `settings.launches` clusters, count again."""
    with _own_folders() as folder, spark_session(memory_mb=1024, settings=_local_dirs(folder)) as spark:
        frame = spark.range(0, 64, 1, 4).selectExpr(*VECTORS.columns)
        watched = (folder, executors_folder(spark))
        for _ in range(WARM_UP):
            _one_cluster(spark, frame)
        before = _census(watched)
        settings.say(f"leak: before: {before}")
        series = []
        for number in range(settings.launches):
            _one_cluster(spark, frame)
            series.append(_census(watched, settle_to=before))
            settings.say(f"leak: {number + 1}/{settings.launches}: {series[-1]}")
        began = _census(watched)
        _many_trains(spark, spark.range(0, TRAINED_ROWS, 1, 64))
        trained = _census(watched, settle_to=before)
        settings.say(f"leak: after {TRAINS} calls of train in one cluster: {trained}")
    after = series[-1]
    what = f"after {settings.launches} clusters / before"
    ratios = [Ratio(f"{name} {what}", after[name], before[name], "", 1.0, at_most=True) for name in _STEADY]
    grown = after["rss_mib"] - before["rss_mib"]
    ratios.append(Ratio(f"spark_processes {what}", after["spark_processes"], before["spark_processes"], ""))
    ratios.append(Ratio("memory grown in the driver / allowed", grown, MEMORY_MIB, "MiB", 1.0, at_most=True))
    grown = after["warm_mib"] - before["warm_mib"]
    ratios.append(Ratio("memory grown in the warm process / allowed", grown, MEMORY_MIB, "MiB", 1.0, at_most=True))
    grown = trained["rss_mib"] - began["rss_mib"]
    what = f"memory grown in the driver over {TRAINS} calls of train / allowed"
    ratios.append(Ratio(what, grown, MEMORY_MIB, "MiB", 1.0, at_most=True))
    return Result("leak", tuple(ratios), {"before": before, "series": series, "trained": trained})


def _many_trains(spark: SparkSession, frame: DataFrame) -> None:
    from tfos_nb import launch

    args: dict[str, Any] = {"passes": TRAINS, "batch_size": BATCH_SIZE}
    with launch(programs.count_rows, args, spark=spark, workers=WORKERS, restarts=1, name="leak") as cluster:
        for _ in range(TRAINS):
            cluster.train(frame)


def _one_cluster(spark: SparkSession, frame: DataFrame) -> None:
    from tfos_nb import launch

    args: dict[str, Any] = {"passes": 1, "batch_size": BATCH_SIZE}
    with launch(programs.count_rows, args, spark=spark, workers=WORKERS, name="leak") as cluster:
        cluster.train(frame)
        cluster.wait()


def _census(folders: tuple[Path, ...], settle_to: dict[str, float] | None = None) -> dict[str, float]:
    """Count what this process and its surroundings hold, after a while in which things may end."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    pause = threading.Event()
    while True:
        counted = _count(folders)
        settled = settle_to is None or all(counted[name] <= settle_to[name] for name in _STEADY)
        if settled or time.monotonic() > deadline:
            return counted
        pause.wait(0.2)


def _count(folders: tuple[Path, ...]) -> dict[str, float]:
    import psutil

    gc.collect()
    this = psutil.Process()
    processes = [process for process in psutil.process_iter() if _is_of(process, folders[0])]
    from_spark = [process for process in processes if "pyspark" in _command(process) or "java" in _command(process)]
    ours = [process for process in processes if process not in from_spark]
    return {
        "node_processes": len(ours),
        "spark_processes": len(from_spark),
        "zombies": sum(map(_is_zombie_of, psutil.process_iter(), itertools.repeat({this.pid, *map(_pid, ours)}))),
        "warm_mib": round(sum(map(_mib, ours)), 1),
        "threads": this.num_threads(),
        "descriptors": this.num_fds(),
        "sockets": len(this.net_connections(kind="all")),
        "files": sum(_entries(folder) for folder in folders),
        "rss_mib": round(_mib(this), 1),
    }


def _pid(process: Any) -> int:
    return int(process.pid)


def _mib(process: Any) -> float:
    """Return the memory of a process; 0 if it has just ended."""
    import psutil

    try:
        return float(process.memory_info().rss) / 2**20
    except psutil.Error:
        return 0.0


def _is_zombie_of(process: Any, parents: set[int]) -> bool:
    """Whether a process has ended and one of these processes has not waited for it."""
    import psutil

    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE and process.ppid() in parents)
    except psutil.Error:
        return False


def _is_of(process: Any, folder: Path) -> bool:
    """Whether a process descends from this benchmark's Spark: by its environment, which an orphan keeps."""
    import psutil

    try:
        return bool(process.environ().get("TMPDIR") == str(folder) and process.pid != os.getpid())
    except psutil.Error:
        return False


def _command(process: Any) -> str:
    import psutil

    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(ended)"


def _entries(folder: Path) -> int:
    """Return the files under `folder`, without those that Spark keeps for itself."""
    count = 0
    for _, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(("blockmgr-", "spark-"))]
        count += len(files)
    return count


def _local_dirs(folder: Path) -> dict[str, str]:
    local = folder / "spark"
    local.mkdir()
    return {"spark.local.dir": str(local), "spark.executorEnv.TMPDIR": str(folder)}


@contextmanager
def _own_folders() -> Iterator[Path]:
    """Put all temporary files of this process and of the executors in a new folder, and remove it at the end."""
    earlier = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="tfos-leak-") as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = None
            os.environ.pop("TMPDIR")
            if earlier is not None:
                os.environ["TMPDIR"] = earlier
