"""Notice that a training does not move, and say which node is behind, and in what.

The input is what the controller knows of the nodes, and their Python stacks, for which it asks their supervisors. The
output is a warning in the kernel's log and a line for each node. ``cluster`` and ``driver`` import this package. It
imports messages of the runtime, and nothing else of the driver.
"""
