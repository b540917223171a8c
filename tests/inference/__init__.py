"""Models and functions applied to DataFrames on real executors: the numbers of one process, and clear errors."""
