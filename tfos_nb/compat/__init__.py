"""TensorFlowOnSpark's modules, functions and classes, under their names, implemented by this package's own API.

The input is a program of TensorFlowOnSpark, whose imports were changed to ``from tfos_nb.compat import TFCluster``. The
output is calls of the native API; this package has no logic of its own. ``docs/migrating.md`` lists the deliberate
differences. New programs should use :func:`tfos_nb.launch`. Only users' programs import this package.
"""
