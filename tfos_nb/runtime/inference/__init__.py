"""Rows that a running cluster answers: from Spark's tasks to ``main`` and back, in their order.

In come record batches; out come as many results, each for the rows that it belongs to. Both ends of the wire are here.
It imports feed, rows and control.
"""
