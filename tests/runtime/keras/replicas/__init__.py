"""How a replica changes a gradient, a loss or a state so that all replicas act as a single process would."""
