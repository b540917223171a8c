"""Numbers of a training step over all replicas: losses, metrics, states and gradients, and the optimizers' updates.

The input is what one replica computes from its own rows. The output is what one process computes from the rows of all
replicas. Calls that all workers must make are here too. Only ``runtime.keras`` imports this package. It imports only
:mod:`~tfos_nb.runtime.control`.
"""
