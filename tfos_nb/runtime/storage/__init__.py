"""Files on any file system: full paths, places reached by a URL, and files that are written once and atomically.

The input is a path as a user wrote it, and bytes. The output is files that exist completely or not at all. It does not
depend on rows, models or TensorFlow, and imports only :mod:`~tfos_nb.runtime.control`.
"""
