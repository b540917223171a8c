"""Patches of Keras under TensorFlow's synchronous strategies: one file for one fault, or for a few related ones.

The input is Keras as it was installed. The output is a Keras whose numbers are those of one process (docs/keras.md). A
node's process patches it before ``main``. It imports the packages below: recovery, feed, rows, code, storage, control.
"""
