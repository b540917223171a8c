"""DataFrames as TFRecord files, on real executors, with TensorFlow at the other end."""
