"""State of a cluster at one moment, and the part of its history that is kept for display.

The input is reports and lines of output. The output is immutable snapshots. All views, in a notebook and in a terminal,
are made only from these. It imports nothing that communicates with Spark or a node. ``cluster``, ``detached``,
``driver``, ``jupyter``, ``magics``, ``mlflow``, ``pipeline``, ``records`` and ``widgets`` import this package.
"""
