"""When a training counts as hanging, and which node is said to be behind."""
