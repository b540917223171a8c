"""Rows sent to a running ``main`` for inference, and their results in order."""
