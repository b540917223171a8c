"""Read and write TFRecord files on the executors, without TensorFlow.

When writing, the input is Arrow record batches and the output is files. When reading, it is the other way round. Each
column is processed as a whole: ``encode`` and ``decode`` convert it, ``framing`` adds and checks CRC-32C, ``writing``
and ``reading`` handle the files. ``compat``, ``pipeline``, ``runtime.datasets``, ``spark`` and ``tfrecord`` import this
package. It imports rows, storage and control.
"""
