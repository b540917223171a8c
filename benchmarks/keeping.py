"""Measure what keeping the state of Keras' fit within an epoch costs, and how many steps are done again after a loss.

Two workers train without end. In the first generation, segments whose states are kept alternate with segments without:
the ratio is that of neighbours. Then a worker's process is killed again and again, at random moments.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.recovery import EPOCHS, feed, wait_for
from benchmarks.session import spark_session
from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from benchmarks.settings import Settings

__all__ = ["run", "train"]

_STEPS = 6000  # of an epoch
_BATCH = 32
_KILLS = 3  # a repetition
_COST, _LOST = 0.99, 50


@dataclass(frozen=True)
class _Model:
    """A model: rows and columns of its table of weights, of which a step changes a few, and widths of dense layers.

    ``segment`` is a number of steps, and ``pairs`` that of segments with states in a repetition.
    """

    what: str
    table: tuple[int, int]
    widths: tuple[int, ...]
    segment: int
    pairs: int

    def is_kept(self, step: int) -> bool:
        """Whether states are kept after so many steps."""
        return step < self.warm or step // self.segment % 2 == 0

    @property
    def warm(self) -> int:
        """The number of steps after which it is measured: the interval between states has grown to what it stays at."""
        return 4 * self.segment


_MODELS = (
    _Model("20 kB of weights", (10, 8), (64, 64), 160, 12),
    _Model("64 MB, of which a step changes 8 kB", (250_000, 64), (64, 64), 160, 12),
    _Model("67 MB of weights", (10, 8), (4096, 4096), 40, 4),
)


class _Step(NamedTuple):
    """When a step was done."""

    epoch: int
    batch: int
    time: float


def train(args: dict[str, Any], ctx: Any) -> None:
    """Fit without end; write down each step's end. In the first generation, states are kept in every other segment."""
    import keras

    if ctx.generation == 1:
        _keep_by_turns(args["model"])
    file = open(Path(args["folder"], f"{ctx.node}-{ctx.generation}"), "w", buffering=1)  # noqa: SIM115

    class Tell(keras.callbacks.Callback):
        """Write each step's end."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            file.write(f"{self.epoch} {batch} {time.time()}\n")

    with ctx.strategy().scope():
        dense = [keras.layers.Dense(width, activation="relu") for width in args["model"].widths]
        table = keras.layers.Embedding(*args["model"].table)
        model = keras.Sequential(
            [keras.Input((1,), dtype="int64"), table, keras.layers.Flatten(), *dense, keras.layers.Dense(1)]
        )
        model.compile(loss="mse", optimizer=keras.optimizers.SGD(1e-4))
    model.fit(ctx.dataset(_BATCH, x="id", y="y"), epochs=EPOCHS, verbose=0, callbacks=[Tell()])


def _keep_by_turns(model: _Model) -> None:
    from tfos_nb.runtime.recovery.save_schedule import SaveSchedule

    for name in ("is_due", "is_look_due"):
        is_due = getattr(SaveSchedule, name)
        setattr(SaveSchedule, name, functools.partialmethod(_due_by_turns, is_due, model))


def _due_by_turns(self: Any, is_due: Any, model: _Model, step: int) -> bool:
    return model.is_kept(step) and bool(is_due(self, step))


def run(settings: Settings) -> Result:
    """Measure each model."""
    ratios: list[Ratio] = []
    figures: dict[str, Any] = {}
    for model in _MODELS:
        with spark_session(memory_mb=1024) as spark, tempfile.TemporaryDirectory() as folder:
            steps = _trained(settings, spark, model, folder)
        first = steps[0]
        pairs = _pairs(model, first)
        lost = [
            (before[-1].epoch - after[0].epoch) * _STEPS + before[-1].batch - after[0].batch + 1
            for before, after in itertools.pairwise(steps[1:])  # the first generation had segments without states
        ]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5
        figures[model.what] = {"pairs": pairs, "standard error": error, "lost": lost}
        milliseconds = 1e3 * (first[-1].time - first[model.warm].time) / (len(first) - 1 - model.warm)
        what = f"{model.what}, steps of {milliseconds:.0f} ms"
        settings.say(f"keeping: {what}: {statistics.mean(pairs):.4f} +- {error:.4f}, steps done again: {sorted(lost)}")
        ratios.append(Ratio(f"{what}: steps with states against without", statistics.mean(pairs), 1.0, "", _COST))
        ratios.append(Ratio(f"{what}: steps done again, the median", median(lost), _LOST, "steps", 1.0, at_most=True))
        ratios.append(Ratio(f"{what}: and the most", float(max(lost)), _LOST, "steps", 1.0, at_most=True))
    return Result("keeping", tuple(ratios), figures)


def _pairs(model: _Model, steps: list[_Step]) -> list[float]:
    """Return the speed of each segment with states as a part of that of the segments before and after it."""
    length = model.segment
    ends = range(model.warm + length, len(steps) - 1, length)
    seconds = [steps[end + length - 1].time - steps[end - 1].time for end in ends if end + length <= len(steps)]
    kept = [model.is_kept(end) for end in ends][: len(seconds)]
    inner = range(1, len(seconds) - 1)
    return [(seconds[place - 1] + seconds[place + 1]) / 2 / seconds[place] for place in inner if kept[place]]


def _trained(settings: Settings, spark: SparkSession, model: _Model, folder: str) -> list[list[_Step]]:
    """Train, and lose a worker again and again; return the steps of each generation."""
    from tfos_nb import launch

    args = {"model": model, "folder": folder}
    rows = spark.range(0, _BATCH * _STEPS, 1, 8).selectExpr(f"id % {model.table[0]} as id", "double(0) as y")
    kills, moments = 1 + _KILLS * settings.repeat, random.Random(1)
    cluster = launch(train, args, spark=spark, workers=2, name="keeping", autolog=False, restarts=kills + 3)
    feeding = threading.Thread(target=feed, args=(cluster, rows), daemon=True)
    feeding.start()
    try:
        wait_for(lambda: bool(_steps(folder, 1)))
        wanted = model.warm + model.segment * (2 * model.pairs * settings.repeat + 2)
        while len(_steps(folder, 1)) < wanted:
            threading.Event().wait(1)
        for generation in range(1, kills + 1):
            wait_for(lambda generation=generation: len(_steps(folder, generation)) > model.warm)  # type: ignore[misc]
            threading.Event().wait(moments.uniform(2, 6))
            os.kill(cluster.snapshot().nodes[1].pid or 0, signal.SIGKILL)
            wait_for(lambda generation=generation: bool(_steps(folder, generation + 1)))  # type: ignore[misc]
    finally:
        cluster.close()
        feeding.join()
    return [_steps(folder, generation) for generation in range(1, kills + 2)]


def _steps(folder: str, generation: int) -> list[_Step]:
    file = Path(folder, f"worker:0-{generation}")
    if not file.exists():
        return []
    lines = (line.split() for line in file.read_text().splitlines())
    return [_Step(int(one[0]), int(one[1]), float(one[2])) for one in lines if len(one) == 3]
