"""The driver's port, its messages, and the processes at both ends: nothing is lost, no stranger gets in."""
