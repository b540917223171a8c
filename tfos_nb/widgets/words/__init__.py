"""Words and numbers that the views show about a cluster: pure functions of its state, the same in every view."""
