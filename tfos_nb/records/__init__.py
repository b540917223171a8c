"""Records of runs: the content of a record, its file, the thread that writes it, and the runs of a directory.

The input is a :class:`.run.Run`, or a directory. The output is JSON files and :class:`.runs.Runs`. It imports neither
Spark nor TensorFlow. ``cluster``, ``detached``, ``driver``, ``mlflow``, ``pipeline`` and ``widgets`` import this
package.
"""
