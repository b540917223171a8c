"""Measure the README's claims about speed and cleanup: ``python -m benchmarks``.

Every promise is a ratio of two figures, measured alternately in one run on one machine, so that a slow or noisy machine
slows both. The benchmarks are not tests: the test suite measures no times.
"""
