"""Rules for all modules: the public names, layers, deadlines, secrets, and the distributions."""
