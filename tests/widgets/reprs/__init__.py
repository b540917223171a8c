"""Displays of objects at the end of a cell, as HTML and as text."""
