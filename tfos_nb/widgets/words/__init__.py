"""Words and figures that the views show of a cluster: pure functions of its state, the same in every view."""
