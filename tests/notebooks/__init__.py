"""The notebooks and examples of ``notebooks/``, as a user runs them: each learns, and shows, what its text says."""
