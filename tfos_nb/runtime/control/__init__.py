"""Communication: the driver's one port, its messages, and channels between processes.

The input is messages, which are frozen dataclasses (:mod:`~tfos_nb.runtime.control.wire`). The output is the same
messages in another process. Both ends of a connection are in one module. This is the lowest package of the runtime: it
imports no other, and nearly every package imports it, on the driver and on the executors.
"""
