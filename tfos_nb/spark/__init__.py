"""Access to Spark: the session, its slots, and whether its executors reach this process.

The input is a ``SparkSession``, classic or of Spark Connect. The output is jobs, counts of slots, and reasons for
refusals. It does not depend on clusters. ``__main__``, ``cluster``, ``cluster_inference``, ``detached``, ``driver``,
``inference``, ``magics``, ``parallel``, ``pipeline`` and ``tfrecord`` import this package.
"""
