"""Add and read the frames of TFRecords: length, its checksum, the record, its checksum.

::

    uint64  length
    uint32  masked CRC-32C of the length
    byte    record[length]
    uint32  masked CRC-32C of the record

All numbers are little-endian. Masking rotates the CRC right by 15 bits and adds 0xa282ead8
(tensorflow/core/lib/io/record_writer.h, tensorflow/core/lib/hash/crc32c.h).
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["EMPTY", "HEAD", "PAD", "Scan", "frame", "is_framed", "large_binary", "scan"]

HEAD = 12
_FOOT = 4
_OVERHEAD = HEAD + _FOOT
_length_at = struct.Struct("<Q").unpack_from
_crc_at = struct.Struct("<I").unpack_from
_crc = google_crc32c.value

PAD = bytes(16)
"""Padding after a block's bytes, so that reading a number that is cut off does not read beyond the end."""

EMPTY = pa.scalar(b"", pa.large_binary())
Ints = np.ndarray[Any, np.dtype[np.int64]]
Crcs = np.ndarray[Any, np.dtype[np.uint32]]


def large_binary(offsets: Ints, data: Any) -> pa.Array:
    """Return a buffer of concatenated byte strings as an Arrow array, without a copy.

    Parameters
    ----------
    offsets : numpy.ndarray
        Start of each string in bytes, and the end of the last.
    data : pyarrow.Buffer or buffer
        The bytes.
    """
    buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), buffer])


def _masked(crcs: Crcs) -> Crcs:
    rotated: Crcs = (crcs >> np.uint32(15)) | (crcs << np.uint32(17))
    rotated += np.uint32(0xA282EAD8)
    return rotated


def _of_lengths(lengths: Ints) -> Crcs:
    """Return the masked checksum of each length, computed once for equal lengths."""
    known, place = np.unique(lengths, return_inverse=True)
    raw = known.astype("<u8").tobytes()
    crcs = [_crc(raw[at : at + 8]) for at in range(0, len(raw), 8)]
    return _masked(np.array(crcs, dtype=np.uint32))[place]


def frame(records: pa.Array) -> pa.Buffer:
    """Return records (``large_binary`` without nulls) as framed bytes, the content of a file.

    Examples
    --------
    >>> frame(pa.array([b"abc"], pa.large_binary())).size
    19
    """
    rows = len(records)
    if not rows:
        return pa.py_buffer(b"")
    offsets = np.frombuffer(records.buffers()[1], dtype=np.int64)[records.offset : records.offset + rows + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    raw = records.buffers()[2].slice(first, last - first).to_pybytes() if last > first else b""
    bounds = (offsets - first).tolist()
    head = np.empty((rows, HEAD), dtype=np.uint8)
    lengths = np.diff(offsets)
    head[:, :8] = lengths.astype("<u8").view(np.uint8).reshape(rows, 8)
    head[:, 8:] = _of_lengths(lengths).astype("<u4").view(np.uint8).reshape(rows, 4)
    # google_crc32c takes one bytes object per call, so this is the only loop over records.
    crcs = np.array([_crc(raw[start:end]) for start, end in itertools.pairwise(bounds)], dtype=np.uint32)
    foot = _masked(crcs).astype("<u4")
    framed = pc.binary_join_element_wise(
        large_binary(np.arange(rows + 1) * HEAD, head), records, large_binary(np.arange(rows + 1) * _FOOT, foot), EMPTY
    )
    return _bytes_of(framed)


def _bytes_of(array: pa.Array) -> pa.Buffer:
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return array.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


@dataclass(frozen=True)
class Scan:
    """Positions of the records in a block, in bytes.

    Attributes
    ----------
    starts, ends : numpy.ndarray
        Start and end of the message of each complete record, including those with a wrong checksum.
    good : numpy.ndarray
        Whether the checksum of each message is right.
    consumed : int
        Start of the first incomplete record, with its header.
    wanted : int
        Size of the incomplete record with its frame; the size of a header if its length is not known.
    broken : str
        Why nothing after ``consumed`` can be read; empty if it can.
    """

    starts: Ints
    ends: Ints
    good: np.ndarray[Any, np.dtype[np.bool_]]
    consumed: int
    wanted: int = HEAD
    broken: str = ""


def scan(data: bytes, size: int) -> Scan:
    """Return the records in the first ``size`` bytes of a block, which must begin with a record.

    ``data`` must have :data:`PAD` after these bytes.
    """
    starts: list[int] = []
    at, wanted = 0, HEAD
    while at + HEAD <= size:
        (length,) = _length_at(data, at)
        end = at + _OVERHEAD + length
        if end > size:
            wanted = _OVERHEAD + length
            break
        starts.append(at)
        at = end
    heads = np.array([*starts, at], dtype=np.int64)
    lengths = np.diff(heads) - _OVERHEAD
    told = _words(data, heads[:-1] + 8)
    wrong = np.flatnonzero(told != _of_lengths(lengths))
    if wrong.size:  # the following records were found by a wrong length
        first = int(wrong[0])
        return _checked(data, heads[: first + 1], "the checksum of a record's length is wrong")
    if at + HEAD <= size and not is_framed(data[at : at + HEAD]):
        return _checked(data, heads, "the checksum of a record's length is wrong")
    return _checked(data, heads, wanted=wanted)


def _checked(data: bytes, heads: Ints, broken: str = "", wanted: int = HEAD) -> Scan:
    starts, ends = heads[:-1] + HEAD, heads[1:] - _FOOT
    crcs = [_crc(data[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    good = _masked(np.array(crcs, dtype=np.uint32)) == _words(data, ends)
    return Scan(starts, ends, good, int(heads[-1]), wanted, broken)


def _words(data: bytes, places: Ints) -> Crcs:
    if not len(places):
        return np.empty(0, dtype=np.uint32)
    raw = np.frombuffer(data, dtype=np.uint8)[places[:, None] + np.arange(4)]
    words: Crcs = raw.view("<u4").reshape(-1).astype(np.uint32)
    return words


def is_framed(head: bytes) -> bool:
    """Return whether bytes begin with a record's header: a length and its checksum."""
    if len(head) < HEAD:
        return False
    crcs = np.array([_crc(bytes(head[:8]))], dtype=np.uint32)
    return int(_masked(crcs)[0]) == int(_crc_at(head, 8)[0])
