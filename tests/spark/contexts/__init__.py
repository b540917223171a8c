"""Interface to Spark through a session of either kind."""
