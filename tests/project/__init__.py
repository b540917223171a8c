"""What holds for all modules together: the names that a user imports, layers, deadlines, secrets, the distributions."""
