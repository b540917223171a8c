"""Processes of a node: Spark's task, the supervisor that it starts, and the process that runs TensorFlow.

The input is a plan and a payload. The output is reports, results, and how the node ended. Each node has one Spark task.
The driver imports the task and the programs' names. No other package imports this one.
"""
