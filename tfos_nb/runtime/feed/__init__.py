"""Feed rows from Spark's partitions into the nodes, each row once in a pass.

The driver's ledger decides which rows go to which node. A Spark task sends them. A node receives them, keeps them for
later passes and cuts them into batches. Both ends of the transfer are here. It imports rows, control and host.
"""
