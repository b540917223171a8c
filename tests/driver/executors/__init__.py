"""The watches of executors that end, and of executors that do not come."""
