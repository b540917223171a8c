"""The frame of a TFRecord: length, its checksum, the record, its checksum.

::

    uint64  length
    uint32  masked CRC-32C of the length
    byte    record[length]
    uint32  masked CRC-32C of the record

All little-endian; a mask rotates the CRC by 15 bits and adds a constant (tensorflow/core/lib/io/record_writer.h).
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
"""What has to follow a block's bytes, so that a number that is cut off is read as zeros and not beyond the end."""

EMPTY = pa.scalar(b"", pa.large_binary())
Ints = np.ndarray[Any, np.dtype[np.int64]]
Crcs = np.ndarray[Any, np.dtype[np.uint32]]


def large_binary(offsets: Ints, data: Any) -> pa.Array:
    """View a buffer as an array of bytes that lie one after the other, without a copy."""
    buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), buffer])


def _masked(crcs: Crcs) -> Crcs:
    rotated: Crcs = (crcs >> np.uint32(15)) | (crcs << np.uint32(17))
    rotated += np.uint32(0xA282EAD8)
    return rotated


def _of_lengths(lengths: Ints) -> Crcs:
    """Return the masked checksum of each length; equal lengths are reckoned once."""
    known, place = np.unique(lengths, return_inverse=True)
    raw = known.astype("<u8").tobytes()
    crcs = [_crc(raw[at : at + 8]) for at in range(0, len(raw), 8)]
    return _masked(np.array(crcs, dtype=np.uint32))[place]


def frame(records: pa.Array) -> pa.Buffer:
    """Return records (``large_binary``, none null) as the bytes of a file.

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
    # The library takes bytes alone, and one piece at a time: the only loop over records.
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
    """The records of a block.

    Attributes
    ----------
    starts, ends : numpy.ndarray
        Where each whole record's message begins and ends, those with a wrong checksum too.
    good : numpy.ndarray
        Whether each record's checksum is right.
    consumed : int
        Where the first record begins that is not whole.
    wanted : int
        How many bytes from there on it needs, as far as its head tells.
    broken : str
        Why nothing after ``consumed`` can be read; empty if all is well so far.
    """

    starts: Ints
    ends: Ints
    good: np.ndarray[Any, np.dtype[np.bool_]]
    consumed: int
    wanted: int = HEAD
    broken: str = ""


def scan(data: bytes, size: int) -> Scan:
    """Find the records in the first ``size`` bytes of a block that begins with one."""
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
    if wrong.size:  # what came after it was found with a wrong length
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
    """Whether some bytes begin with the head of a record."""
    if len(head) < HEAD:
        return False
    crcs = np.array([_crc(bytes(head[:8]))], dtype=np.uint32)
    return int(_masked(crcs)[0]) == int(_crc_at(head, 8)[0])
