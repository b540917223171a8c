"""The framing of records: the same bytes as TensorFlow's, and damage is reported by byte."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

import pyarrow as pa
import pytest

from tfos_nb.runtime.tfrecord.files import inflated
from tfos_nb.runtime.tfrecord.framing import PAD, frame, is_framed, scan
from tfos_nb.runtime.tfrecord.reading import blocks

RECORDS = [b"", b"a", b"bc" * 100, b"", b"d" * 5000, b"\0" * 17]


def framed(records: list[bytes]) -> bytes:
    return bytes(frame(pa.array(records, pa.large_binary())).to_pybytes())


def read(data: bytes, size: int = 64) -> tuple[list[bytes], list[int], str]:
    """Return the good records, the offsets of the bad ones, and why reading ended."""
    found: list[bytes] = []
    bad: list[int] = []
    why = ""
    for block in blocks(inflated(io.BytesIO(data)), size):
        for start, end, good in zip(block.scan.starts, block.scan.ends, block.scan.good, strict=True):
            if good:
                found.append(block.data[start:end])
            else:
                bad.append(block.offset + int(start) - 12)
        why = block.broken
    return found, bad, why


@pytest.fixture(scope="module")
def by_tensorflow(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    import tensorflow as tf

    path = tmp_path_factory.mktemp("framing") / "records"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in RECORDS:
            writer.write(record)
    return path.read_bytes()


def test_the_bytes_equal_tensorflows(by_tensorflow: bytes) -> None:
    assert framed(RECORDS) == by_tensorflow


def test_tensorflow_reads_our_records(tmp_path: Path) -> None:
    import tensorflow as tf

    (tmp_path / "records").write_bytes(framed(RECORDS))
    assert [record.numpy() for record in tf.data.TFRecordDataset(str(tmp_path / "records"))] == RECORDS


def test_only_the_records_of_a_slice_are_framed() -> None:
    records = pa.array(RECORDS, pa.large_binary()).slice(1, 3)
    assert bytes(frame(records).to_pybytes()) == framed(RECORDS[1:4])


@pytest.mark.parametrize("size", [12, 13, 64, 4999, 1 << 20])
def test_blocks_of_any_size_give_the_same_records(size: int) -> None:
    assert read(framed(RECORDS), size) == (RECORDS, [], "")


def test_a_file_truncated_anywhere_gives_the_complete_records_before() -> None:
    whole = framed([b"abc", b"", b"0123456789"])
    ends = [0, 19, 35, 61]
    for cut in range(len(whole)):
        found, bad, why = read(whole[:cut])
        assert len(found) == sum(end <= cut for end in ends) - 1
        assert not bad
        assert why == ("" if cut in ends else "the file ends within a record")


def test_a_flipped_bit_in_a_record_loses_only_that_record() -> None:
    data = bytearray(framed([b"abc", b"defg", b"hi"]))
    data[19 + 12 + 2] ^= 1
    assert read(bytes(data)) == ([b"abc", b"hi"], [19], "")


def test_a_flipped_bit_in_a_length_loses_the_rest_of_the_file() -> None:
    data = bytearray(framed([b"abc", b"defg", b"hi"]))
    for byte in range(12):
        broken = bytearray(data)
        broken[19 + byte] ^= 0x40
        assert read(bytes(broken)) == ([b"abc"], [], "the checksum of a record's length is wrong")


def test_a_length_beyond_all_memory_is_reported_as_damage() -> None:
    head = (2**62).to_bytes(8, "little") + b"\0\0\0\0"
    assert scan(head + PAD, len(head)).broken


def test_gzip_and_zlib_are_recognized_by_their_bytes() -> None:
    data = framed(RECORDS)
    assert read(gzip.compress(data)) == (RECORDS, [], "")
    assert read(zlib.compress(data)) == (RECORDS, [], "")
    assert read(gzip.compress(data[:16]) + gzip.compress(data[16:])) == (RECORDS, [], "")


def test_a_record_whose_length_looks_like_gzip_is_not_decompressed() -> None:
    data = framed([b"x" * 0x088B1F])
    assert data[:3] == b"\x1f\x8b\x08"
    assert is_framed(data[:12])
    assert read(data, 1 << 20)[0] == [b"x" * 0x088B1F]


def test_a_truncated_compressed_file_gives_the_records_before() -> None:
    data = gzip.compress(framed([bytes([number]) * 50 for number in range(200)]), compresslevel=0)
    found, _, why = read(data[: len(data) // 2])
    assert found == [bytes([number]) * 50 for number in range(len(found))]
    assert 90 < len(found) < 110
    assert why == "the compressed file ends too early"


def test_a_damaged_byte_in_a_compressed_file_is_reported() -> None:
    data = bytearray(gzip.compress(framed([b"abc" * 50] * 50), compresslevel=0))
    data[-6] ^= 0xFF
    assert "the compressed file is damaged" in read(bytes(data))[2]


def test_highly_compressed_data_is_read_piece_by_piece() -> None:
    records = [b"\0" * 100_000] * 40
    found, bad, why = read(gzip.compress(framed(records)), 1 << 16)
    assert (found == records, bad, why) == (True, [], "")
