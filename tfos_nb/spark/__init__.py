"""What is asked of Spark: the session, its slots, and whether its executors reach this process.

In comes a ``SparkSession``, classic or of Spark Connect; out come jobs, counts of slots, and reasons why not. It knows
no cluster: the driver's packages import it.
"""
