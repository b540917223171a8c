"""States that a training goes on from: whole or not there, and the same on all nodes."""
