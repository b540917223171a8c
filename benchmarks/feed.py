"""Measure the rows a second from a cached DataFrame into TensorFlow tensors, in two workers.

They are compared with two figures. The first is an empty ``mapInArrow`` that only counts, on the same Spark and cached
DataFrame, warmed up and measured alternately. The second is TensorFlowOnSpark 2.2.5 with two workers and the same rows.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from benchmarks import lineage_venv, programs
from benchmarks.cluster_runs import count_through_cluster, span_rate
from benchmarks.data import PARTITIONS, SCALARS, SHAPES, VECTORS, Shape, cached_frame, cached_on_disk
from benchmarks.session import spark_session
from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from benchmarks.settings import Settings

__all__ = ["ceiling_rate", "run"]

# Targets against the empty mapInArrow, and against TensorFlowOnSpark.
TARGETS = {VECTORS.name: (0.8, 25.0), SCALARS.name: (0.6, 150.0)}
_READ_AGAIN = 3  # times the cached rows are read in one run: a shorter run would also measure its start


def run(settings: Settings) -> Result:
    """Measure both shapes; TensorFlowOnSpark comes last, when this Spark has ended."""
    figures: dict[str, Any] = {}
    with spark_session() as spark:
        for shape in SHAPES:
            figures[shape.name] = _measure(spark, shape, settings)
    if not settings.without_lineage:
        for shape in SHAPES:
            rows = min(settings.lineage_rows or shape.lineage_rows, figures[shape.name]["rows"])
            settings.say(f"feed: {rows:,} rows of {shape.describes} through TensorFlowOnSpark, {settings.repeat} times")
            found = lineage_venv.measure(shape.name, rows, settings.lineage_partitions, settings.repeat)
            figures[shape.name]["lineage"] = found
    ratios = [ratio for shape in SHAPES for ratio in _ratios(shape, figures[shape.name])]
    return Result("feed", tuple(ratios), figures, _notes(figures))


def ceiling_rate(frame: DataFrame, rows: int) -> float:
    """Return the rows a second of a whole job that only counts them, in Python, from Arrow batches.

    The job gets new Python processes: processes that have fed rows keep their memory, and the job is faster in them.
    """
    environment = frame.sparkSession.sparkContext.environment
    environment["TFOS_NB_BENCHMARK"] = "ceiling"
    try:
        started = time.perf_counter()
        counted = frame.mapInArrow(programs.count_batches, "rows long").groupBy().sum("rows").first()
        seconds = time.perf_counter() - started
    finally:
        del environment["TFOS_NB_BENCHMARK"]
    if counted is None or counted[0] != rows:
        raise RuntimeError(f"mapInArrow counted {counted}, not {rows} rows")
    return rows / seconds


def _measure(spark: Any, shape: Shape, settings: Settings) -> dict[str, Any]:
    cached_rows = settings.rows or shape.rows
    settings.say(f"feed: {cached_rows:,} rows of {shape.describes}: filling Spark's cache")
    cached = cached_frame(spark, shape, cached_rows)
    on_disk = cached_on_disk(spark)
    frame, rows = functools.reduce(DataFrame.union, [cached] * _READ_AGAIN), cached_rows * _READ_AGAIN
    # The JVM compiles code that runs often, so both are warmed up before they are measured.
    ceiling_rate(frame, rows)
    if not settings.only_baselines:
        count_through_cluster(spark, frame)
    found: dict[str, Any] = {"rows": rows, "cached_on_disk_bytes": on_disk, "ceiling": [], "wall": [], "steady": []}
    for number in range(settings.repeat):
        found["ceiling"].append(ceiling_rate(frame, rows))
        settings.say(
            f"feed: {shape.name} {number + 1}/{settings.repeat}: empty mapInArrow {found['ceiling'][-1]:,.0f}/s"
        )
        if settings.only_baselines:
            continue
        passes = count_through_cluster(spark, frame)
        if passes.rows(0) != rows:
            raise RuntimeError(f"the nodes took {passes.rows(0)} rows of {rows}")
        found["wall"].append(rows / passes.train_seconds)
        found["steady"].append(span_rate(passes.of(0)))
        settings.say(f"feed: {shape.name} {number + 1}/{settings.repeat}: nodes {found['steady'][-1]:,.0f}/s")
    cached.unpersist(blocking=True)
    return found


def _ratios(shape: Shape, found: dict[str, Any]) -> list[Ratio]:
    of_ceiling, of_lineage = TARGETS[shape.name]
    ceiling = median(found["ceiling"])
    ratios = []
    for kind, text in (("steady", "first to last row"), ("wall", "whole train()")):
        if not found[kind]:
            continue
        ours = median(found[kind])
        name = f"{shape.describes}, {text}"
        ratios.append(Ratio(f"{name} / empty mapInArrow", ours, ceiling, "rows/s", of_ceiling))
        if "lineage" in found:
            lineage = median(found["lineage"][kind])
            ratios.append(Ratio(f"{name} / TensorFlowOnSpark", ours, lineage, "rows/s", of_lineage))
    if "lineage" in found:
        # For information: the most that any feed from this Spark can be faster than TensorFlowOnSpark on this machine.
        lineage = median(found["lineage"]["wall"])
        ratios.append(Ratio(f"{shape.describes}, empty mapInArrow / TensorFlowOnSpark", ceiling, lineage, "rows/s"))
    return ratios


def _notes(figures: dict[str, Any]) -> tuple[str, ...]:
    notes = ["pseudo-random rows; the empty mapInArrow is timed as a whole job with all of Spark's slots."]
    for name, found in figures.items():
        if found["cached_on_disk_bytes"]:
            notes.append(f"{name}: {found['cached_on_disk_bytes']:,} bytes did not fit in the cache: use fewer --rows.")
        if "lineage" in found:
            fed, partitions = found["lineage"]["rows"], found["lineage"]["partitions"]
            text = f"{name}: TensorFlowOnSpark took {fed:,} rows in {partitions} partitions a run"
            cached_rows = found["rows"] // _READ_AGAIN
            notes.append(
                f"{text}, the others {cached_rows:,} in {PARTITIONS}, read {_READ_AGAIN} times; rates are compared."
            )
    return tuple(notes)
