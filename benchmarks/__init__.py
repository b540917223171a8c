"""Measure what the README says about speed and cleanup: ``python -m benchmarks``.

Every promise is a ratio of two figures taken in one run on one machine, interleaved, so that a slow or noisy machine
slows both. Nothing here is a test: the suite times nothing.
"""
