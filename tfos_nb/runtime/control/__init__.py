"""Communication: the driver's one port, its messages, and channels between processes.

Messages are frozen dataclasses (:mod:`~tfos_nb.runtime.control.wire`). Both ends of a connection are in one module. The
driver, Spark's tasks, supervisors and nodes import this package; it imports no other.
"""
