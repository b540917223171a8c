"""Saved models and functions applied to DataFrames: which model, which columns, and the task that Spark runs.

In come a DataFrame and a model's path; out comes a DataFrame with columns beside its own. Spark ML's Transformers and
SQL's functions are made of it. It needs no cluster.
"""
