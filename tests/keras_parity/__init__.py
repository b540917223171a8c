"""Whole Keras programs as workers of a cluster and in one process: the numbers must be the same.

A case is one layer, loss, metric, optimizer or way to train. Each case depends on many modules of the package. The
tests of single modules are in ``tests/runtime/keras``.
"""
