"""Whole clusters, from ``launch()`` to their results: nodes are lost, hang, come and go while a real Spark runs them.

They test no single module. The tests of one module are in the folder with its name.
"""
