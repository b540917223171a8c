"""The driver's port, the messages through it, and the processes at its ends: nothing is lost, no stranger gets in."""
