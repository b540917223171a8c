"""What the README promises about speed and cleanliness, measured: ``python -m benchmarks``.

Every promise is a ratio of two figures taken in one run on one machine, interleaved, so that a slow or noisy machine
slows both. Nothing here is a test: the suite times nothing.
"""
