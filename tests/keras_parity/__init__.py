"""Whole Keras programs as workers of a cluster and in one process: both come to the same numbers.

A case of these programs is one layer, loss, metric, optimizer or way to train, and many modules of the package have a
part in it, so they lie apart from ``tests/runtime/keras``: those are tests of what one module of that package does.
"""
