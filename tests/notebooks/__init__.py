"""The notebooks and examples of ``notebooks/``, run as by a user: each learns and shows what its text says."""
