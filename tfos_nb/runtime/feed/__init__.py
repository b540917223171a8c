"""Feed rows from Spark's partitions into the nodes, each row once in a pass.

The input is the record batches of Spark's partitions. The output is passes of record batches on each node, and the
driver's ledger of which node has which rows. Both ends of the transfer are here. A Spark task sends the rows. A node
receives them, keeps them for later passes and cuts them into batches. ``driver`` and ``driver.feeding`` import this
package, and so do the runtime's packages above it, except models. It imports rows, host and control.
"""
