"""TFRecord files without TensorFlow, byte for byte what TensorFlow reads and writes."""
