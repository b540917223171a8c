"""A checksum of a row, by which one attempt at a partition is known to read the same rows as another."""

from __future__ import annotations

import zlib

import pyarrow as pa

__all__ = ["fingerprint_of"]


def fingerprint_of(batch: pa.RecordBatch, row: int) -> int:
    """Return a checksum of one row, the same in every attempt that reads the same row."""
    checksum = 0
    for column in batch.columns:
        checksum = _checksum_of(column.slice(row, 1), checksum)
    return checksum


def _checksum_of(values: pa.Array, checksum: int) -> int:
    """Go on with a checksum: of the values alone, since Arrow's own encoding of them differs with what stood beside."""
    while values.null_count == 0 and isinstance(values, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        if not isinstance(values, pa.FixedSizeListArray):
            checksum = zlib.crc32(values.value_lengths().to_numpy(), checksum)
        values = values.flatten()
    if values.null_count == 0 and (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        return zlib.crc32(values.to_numpy(), checksum)
    return zlib.crc32(repr(values.to_pylist()).encode(), checksum)
