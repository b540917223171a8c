"""Saved models of all kinds as functions of arrays, and rows through them.

In come a path and columns; out come columns. A Python worker of Spark's keeps a model that it has loaded. Spark's tasks
import this package, and the driver for a model's signature; it imports rows, code, storage, host and control.
"""
