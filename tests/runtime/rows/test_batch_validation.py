"""Received batches are validated: no offset may point outside a batch's buffers."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.rows.batch_validation import valid_batch

LISTS = pa.RecordBatch.from_pydict({"x": pa.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], pa.list_(pa.float32()))})
TEXTS = pa.RecordBatch.from_pydict({"x": pa.array(["abc", "def"])})
OFFSETS = struct.pack("<iii", 0, 3, 6)


def as_it_arrives(batch: pa.RecordBatch, offsets: bytes) -> pa.RecordBatch:
    """Send a batch through an Arrow stream with its offsets replaced."""
    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), batch.schema) as stream:
        stream.write_batch(batch)
    sent = sink.getvalue().to_pybytes()
    assert sent.count(OFFSETS) == 1
    return pa.ipc.open_stream(pa.py_buffer(sent.replace(OFFSETS, offsets))).read_next_batch()


@pytest.mark.parametrize("batch", [LISTS, TEXTS], ids=["lists", "text"])
@pytest.mark.parametrize("offsets", [(0, 10**8, 6), (0, 3, 10**8), (0, -5, 6), (-(10**8), 3, 6), (0, 3, -1), (6, 3, 0)])
def test_offsets_outside_the_buffers_are_refused(batch: pa.RecordBatch, offsets: tuple[int, ...]) -> None:
    """Such offsets used to crash the process: text was read far outside its memory."""
    with pytest.raises(FeedFailed, match="the received bytes are not valid rows: .*(?:ffset|spanned)"):
        valid_batch(as_it_arrives(batch, struct.pack("<iii", *offsets)), batch.schema)


@pytest.mark.parametrize("batch", [LISTS, TEXTS, LISTS.slice(1), LISTS.slice(0, 0)], ids=str)
def test_valid_rows_are_unchanged(batch: pa.RecordBatch) -> None:
    assert valid_batch(batch, batch.schema) is batch


def test_rows_of_another_schema_than_their_stream_and_empty_batches_are_refused() -> None:
    with pytest.raises(FeedFailed, match="other columns"):
        valid_batch(LISTS, TEXTS.schema)
    with pytest.raises(FeedFailed, match="must have a record batch, got none"):
        valid_batch(None, TEXTS.schema)
