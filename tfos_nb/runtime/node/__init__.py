"""The processes of a node: Spark's task, the supervisor that it starts, and the process that has TensorFlow.

In come a plan and a payload; out come reports, results, and how it ended. One node is one Spark task. The driver
imports the task and the programs' names; nothing else imports this package.
"""
