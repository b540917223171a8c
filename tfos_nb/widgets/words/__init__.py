"""Words and numbers that the views show about a cluster: pure functions of its state, the same in every view.

The input is a cluster's state, or recorded runs. The output is text and numbers, and text that is cut to a terminal's
width. Only ``widgets`` imports this package.
"""
