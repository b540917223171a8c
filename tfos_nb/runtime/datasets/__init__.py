"""Make a ``tf.data.Dataset`` of a node's rows: those that it is fed, and those of files that it reads itself.

The input is passes over record batches, or files. The output is datasets whose batches a strategy uses as they were
cut. These are the only datasets that a user's program gets. It imports :mod:`~tfos_nb.runtime.keras`, feed and the
packages below.
"""
