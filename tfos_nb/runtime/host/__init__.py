"""What a process takes of its host: GPUs, memory, and where its output goes.

In come a process' number and what Spark gave its task; out come GPUs that it may use, figures of use, and lines of
output. Supervisors and Spark's tasks import this package; it imports :mod:`~tfos_nb.runtime.control` alone.
"""
