"""What the cluster manager says of the executors on which nodes are, or for which they wait.

The input is what :mod:`tfos_nb.spark.contexts` asks Spark and Kubernetes, by threads. The output is the nodes that
leave executors about to end, and the reasons in errors. ``cluster`` imports this package.
"""
