"""Rows and files as a ``tf.data.Dataset``: batches, shapes and even shares."""
