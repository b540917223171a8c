"""The processes of a node: how they start, what they are asked, and that none is left."""
