"""Models and functions on the rows of DataFrames, on real executors: the numbers of one process, and clear refusals."""
