"""Rows, from the driver's side: calls of ``train``, the jobs that feed, and how far the nodes have come.

In come DataFrames, RDDs and streams; out come Spark jobs whose tasks ask the feed desk whose their rows are. No row
passes through the driver.
"""
