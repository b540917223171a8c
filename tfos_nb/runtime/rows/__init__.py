"""Rows as columns: what becomes of them without a Python loop, and how many go to whom.

In come rows of an RDD, Arrow's record batches, or results of TensorFlow; out come arrays, lists, and spans of rows. All
is functions of values: nothing here waits, listens or writes. It imports no other package.
"""
