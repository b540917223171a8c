"""Access to Spark: the session, its slots, and whether its executors reach this process.

The input is a ``SparkSession``, classic or of Spark Connect. The output is jobs, counts of slots, and reasons for
refusals. This package does not depend on clusters. The driver's packages import it.
"""
