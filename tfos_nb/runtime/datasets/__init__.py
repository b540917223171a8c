"""Make a ``tf.data.Dataset`` from a node's rows: rows that are fed by Spark, or rows of files that the node reads.

The input is passes over record batches, or files. The output is datasets whose batches a strategy uses without cutting
them again. ``ctx.dataset``, ``ctx.validation`` and ``ctx.read`` return these datasets. Only ``runtime.program`` imports
this package. It imports keras, feed, tfrecord, rows, storage and code.
"""
