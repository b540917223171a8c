"""A node's rows as a ``tf.data.Dataset``: those that it is fed, and those of files that it reads by itself.

In come passes over record batches, or files; out come datasets that a strategy takes in the batches they were cut in.
The user's program sees no other. It imports :mod:`~tfos_nb.runtime.keras`, feed and what lies below.
"""
