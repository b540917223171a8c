"""Rows from Spark's partitions into the nodes, each row once a pass.

The driver's ledger decides which rows go to which node; a Spark task sends them; a node receives them, keeps them for
later passes and cuts them into batches. Both ends of that wire are here. It imports rows, control and host.
"""
