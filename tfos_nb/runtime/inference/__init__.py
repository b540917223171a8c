"""Answer rows with a running cluster: from Spark's tasks to ``main`` and back, in their order.

The input is record batches. The output is one result for each row, in the same order. Both ends of the connection are
here. It imports feed, rows and control.
"""
