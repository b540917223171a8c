"""DataFrames to TFRecord files and back, on Spark's executors, without a jar and without TensorFlow.

The input is a DataFrame, or the path of files. The output is files, or a DataFrame.

::

    write(df, path, …)            a DataFrame becomes files of Examples or SequenceExamples
    read(spark, path, …)          files become a DataFrame
    infer_schema(spark, path, …)  the schema that read would infer
    register(spark)               spark.read.format("tfrecord") and df.write.format("tfrecord"), from Spark 4 on
    Skipped(spark)                counts the records that read(…, mode="skip") leaves out

``pipeline`` and ``compat`` import this package. Executors use :mod:`tfos_nb.runtime.tfrecord`.
"""

from __future__ import annotations

from tfos_nb.spark.tfrecord_source import register
from tfos_nb.tfrecord.outcome import Saved
from tfos_nb.tfrecord.reader import infer_schema, read
from tfos_nb.tfrecord.skipped import Skipped
from tfos_nb.tfrecord.writer import write

__all__ = ["Saved", "Skipped", "infer_schema", "read", "register", "write"]
