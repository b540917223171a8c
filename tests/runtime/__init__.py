"""Tests of the code that runs on an executor, one package at a time and mostly without Spark.

``programs`` contains the programs that tests of several packages run as workers.
"""
