"""What the views say of a cluster, in words and figures: pure functions of its state, the same in every view."""
