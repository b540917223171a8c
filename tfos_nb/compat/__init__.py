"""TensorFlowOnSpark's modules, functions and classes, by their names, over this package's own.

A program written for TensorFlowOnSpark runs by changing its imports, ``from tensorflowonspark import TFCluster`` into
``from tfos_nb.compat import TFCluster``. What is different on purpose is listed in ``docs/migrating.md``. New programs
are better off with :func:`tfos_nb.launch`.

Nothing is done here: every call goes on to the native API.
"""
