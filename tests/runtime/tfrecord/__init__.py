"""TFRecord files without TensorFlow, byte for byte as TensorFlow reads and writes them."""
