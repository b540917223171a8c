"""What a replica does to a gradient, a loss or a state so that all replicas act as one process would."""
