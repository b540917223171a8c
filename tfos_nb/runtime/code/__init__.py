"""Send the user's code to the executors.

The input is a function or a model on the driver. The output, on an executor, is the same function with its modules, its
source text, and the classes that a user's model needs. It imports no other package. ``cluster``, ``compat``,
``detached``, ``inference``, ``parallel``, ``pipeline`` and ``runtime`` import this package.
"""
