"""TensorFlowOnSpark's names and programs, with the meanings that they have in TensorFlowOnSpark."""
