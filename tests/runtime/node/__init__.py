"""The processes of a node: how they start, which requests they answer, and that none is left behind."""
