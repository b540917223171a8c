"""Patches of Keras under TensorFlow's synchronous strategies: one file for one fault, or for a few related ones.

The input is the installed Keras. The output is a Keras that computes the numbers of a single process (docs/keras.md). A
node's process applies the patches before ``main``; the driver checks the version of Keras. ``driver``,
``runtime.datasets``, ``runtime.node`` and ``runtime.program`` import this package. It imports feed, storage, code and
control.
"""
