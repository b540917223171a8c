"""Resolve paths, access URLs, and write files atomically on any file system.

The input is a path as a user wrote it, and files. The output is files that exist completely or not at all. It does not
depend on rows or models, and imports only :mod:`~tfos_nb.runtime.control`. The runtime's packages that use files import
it, and so do ``cluster``, ``driver``, ``driver.membership``, ``records``, ``mlflow``, ``pipeline``, ``tfrecord``,
``widgets.runs`` and ``compat``.
"""
