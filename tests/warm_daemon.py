"""Spark's Python daemon of the tests' session: it has imported TensorFlow, so that its workers need not.

Spark starts it as ``python -m tests.warm_daemon pyspark.worker`` (``spark.python.daemon.module``).
"""

from __future__ import annotations

import gc

import pyspark.worker  # noqa: F401 - from Spark's zip it is compiled again each time
from pyspark.daemon import manager

from tfos_nb.runtime.node.warm_process import import_all

if __name__ == "__main__":
    import_all()
    gc.freeze()
    manager()
