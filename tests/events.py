"""An event file as TensorBoard reads it, written without TensorFlow."""

from __future__ import annotations

import os

__all__ = ["write_a_number"]


def write_a_number(folder: str | os.PathLike[str], tag: str = "loss", value: float = 0.5) -> None:
    """Write one scalar under a directory, which is made."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    os.makedirs(folder, exist_ok=True)
    writer = EventFileWriter(os.fspath(folder))
    writer.add_event(Event(step=1, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))
    writer.close()
