"""Read and write TFRecord files on the executors, without TensorFlow.

Rows are Arrow record batches. Records are bytes.

::

    RecordBatch ── encode ──▶ records ── framing ──▶ bytes ── writing ──▶ temporary files, renamed when all are written
    RecordBatch ◀── decode ── spans of a block ◀── framing ── bytes ◀── reading ── a file, block by block

Each column is processed as a whole. The only Python loop over records computes their CRC-32C.

``fields`` defines the types. ``spans`` reads protobuf fields from many records at once, and ``canonical`` passes
records of unusual form to protobuf itself. ``files`` lists and opens paths. ``source`` is Spark 4's data source.
"""
