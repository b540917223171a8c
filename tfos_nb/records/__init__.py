"""Records of runs: what is kept of a cluster's run, its file, the thread that writes it, and the runs of a directory.

It knows neither Spark nor TensorFlow, and no cluster: what it records is given to it as :class:`.run.Run`.
"""
