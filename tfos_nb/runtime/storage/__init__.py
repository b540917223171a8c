"""Files on any file system: paths in full, places reached by a URL, and files that are written once and whole.

In come a path as a user wrote it, and bytes; out come files that are there as a whole or not at all. It knows nothing
of rows, models or TensorFlow, and imports :mod:`~tfos_nb.runtime.control` alone.
"""
