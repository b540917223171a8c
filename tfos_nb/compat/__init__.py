"""TensorFlowOnSpark's modules, functions and classes, under their names, implemented by this package's own API.

A program written for TensorFlowOnSpark runs after its imports are changed from ``from tensorflowonspark import
TFCluster`` to ``from tfos_nb.compat import TFCluster``. Deliberate differences are listed in ``docs/migrating.md``. New
programs should use :func:`tfos_nb.launch`.

The input is calls by TensorFlowOnSpark's names. The output is calls of the native API; this package has no logic of its
own. Only users' programs import it.
"""
