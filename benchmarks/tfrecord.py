"""Compare TFRecord files' rows and bytes a second with TensorFlow's own Python writer and reader, and with a copy.

First, one process handles one batch after another, so that these figures contain neither Spark nor its executors. Then
Spark writes and reads the same rows, in separate figures. TensorFlow writes one ``tf.train.Example`` a row by
``tf.io.TFRecordWriter``, and reads them by ``TFRecordDataset`` and ``Example.FromString``, as in its guide.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks.data import SHAPES, Shape, cached_frame
from benchmarks.session import spark_session
from benchmarks.table import Ratio, Result, median

if TYPE_CHECKING:
    from benchmarks.settings import Settings
    from tfos_nb.runtime.tfrecord.reading import Reading
    from tfos_nb.runtime.tfrecord.writing import Encoding

__all__ = ["run"]

TARGET = 5.0
BATCH = 4096
# Enough rows for some seconds of TensorFlow's way.
ROWS = {"vectors": 20 * BATCH, "scalars": 40 * BATCH, "text": 40 * BATCH}
THEIRS = 2 * BATCH
_WORDS = pa.array(["spark", "tensor", "flow", "record", "executor", "a", "of", "notebook"])


def run(settings: Settings) -> Result:
    """Measure the codec alone, then in Spark."""
    figures: dict[str, Any] = {}
    ratios: list[Ratio] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tfos_nb-tfrecord-", dir=_memory()) as folder:
        for name in ("vectors", "scalars", "text"):
            one = _Codec(name, settings.rows or ROWS[name], Path(folder))
            found = one.measure(settings)
            figures[name] = found
            ratios += one.ratios(found)
            notes.append(one.note(found))
    with spark_session() as spark:
        for shape in SHAPES:
            found = _through_spark(spark, shape, settings)
            figures[f"spark {shape.name}"] = found
            for way, other in (("write", "parquet"), ("read", "from parquet")):
                what = f"Spark {way}s {shape.describes} / {other}"
                ratios.append(Ratio(what, median(found[way]), median(found[other]), "rows/s"))
    return Result("tfrecord", tuple(ratios), figures, tuple(notes))


def _memory() -> str | None:
    """Yield a directory in memory, so that no disk is measured."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class _Codec:
    """One shape of row, written and read by us and by TensorFlow in this process."""

    def __init__(self, name: str, rows: int, folder: Path) -> None:
        from tfos_nb.runtime.tfrecord.fields import RecordType
        from tfos_nb.runtime.tfrecord.reading import Reading
        from tfos_nb.runtime.tfrecord.writing import Encoding

        self.name, self.rows = name, max(rows // BATCH, 1) * BATCH
        self.batch, fields = _batch(name)
        self.encoding: Encoding = Encoding(fields, (), RecordType.EXAMPLE, gzip=False)
        self.reading: Reading = Reading(fields, RecordType.EXAMPLE, tuple(field.name for field in fields))
        self.ours, self.theirs, self.copy = folder / "ours", folder / "theirs", folder / "copy"
        self.bytes_each = 0.0
        # As Python values: TensorFlow converts these faster than NumPy's.
        self.values = {one: self.batch.column(one).to_pylist() for one in self.batch.schema.names}

    def measure(self, settings: Settings) -> dict[str, list[float]]:
        """Return the rows a second of each way, measured in turns."""
        found: dict[str, list[float]] = {}
        ways: dict[str, tuple[Callable[[], int], int]] = {
            "write": (self._write, self.rows),
            "TensorFlow writes": (self._write_theirs, THEIRS),
            "read": (self._read, self.rows),
            "TensorFlow reads": (self._read_theirs, THEIRS),
            "copy": (self._copy, self.rows),
        }
        for number in range(settings.repeat + 1):
            for way, (function, rows) in ways.items():
                started = time.perf_counter()
                if function() != rows:
                    raise RuntimeError(f"{way}: not all of the {rows} rows")
                if number:  # the first one is for warming up
                    found.setdefault(way, []).append(rows / (time.perf_counter() - started))
            if number:
                settings.say(f"tfrecord: {self.name} {number}/{settings.repeat}: {found['write'][-1]:,.0f}/s written")
        self.bytes_each = self.ours.stat().st_size / self.rows
        return found

    def ratios(self, found: dict[str, list[float]]) -> list[Ratio]:
        """Return the ratios of rows to TensorFlow's, and of megabytes to a copy's."""
        rate = {way: median(values) for way, values in found.items()}
        mega = self.bytes_each / 1e6
        return [
            Ratio(f"{self.name}, write / TensorFlow's", rate["write"], rate["TensorFlow writes"], "rows/s", TARGET),
            Ratio(f"{self.name}, read / TensorFlow's", rate["read"], rate["TensorFlow reads"], "rows/s", TARGET),
            Ratio(f"{self.name}, write / copy of the file", rate["write"] * mega, rate["copy"] * mega, "MB/s"),
            Ratio(f"{self.name}, read / copy of the file", rate["read"] * mega, rate["copy"] * mega, "MB/s"),
        ]

    def note(self, found: dict[str, list[float]]) -> str:
        """Return a note that says how the time divides into steps."""
        parts = ", ".join(f"{step} {seconds:.0%}" for step, seconds in self._shares().items())
        return f"{self.name}: {self.bytes_each:,.0f} bytes a row; {parts} of {len(found['write'])} runs' steps."

    def _write(self) -> int:
        with self.ours.open("wb") as file:
            for _ in range(self.rows // BATCH):
                for _, _, data in self.encoding.pieces([self.batch]):
                    file.write(data)
        return self.rows

    def _read(self) -> int:
        from tfos_nb.runtime.tfrecord.files import DataFile, open_file
        from tfos_nb.runtime.tfrecord.reading import read_batches

        with open_file(str(self.ours)) as stream:
            return sum(batch.num_rows for batch in read_batches(self.reading, DataFile(str(self.ours), 0), stream))

    def _copy(self) -> int:
        with self.ours.open("rb") as source, self.copy.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)
        return self.rows

    def _write_theirs(self) -> int:
        import tensorflow as tf

        with tf.io.TFRecordWriter(str(self.theirs)) as writer:
            for _ in range(THEIRS // BATCH):
                for row in range(BATCH):
                    features = {name: _feature(tf, values[row]) for name, values in self.values.items()}
                    example = tf.train.Example(features=tf.train.Features(feature=features))
                    writer.write(example.SerializeToString())
        return THEIRS

    def _read_theirs(self) -> int:
        import tensorflow as tf

        rows = 0
        for record in tf.data.TFRecordDataset(str(self.theirs)).as_numpy_iterator():
            features = tf.train.Example.FromString(record).features.feature
            for name in self.batch.schema.names:
                one = features[name]
                list(getattr(one, one.WhichOneof("kind")).value)
            rows += 1
        return rows

    def _shares(self) -> dict[str, float]:
        """Return the share of a batch's time that each step takes."""
        from tfos_nb.runtime.tfrecord.decode import columns
        from tfos_nb.runtime.tfrecord.encode import encode
        from tfos_nb.runtime.tfrecord.framing import PAD, frame, scan
        from tfos_nb.runtime.tfrecord.parse import parse

        times: dict[str, list[float]] = {}

        def timed(step: str, function: Callable[[], Any]) -> Any:
            started = time.perf_counter()
            result = function()
            times.setdefault(step, []).append(time.perf_counter() - started)
            return result

        fields, record_type = self.encoding.fields, self.encoding.record_type
        for _ in range(7):
            records = timed("encode", partial(encode, self.batch, fields, record_type))
            data = timed("frame and checksum", partial(frame, records))
            raw = data.to_pybytes() + PAD
            spans = timed("find and checksum", partial(scan, raw, len(raw) - len(PAD)))
            parsed = timed("parse", partial(parse, raw, spans.starts, spans.ends, record_type, self.values))
            timed("columns", partial(columns, parsed, fields))
        middle = {step: median(values) for step, values in times.items()}
        written = middle["encode"] + middle["frame and checksum"]
        read = sum(middle.values()) - written
        writing = ("encode", "frame and checksum")
        return {step: seconds / (written if step in writing else read) for step, seconds in middle.items()}


def _batch(name: str) -> tuple[pa.RecordBatch, tuple[Any, ...]]:
    from tfos_nb.runtime.tfrecord.fields import Field

    random = np.random.default_rng(0)
    if name == "vectors":
        values = pa.array(random.random(BATCH * 784, dtype=np.float32))
        features = pa.ListArray.from_arrays(pa.array(np.arange(BATCH + 1, dtype=np.int32) * 784), values)
        label = pa.array(random.integers(0, 10, BATCH))
        fields = (Field("features", "float", 1), Field("label", "bigint"))
        return pa.record_batch({"features": features, "label": label}), fields
    if name == "scalars":
        names = [f"c{number:02d}" for number in range(16)]
        return pa.record_batch({one: random.random(BATCH) for one in names}), tuple(
            Field(one, "double") for one in names
        )
    lengths = random.integers(1, 40, BATCH)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    words = _WORDS.take(pa.array(random.integers(0, len(_WORDS), int(lengths.sum()))))
    tokens = pa.array(random.integers(0, 30_000, int(lengths.sum())))
    columns = {
        "id": pa.array(random.integers(0, 10**12, BATCH)),
        "text": pa.array([" ".join(row) for row in pa.ListArray.from_arrays(offsets, words).to_pylist()]),
        "words": pa.ListArray.from_arrays(offsets, words),
        "tokens": pa.ListArray.from_arrays(offsets, tokens),
    }
    kinds = (("id", "bigint", 0), ("text", "string", 0), ("words", "string", 1), ("tokens", "bigint", 1))
    return pa.record_batch(columns), tuple(Field(*kind) for kind in kinds)


def _feature(tf: Any, value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    if isinstance(values[0], str):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[one.encode() for one in values]))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def _through_spark(spark: Any, shape: Shape, settings: Settings) -> dict[str, list[float]]:
    """Return the rows a second of Spark with our files, and with its own format."""
    from tfos_nb import tfrecord

    rows = settings.rows or shape.rows // 4
    frame = cached_frame(spark, shape, rows)
    found: dict[str, list[float]] = {}

    def timed(way: str, function: Callable[[], Any]) -> None:
        started = time.perf_counter()
        function()
        found.setdefault(way, []).append(rows / (time.perf_counter() - started))

    with tempfile.TemporaryDirectory(prefix="tfos_nb-tfrecord-", dir=_memory()) as folder:
        ours, theirs = f"{folder}/ours", f"{folder}/theirs"
        for number in range(settings.repeat):
            timed("write", lambda: tfrecord.write(frame, ours, mode="overwrite"))
            timed("parquet", lambda: frame.write.mode("overwrite").parquet(theirs))
            timed("read", lambda: _consume(tfrecord.read(spark, ours, schema=frame.schema)))
            timed("from parquet", lambda: _consume(spark.read.schema(frame.schema).parquet(theirs)))
            settings.say(f"tfrecord: Spark, {shape.name} {number + 1}/{settings.repeat}: {found['write'][-1]:,.0f}/s")
    frame.unpersist(blocking=True)
    return found


def _consume(frame: Any) -> None:
    """Compute every column, and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()
