"""DataFrames to TFRecord files and back, on Spark's executors, without a jar and without TensorFlow.

The input is a DataFrame, or the path of files. The output is files, or a DataFrame. :func:`register` adds the format to
Spark 4. Executors use :mod:`tfos_nb.runtime.tfrecord`. ``compat`` and ``pipeline`` import this package.
"""

from __future__ import annotations

from tfos_nb.spark.tfrecord_source import register
from tfos_nb.tfrecord.outcome import Saved
from tfos_nb.tfrecord.reader import infer_schema, read
from tfos_nb.tfrecord.skipped import Skipped
from tfos_nb.tfrecord.writer import write

__all__ = ["Saved", "Skipped", "infer_schema", "read", "register", "write"]
