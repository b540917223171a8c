"""The one port of the driver, what is said through it, and processes that speak to each other.

In come messages, which are frozen dataclasses (:mod:`~tfos_nb.runtime.control.wire`); out go their answers. Both ends
of a wire are in one module. The driver, Spark's tasks, supervisors and nodes import this package; it imports no other.
"""
