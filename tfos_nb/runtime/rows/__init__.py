"""Convert rows between Arrow, NumPy and Python by column, and divide rows among nodes.

The input is rows of an RDD, Arrow record batches, or results of TensorFlow. The output is arrays, lists, and spans of
rows. The functions compute values only: they do not wait, use no network and write no files. It imports no other
package. ``driver`` and ``runtime`` import this package.
"""
