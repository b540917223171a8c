"""Each of TensorFlow's strategies on a cluster: in step, with parameter servers, beside an evaluator.

What is trained comes out right, and every row counts once a pass.
"""
