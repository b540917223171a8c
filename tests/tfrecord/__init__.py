"""DataFrames as TFRecord files, written and read by real executors and by TensorFlow."""
