"""Send rows from Spark's tasks to ``main`` of a running cluster, and return its results in the order of the rows.

The input is record batches. The output is one result for each row, in the same order. Both ends of the connection are
here. ``cluster``, ``cluster_inference``, ``runtime.node`` and ``runtime.program`` import this package. It imports feed,
rows and control.
"""
