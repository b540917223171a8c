"""Rows as columns: convert them without a Python loop, and divide them among nodes.

The input is rows of an RDD, Arrow's record batches, or results of TensorFlow. The output is arrays, lists, and spans of
rows. All of it is functions of values: nothing here waits, listens or writes. It imports no other package.
"""
