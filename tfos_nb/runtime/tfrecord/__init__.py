"""Read and write TFRecord files on the executors, without TensorFlow.

When writing, the input is Arrow record batches and the output is files. When reading, it is the other way round.
``tfos_nb.tfrecord``, ``spark``, ``pipeline``, ``compat`` and :mod:`~tfos_nb.runtime.datasets` import this package. It
imports rows, storage and control.

::

    RecordBatch ── encode ──▶ records ── framing ──▶ bytes ── writing ──▶ temporary files, renamed when all are written
    RecordBatch ◀── decode ── spans of a block ◀── framing ── bytes ◀── reading ── a file, block by block

Each column is processed as a whole. The only Python loop over records computes their CRC-32C.

``fields`` defines the types. ``spans`` reads protobuf fields from many records at once, and ``canonical`` passes
records of unusual form to protobuf itself. ``files`` lists and opens paths. ``source`` is Spark 4's data source.
"""
