"""Load saved models of all kinds as functions of arrays, and apply them to rows.

The input is a path and columns. The output is columns. A Python worker of Spark keeps a model that it has loaded.
Spark's tasks import this package, and so does the driver, for a model's signature. It imports rows, code, storage, host
and control.
"""
