"""Apply saved models and functions to DataFrames: find the model, match the columns, and run the Spark task.

The input is a DataFrame and a model's path. The output is a DataFrame with additional columns. It needs no cluster.
``magics``, ``mlflow`` and ``pipeline`` import this package.
"""
