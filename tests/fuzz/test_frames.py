"""Invalid frames, datagrams and memory from a faulty process of a node."""

from __future__ import annotations

import contextlib
import io
import queue
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ENVIRONMENT
from tests.fuzz.inputs import any_message, bytes_of_any_kind, examples, messages, mutated
from tfos_nb.runtime.control import wire
from tfos_nb.runtime.control.lifecycle import MainStarted, NodeEnded, NodeJob
from tfos_nb.runtime.control.processes import Channel, read_frame
from tfos_nb.runtime.control.reports import FeedStatus, ReportBox, StepReport
from tfos_nb.runtime.node.process import Exited, NodeProcess
from tfos_nb.runtime.node.warm_process import Fork
from tfos_nb.runtime.recovery.memory_state import _HEAD, _WHOLE, LastState, StateMemory, StateVersion

SECONDS = 20.0


def framed(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("!Q", len(data) if length is None else length) + data


lengths = st.sampled_from([0, 1, 8, 2**16, 2**31, 2**32, 2**40, 2**63, 2**64 - 1])
frames = st.lists(
    any_message.map(wire.encode).map(framed)
    | bytes_of_any_kind.map(framed)
    | st.builds(framed, st.binary(max_size=9), lengths),
    max_size=4,
).map(b"".join)


@examples(150)
@given(arrived=frames | mutated(frames))
def test_a_pipe_yields_messages_or_a_value_error_and_allocates_only_what_arrived(
    arrived: bytes,
) -> None:
    stream, taken = io.BytesIO(arrived), []
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            while (message := read_frame(stream)) is not None:
                taken.append(message)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    at = 0
    for message in taken:  # each is the content of a frame with the right length
        (length,) = struct.unpack_from("!Q", arrived, at)
        assert repr(wire.decode(arrived[at + 8 : at + 8 + length])) == repr(message)
        at += 8 + length


@examples(80)
@given(before=st.lists(any_message, max_size=3), garbage=frames, whole=st.booleans())
def test_a_channel_gives_every_message_before_the_garbage_and_no_other(
    before: list[Any], garbage: bytes, whole: bool
) -> None:
    ours, theirs = Channel.pair()
    try:
        theirs.sendall(b"".join(framed(wire.encode(message)) for message in before))
        theirs.sendall(garbage if whole else garbage[:-1])
        theirs.close()
        heard = []
        with contextlib.suppress(ValueError):
            for message in ours:
                heard.append(message)  # noqa: PERF402 - those before an error count too
        assert [repr(one) for one in heard[: len(before)]] == [repr(message) for message in before]
    finally:
        ours.close()


class Forks:
    """Replaces the process that forks nodes: it starts a process that writes the given bytes, and then stays."""

    SCRIPT = (
        "import socket, sys, threading; "
        "socket.socket(fileno=int(sys.argv[1])).sendall(bytes.fromhex(sys.argv[2])); threading.Event().wait()"
    )

    def __init__(self, says: bytes) -> None:
        self._says = says

    def fork(self, order: Fork, fds: tuple[int, int]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", self.SCRIPT, str(fds[0]), self._says.hex()]
        return subprocess.Popen(command, env=ENVIRONMENT, pass_fds=fds, stdout=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize(
    "garbage", [framed(b"\xc1"), framed(b"", 2**63), framed(wire.encode(1)[:-1], 0)], ids=["noise", "huge", "nothing"]
)
def test_a_node_that_sends_bytes_that_are_no_message_is_ended_with_a_reason(tmp_path: Any, garbage: bytes) -> None:
    """Otherwise the cluster would wait for a result that has arrived and could not be decoded."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    heard: list[Any] = []
    job = NodeJob("worker:0", "c", 0, "0", "h", 1)
    says = framed(wire.encode(MainStarted("worker:0"))) + garbage
    process = NodeProcess(
        job,
        directory=str(tmp_path / "s"),
        temporary=str(tmp_path),
        host="h",
        events=events,
        pass_on=heard.append,
        warm=Forks(says),  # type: ignore[arg-type]
    )
    try:
        process.listen()
        while not isinstance(event := events.get(timeout=SECONDS), Exited):
            pass
        assert heard == [MainStarted("worker:0")]
        [ended] = [word for word in process.last_messages(event.returncode) if isinstance(word, NodeEnded)]
        assert (ended.signal, "sent bytes that are not a message" in ended.note) == ("SIGKILL", True)
    finally:
        process.end()
        process._channel.close()
        process._reports._socket.close()
        assert process._process.stdout is not None
        process._process.stdout.close()


@examples(80)
@given(datagrams=st.lists(messages(StepReport) | messages(FeedStatus) | any_message | bytes_of_any_kind, max_size=6))
def test_a_datagram_that_is_no_report_is_skipped_and_later_ones_are_taken(datagrams: list[Any]) -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with theirs, ours:
        box = ReportBox(ours)
        taker = threading.Thread(target=box.run, daemon=True)
        taker.start()
        for one in datagrams:
            theirs.send(one if isinstance(one, bytes) and one else wire.encode(one))
        last = StepReport(epoch=3, epoch_end=True)
        theirs.send(wire.encode(last))
        theirs.send(b"")  # as if it were closed
        taker.join(SECONDS)
        assert not taker.is_alive()
        reports, feed = box.empty()
    ends = [one for one in datagrams if isinstance(one, StepReport) and one.epoch_end]
    assert list(map(repr, reports))[-1] == repr(last)
    assert set(map(repr, ends)) <= set(map(repr, reports))
    states = [one for one in datagrams if isinstance(one, FeedStatus)]
    if states:
        assert isinstance(feed, FeedStatus)


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def memory() -> Iterator[StateMemory]:
    memory = StateMemory()
    yield memory
    memory.close()


def content_of(state: Any) -> Any:
    return state and (state.moment, state.passes, state.index, [bytes(part) for part in state.data], state.rest)


arrays = st.lists(
    st.builds(np.zeros, st.lists(st.integers(0, 3), max_size=2).map(tuple), st.sampled_from(["float32", "int64", "?"])),
    max_size=3,
)


@examples(80)
@given(older=arrays, newer=arrays, kept=st.floats(0, 1, exclude_max=True), head=st.booleans())
def test_an_incomplete_state_is_ignored_and_the_older_one_is_read(
    memory: StateMemory, older: Any, newer: Any, kept: float, head: bool
) -> None:
    """It is cut off anywhere, or its head is missing, as if its process was killed while it wrote."""
    last = LastState(memory.places)
    last.clear()
    last.put(StateVersion(1), 10, older)
    before = content_of(last.newest())
    last.put(StateVersion(2), 20, newer, b"the rest")
    place = max(memory.places, key=lambda place: Path(place).read_bytes()[: _HEAD.size])
    with open(place, "r+b") as file:
        whole = file.read()
        if head:
            file.truncate(int(kept * len(whole)))
        else:
            file.seek(0)
            file.write(bytes(_HEAD.size))
    assert content_of(last.newest()) == before


@examples(150)
@given(
    written=st.tuples(*[st.integers(0, 2**64 - 1)] * 5, *[st.integers(0, 40) | st.just(2**63)] * 2),
    rest=st.binary(max_size=60)
    | st.sampled_from(
        [b'[["float32", [1]]]abcd', b'[["O", [1]]]12345678', b'[["f4", [-1]]]', b'[["i8", [1e9]]]', b"[" * 40]
    ),
)
def test_memory_with_any_content_is_a_consistent_state_or_none(
    memory: StateMemory, written: tuple[int, ...], rest: bytes
) -> None:
    last = LastState(memory.places)
    last.clear()
    with open(memory.places[0], "r+b") as file:
        file.write(_HEAD.pack(_WHOLE, *written) + rest)
    state = last.newest()
    if state is not None:
        for part, (name, shape) in zip(state.data, state.index, strict=True):
            assert np.frombuffer(part, name).reshape(shape).dtype.hasobject is False
    last.put(StateVersion(5), 5, [np.arange(3)])  # later states can still be kept
    assert content_of(last.newest()) is not None
