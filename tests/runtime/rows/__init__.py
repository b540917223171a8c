"""Convert rows of Arrow, NumPy and Python to columns and back; values that do not fit are named."""
