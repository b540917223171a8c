"""Notice that a training does not move, and say which node is behind, and in what.

The input is what the controller knows of the nodes, their Python stacks and the links between them, for which it asks
their supervisors. The output is a warning in the kernel's log, a line for each node, and a failure if a link is cut.
``cluster`` and ``driver`` import this package. It imports messages of the runtime, and nothing else of the driver.
"""
