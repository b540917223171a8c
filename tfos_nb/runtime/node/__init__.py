"""Processes of a node: Spark's task, the supervisor that it starts, and the process that runs TensorFlow.

The input is a plan and a payload. The output is reports, results, and how the node ended. Each node has one Spark task.
No package of the runtime imports this one. It imports all of them except datasets, models, rows and tfrecord. Outside
the runtime, ``driver``, ``spark``, ``jupyter``, ``magics.diagnosis``, ``cluster`` and ``parallel`` import its tasks and
messages.
"""
