"""Measure the rows a second of ``TFModel.transform``, on MNIST-shaped rows from a cached DataFrame.

Three other figures come from the same run, interleaved, with the same model and batch size. The first is PySpark's
``predict_batch_udf`` with ``model.predict``, as in its documentation, and for information with the model called
directly. The second is Keras' ``model.predict`` in one process on one core, on the same rows in memory. The third is an
Arrow UDF that reads the values and returns as many, which is Spark's own cost. Then TensorFlowOnSpark 2.2.5's
``TFModel.transform`` runs in its own environment, on fewer rows, because it is much slower.

The rate of one core is computed from the processor time of all processes involved: Spark's JVMs and their Python
processes, or the one process of Keras. It is the same on a machine that runs other work.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks import lineage_venv
from benchmarks.data import VECTORS, cached_frame, cached_on_disk
from benchmarks.session import EXECUTORS, ROOT, spark_session
from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from benchmarks.settings import Settings

__all__ = ["run"]

BATCH = 1000
RECORDS = {"ours_small": 1000}
"""Rows that Spark hands over at once, where they are not Spark's 10,000: those of 3 kB are 31 MB then."""
CLASSES = 10
OF_UDF = 1.2
OF_LINEAGE = 20
OF_KERAS = 0.8  # per core


@dataclass(frozen=True)
class Subject:
    """A model: its name, and its default number of rows, which take some seconds.

    A job has costs that do not grow with its rows, such as the start of tasks. With few rows, they would dominate.
    """

    name: str
    describes: str
    rows: int


SUBJECTS = (
    Subject("dense", "784-128-10 dense", 400_000),
    Subject("cnn", "28x28x1 CNN: 16 and 32 filters, dense 10", 120_000),
)

_MAKE = """
import sys, keras
from keras import Input, Sequential, layers
models = {
    "dense": [Input((784,)), layers.Dense(128, "relu"), layers.Dense(10, "softmax")],
    "cnn": [Input((28, 28, 1)), layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(),
            layers.Dense(10, "softmax")],
}
for name, parts in models.items():
    model = Sequential(parts)
    model.save(f"{name}.keras")
    model.export(name, verbose=False)
"""

_KERAS = """
import os, sys, time
os.sched_setaffinity(0, {{sorted(os.sched_getaffinity(0))[0]}})
import numpy as np, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
import keras
model = keras.models.load_model({path!r})
x = np.random.default_rng(1).random(({rows}, 784), dtype="float32").reshape((-1, *model.input_shape[1:]))
model.predict(x[:{batch}], batch_size={batch}, verbose=0)
started = time.process_time()
model.predict(x, batch_size={batch}, verbose=0)
print(len(x) / (time.process_time() - started))
"""


@dataclass(frozen=True)
class LoadPredict:
    """Function for ``predict_batch_udf``: load the model and return the function of a batch."""

    path: str
    direct: bool

    def __call__(self) -> Callable[[Any], Any]:
        """Load it."""
        import keras

        return Predict(keras.models.load_model(self.path), self.direct)


class Predict:
    """Applies a model to a batch."""

    def __init__(self, model: Any, direct: bool) -> None:
        self.model, self.direct = model, direct

    def __call__(self, inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Apply it."""
        if self.direct:
            return np.asarray(self.model(inputs, training=False))
        return np.asarray(self.model.predict(inputs, batch_size=BATCH, verbose=0))


@dataclass(frozen=True)
class Slice:
    """An Arrow UDF without a model: it returns the first values of each row."""

    def values(self, batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """Return them."""
        for batch in batches:
            rows = batch.flatten().to_numpy().reshape(len(batch), -1)
            flat = np.ascontiguousarray(rows[:, :CLASSES]).reshape(-1)
            offsets = pa.array(np.arange(len(batch) + 1) * CLASSES, pa.int32())
            yield pa.ListArray.from_arrays(offsets, pa.array(flat))


def run(settings: Settings) -> Result:
    """Measure both models."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tfos_nb-benchmark-") as folder:
        subprocess.run([sys.executable, "-c", _MAKE], cwd=folder, env=_environment(), check=True)
        with spark_session(cores=1) as spark:
            for subject in SUBJECTS:
                figures[subject.name] = _measure(spark, subject, Path(folder) / f"{subject.name}.keras", settings)
        if not settings.without_lineage:
            for subject in SUBJECTS:
                figures[subject.name]["lineage"] = _lineage(subject, Path(folder) / subject.name, settings)
    ratios = [ratio for subject in SUBJECTS for ratio in _ratios(subject, figures[subject.name])]
    return Result("transform", tuple(ratios), figures, _notes(figures))


def _environment() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)}


def _measure(spark: Any, subject: Subject, path: Path, settings: Settings) -> dict[str, Any]:
    rows = settings.rows or subject.rows
    settings.say(f"transform: {rows:,} rows for the {subject.describes}: filling Spark's cache")
    frame = cached_frame(spark, VECTORS, rows, EXECUTORS * 2)
    ways = _ways(frame, path)
    found: dict[str, Any] = {"rows": rows, "cached_on_disk_bytes": cached_on_disk(spark), "keras": []}
    for name, way in ways.items():
        _rates(way, rows)  # loads the model in each Python worker
        found[name], found[f"{name}_cpu"] = [], []
    for number in range(settings.repeat):
        for name, way in ways.items():
            with _handed_over(spark, RECORDS.get(name)):
                by_clock, by_cpu = _rates(way, rows)
            found[name].append(by_clock)
            found[f"{name}_cpu"].append(by_cpu)
        found["keras"].append(_keras_rate(path, rows))
        last = ", ".join(f"{name} {found[name][-1]:,.0f}/s ({found[f'{name}_cpu'][-1]:,.0f} a core)" for name in ways)
        last += f", keras {found['keras'][-1]:,.0f} a core"
        settings.say(f"transform: {subject.name} {number + 1}/{settings.repeat}: {last}")
    frame.unpersist(blocking=True)
    return found


@contextlib.contextmanager
def _handed_over(spark: Any, records: int | None) -> Iterator[None]:
    """Set how many rows Spark hands over at once; None keeps its default."""
    if records is None:
        yield
        return
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", records)
    try:
        yield
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def _lineage(subject: Subject, place: Path, settings: Settings) -> dict[str, Any]:
    rows = min(settings.lineage_rows or VECTORS.lineage_rows, settings.rows or subject.rows)
    settings.say(f"transform: {rows:,} rows through TensorFlowOnSpark's {subject.name}")
    found = lineage_venv.measure(
        VECTORS.name,
        rows,
        settings.lineage_partitions,
        settings.repeat,
        "benchmarks.transform_lineage",
        more=[str(place), str(BATCH)],
    )
    settings.say(f"transform: {subject.name}: TensorFlowOnSpark {median(found['wall']):,.0f}/s")
    return found


def _ways(frame: DataFrame, path: Path) -> dict[str, DataFrame]:
    import pyspark.sql.functions as functions
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    from tfos_nb import TFModel

    shape = [784] if path.stem == "dense" else [28, 28, 1]
    udfs = {
        name: predict_batch_udf(
            LoadPredict(str(path), direct),
            return_type=ArrayType(FloatType()),
            batch_size=BATCH,
            input_tensor_shapes=[shape],
        )
        for name, direct in (("udf", False), ("udf_direct", True))
    }
    model = TFModel(export_dir=str(path), input_mapping={"features": _input_of(path)}, batch_size=BATCH)
    bare = functions.arrow_udf(Slice().values, "array<float>")  # type: ignore[attr-defined]  # PySpark has no type for it
    ours = model.transform(frame)
    return {
        "ours": ours,
        "ours_small": ours,
        **{name: frame.withColumn("prediction", udf("features")) for name, udf in udfs.items()},
        "bare": frame.withColumn("prediction", bare("features")),
    }


def _input_of(path: Path) -> str:
    """Return the name of the input in the model's file."""
    import json
    import zipfile

    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    return str(config["config"]["layers"][0]["config"]["name"])


def _rates(frame: DataFrame, rows: int) -> tuple[float, float]:
    """Return the rows a second, and the rows a second of processor time."""
    started, used = time.perf_counter(), _processor_seconds()
    frame.write.format("noop").mode("overwrite").save()
    return rows / (time.perf_counter() - started), rows / (_processor_seconds() - used)


def _processor_seconds() -> float:
    """Return the processor time of this process and of its descendants. Spark's executors descend from its driver."""
    import psutil

    here = psutil.Process()
    total = 0.0
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _keras_rate(path: Path, rows: int) -> float:
    program = _KERAS.format(path=str(path), rows=rows, batch=BATCH)
    ended = subprocess.run(
        [sys.executable, "-c", program], env=_environment(), check=True, capture_output=True, text=True
    )
    return float(ended.stdout.split()[-1])


def _ratios(subject: Subject, found: dict[str, Any]) -> list[Ratio]:
    ours, about = median(found["ours"]), subject.describes
    lineage = found.get("lineage", {})
    return [
        Ratio(f"{about}: of predict_batch_udf with model.predict", ours, median(found["udf"]), "rows/s", OF_UDF),
        *(
            Ratio(f"{about}: of TensorFlowOnSpark's TFModel{more}", ours, median(lineage[kind]), "rows/s", aim)
            for kind, more, aim in (("wall", "", OF_LINEAGE), ("whole", " with its transform()", None))
            if lineage
        ),
        Ratio(f"{about}: of predict_batch_udf with model(x)", ours, median(found["udf_direct"]), "rows/s"),
        Ratio(
            f"{about}: per core, of model.predict in one process",
            median(found["ours_cpu"]),
            median(found["keras"]),
            "rows/s/core",
            OF_KERAS,
        ),
        Ratio(
            f"{about}: per core, maxRecordsPerBatch={RECORDS['ours_small']}, of model.predict",
            median(found["ours_small_cpu"]),
            median(found["keras"]),
            "rows/s/core",
        ),
        Ratio(
            f"{about}: per core, of predict_batch_udf with model.predict",
            median(found["ours_cpu"]),
            median(found["udf_cpu"]),
            "rows/s/core",
        ),
        Ratio(
            f"{about}: per core, of an Arrow UDF without a model",
            median(found["ours_cpu"]),
            median(found["bare_cpu"]),
            "rows/s/core",
        ),
    ]


def _notes(figures: dict[str, Any]) -> tuple[str, ...]:
    notes = [
        f"{EXECUTORS} executors of one core; batches of {BATCH:,} rows; every column is kept; the sink is Spark's noop."
    ]
    notes += [
        f"{name}: some of the cached rows were on disk: give the executors more memory"
        for name, found in figures.items()
        if found["cached_on_disk_bytes"]
    ]
    for name, found in figures.items():
        if "lineage" in found:
            theirs = found["lineage"]
            notes.append(
                f"{name}: TensorFlowOnSpark took {theirs['rows']:,} rows in {theirs['partitions']} partitions; its "
                f"transform() itself took {median(theirs['transform']):.1f} s more, in which it looks for the schema."
            )
    return tuple(notes)
