"""Access to Spark: the session, its slots, and whether its executors reach this process.

The input is a ``SparkSession``, classic or of Spark Connect. The output is jobs, counts of slots, and reasons for
refusals. This package does not depend on clusters. ``driver``, ``cluster``, ``cluster_inference``, ``parallel``,
``inference``, ``tfrecord``, ``pipeline``, ``magics`` and ``__main__`` import it; ``widgets`` imports only
:mod:`tfos_nb.spark.contexts`.
"""
