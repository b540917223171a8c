"""Rows of Arrow, NumPy and Python into columns and back; what does not fit is named."""
