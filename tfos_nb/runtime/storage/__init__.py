"""Resolve paths, access URLs, and write files atomically on any file system.

The input is a path as a user wrote it, and files. The output is files that exist completely or not at all. It does not
depend on rows or models, and imports only :mod:`~tfos_nb.runtime.control`. ``cluster``, ``compat``, ``detached``,
``driver``, ``mlflow``, ``pipeline``, ``records``, ``runtime``, ``tfrecord`` and ``widgets.runs`` import this package.
"""
