"""Rows are fed from Spark's tasks to the nodes: each once in a pass, despite failures and retries."""
