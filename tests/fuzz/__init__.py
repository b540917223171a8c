"""Nonsense at every port, pipe and address: whoever sends it is refused, and nobody else is disturbed."""
