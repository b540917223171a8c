"""Feed rows from Spark's partitions into the nodes, each row once in a pass.

The input is the record batches of Spark's partitions. The output is passes of record batches on each node. Both ends of
the transfer are here: a Spark task sends the rows, a node receives them and keeps them for later passes. The driver
knows which node has which rows (:mod:`tfos_nb.driver.ledger`). ``cluster``, ``compat``, ``driver``,
``runtime.datasets``, ``runtime.inference``, ``runtime.keras``, ``runtime.node``, ``runtime.program`` and
``runtime.recovery`` import this package. It imports rows, host and control.
"""
