"""Detection of trainings that hang, and of the nodes that are behind."""
