"""Each of TensorFlow's strategies on a cluster: synchronous, with parameter servers, and with an evaluator.

The trained weights are correct, and every row counts once a pass.
"""
