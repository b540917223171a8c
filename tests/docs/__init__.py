"""Checks of the documentation: blocks run, names and messages exist in the code, manifests are valid."""
