"""States from which a training continues after a loss: checkpoints, and states that the supervisors hold in memory.

The input is a program's states, with its position in the rows. The output is the state of one moment on all nodes.
``runtime.node`` and ``runtime.program`` import this package. It imports feed, whose positions it keeps, storage, host,
code and control.
"""
