"""Driver's side of feeding rows: calls of ``train``, the Spark jobs that feed, and the nodes' progress.

The input is DataFrames, RDDs and streams. The output is Spark jobs; their tasks ask the feed controller which node gets
which rows. No row passes through the driver. Only ``cluster`` imports this package. It imports the driver's other
modules.
"""
