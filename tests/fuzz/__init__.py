"""Invalid input at every port, pipe and address: its sender is refused, and nobody else is disturbed."""
