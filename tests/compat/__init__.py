"""TensorFlowOnSpark's names and programs mean here what they mean there."""
