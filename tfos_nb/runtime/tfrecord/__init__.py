"""TFRecord files on the executors: rows as Arrow record batches, records as bytes, and nothing of TensorFlow.

::

    RecordBatch ── encode ──▶ records ── framing ──▶ bytes ── writing ──▶ a file beside, renamed when all are written
    RecordBatch ◀── decode ── spans of a block ◀── framing ── bytes ◀── reading ── a file, block by block

The work is by column: what a batch costs in Python does not grow with its rows, but for one call of CRC-32C a record.

``fields`` names the types, ``spans`` has the steps of reading protobuf from many records at once, ``canonical`` gives
what the fast way does not know to protobuf itself, ``files`` knows paths, ``source`` is Spark 4's data source.
"""
