"""Numbers of a training step over all replicas: losses, metrics, states and gradients, and the optimizers' updates.

The input is what one replica computes from its own rows. The output is what one process computes from the rows of all
replicas. The patches of Keras in the folder above use it. This package imports only ``tfos_nb.errors``.
"""
