"""What runs on an executor, one package at a time and mostly without Spark.

``programs`` has what the tests of several packages run as workers.
"""
