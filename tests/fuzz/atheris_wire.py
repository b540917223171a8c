"""Fuzz the decoding of messages with atheris, which chooses inputs by the code that they reach.

``python -m tests.fuzz.atheris_wire -max_total_time=300``: the options are libFuzzer's. It needs atheris (``pip install
atheris``), which none of the project's extras installs. It runs msgpack in pure Python, to include its branches.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path

os.environ["MSGPACK_PUREPYTHON"] = "1"

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["msgpack.fallback", "tfos_nb.runtime.control.wire"]):
    from tfos_nb.runtime.control import wire
    from tfos_nb.runtime.feed.feed_rows import FeedRows
    from tfos_nb.runtime.feed.pass_schedule import FeedState

import pyarrow as pa

from tests.fuzz.inputs import KINDS
from tests.fuzz.test_message_bytes import check_right
from tests.runtime.control.test_wire import MESSAGES
from tfos_nb.errors import FeedFailed
from tfos_nb.runtime.feed.messages import FeedBegins, Reached
from tfos_nb.runtime.feed.transfer import FeedTicket, _Chunk
from tfos_nb.runtime.rows.spans import merged, rows_within

ROWS = pa.RecordBatch.from_pydict({"id": pa.array(range(5), pa.int64())})


def try_message(data: bytes) -> None:
    """Decode any bytes: the result is data, a valid message, or a ValueError."""
    try:
        came = wire.decode(data)
    except ValueError:
        return
    check_right(came)


def try_chunk(data: bytes) -> None:
    """Announce rows with any message: they are read from where it says, or refused."""
    feed = FeedRows(FeedState(FeedBegins(1, 1, False)), threading.Condition(), 1 << 40, None)
    try:
        chunk = wire.expect(_Chunk, data)
        feed.accept(0, chunk.spans, ROWS, known=chunk.known)
    except (ValueError, FeedFailed):
        assert feed.rows_in == 0
        return
    assert chunk.spans == merged(chunk.spans)
    assert rows_within(chunk.spans, 0, chunk.spans[-1][1]) == 5
    assert feed.lane(0).reached == Reached(chunk.spans[-1][1], *chunk.known)


def try_one(data: bytes) -> None:
    """Choose the test by the first byte."""
    (try_chunk if data[:1] == b"\x01" else try_message)(data[1:])


def write_seeds(directory: Path) -> None:
    """Write valid inputs to begin with."""
    directory.mkdir(parents=True, exist_ok=True)
    chunk, data = _Chunk(((3, 5), (8, 11)), (2, 3), (5, 7)), {"a": (1, [2.5, None, b"x"])}
    for number, message in enumerate([*MESSAGES, chunk, FeedTicket(1, 2), data]):
        mark = b"\x01" if isinstance(message, _Chunk) else b"\x00"
        (directory / f"seed-{number}").write_bytes(mark + wire.encode(message))


def main() -> None:
    """Run libFuzzer until it is told to stop, or finds something."""
    assert len(KINDS) > 40, "the registry is there"
    with tempfile.TemporaryDirectory(prefix="atheris-") as corpus:
        write_seeds(Path(corpus))
        atheris.Setup([*sys.argv, corpus], try_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
