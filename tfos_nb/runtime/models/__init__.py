"""Load saved models as functions of arrays, and apply them to rows.

The input is a path or the bytes of a model, and Arrow columns. The output is Arrow columns. Each Python worker of Spark
keeps the last model that it loaded. ``inference``, ``pipeline``, ``runtime.program`` and ``spark.contexts`` import this
package. It imports rows, code, storage, host and control.
"""
