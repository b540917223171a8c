"""Whole clusters, from ``launch()`` to their results: nodes are lost, hang, come and go while a real Spark runs them.

No module of the package is their subject. What one is responsible for is tested in the folder that has its name.
"""
