"""What is mended in Keras under TensorFlow's synchronous strategies, one file a fault or a few that belong together.

In comes a Keras as its package has it; out comes one whose numbers are those of one process (docs/keras.md). A node's
program has it mended before ``main``. It imports what lies below: recovery, feed, rows, code, storage, control.
"""
