"""Rows from Spark's tasks into the nodes: each once in a pass, whoever dies and whatever comes again."""
