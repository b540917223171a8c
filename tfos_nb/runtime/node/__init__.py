"""Processes of a node: Spark's task, the supervisor that it starts, and the process that runs TensorFlow.

The input is a plan and a payload. The output is reports, results, and how the node ended. Each node has one Spark task.
``cluster``, ``driver``, ``jupyter``, ``magics.diagnosis``, ``parallel`` and ``spark`` import this package. They import
its tasks and messages. It imports all of the runtime except datasets, models, rows and tfrecord.
"""
