"""Compare epochs 2 to n, which are read from the nodes' local disks, with the first, which comes from Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.cluster_runs import Passes, count_through_cluster, span_rate
from benchmarks.data import SHAPES, cached_frame
from benchmarks.session import spark_session
from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from benchmarks.settings import Settings

__all__ = ["run"]

EPOCHS = 4
TARGET = 3.0


def run(settings: Settings) -> Result:
    """Measure both shapes."""
    figures: dict[str, Any] = {}
    ratios = []
    with spark_session() as spark:
        for shape in SHAPES:
            frame = cached_frame(spark, shape, settings.rows or shape.rows)
            found: dict[str, list[float]] = {"first": [], "replayed": []}
            for number in range(settings.repeat):
                passes = count_through_cluster(spark, frame, EPOCHS)
                found["first"].append(span_rate(passes.of(0)))
                found["replayed"].append(median([_replay_rate(passes, epoch) for epoch in range(1, EPOCHS)]))
                settings.say(f"replay: {shape.name} {number + 1}/{settings.repeat}: {found['replayed'][-1]:,.0f}/s")
            frame.unpersist(blocking=True)
            figures[shape.name] = found
            what = f"{shape.describes}, epochs 2..{EPOCHS} / epoch 1"
            ratios.append(Ratio(what, median(found["replayed"]), median(found["first"]), "rows/s", TARGET))
    return Result("replay", tuple(ratios), figures, ("the files are in the page cache, as after any first epoch.",))


def _replay_rate(passes: Passes, epoch: int) -> float:
    """Return the rows a second of a replayed pass, including its start: the sum of each node's rate."""
    if passes.rows(epoch) != passes.rows(0):
        raise RuntimeError(f"epoch {epoch + 1} had {passes.rows(epoch)} rows, the first had {passes.rows(0)}")
    return sum(one["rows"] / (one["last"] - one["begin"]) for one in passes.of(epoch))
