"""Rows that want answers from a running ``main``, and their answers in their order."""
