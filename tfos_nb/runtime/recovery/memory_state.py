"""A node's last training state, in memory that its supervisor holds: it outlives the process that made it.

::

    supervisor: memory A, memory B ◀── written in turn ── TF process of generation 1
                                   ─── read ────────────▶ TF process of generation 2

The memory has no name in any file system. Its user's processes reach it as the supervisor's open files, and it is gone
with the supervisor, however that ends. One of the two is always whole: a process may be killed while it writes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LastState", "State", "StateMemory"]

_HEAD = struct.Struct("!8sQQQ")  # what it is, epochs, passes, bytes of the index
_WHOLE = b"tfos_nb1"
_COPIES = 2


class StateMemory:
    """The supervisor's end: it holds the memory. Without Linux there is none."""

    def __init__(self) -> None:
        self._files = [os.memfd_create(f"tfos_nb-state-{copy}") for copy in range(_COPIES)] if _has_memory() else []

    @property
    def places(self) -> list[str]:
        """Where a child finds it."""
        return [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]

    def close(self) -> None:
        """Give it back."""
        for file in self._files:
            os.close(file)
        self._files.clear()


def _has_memory() -> bool:
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


@dataclass(frozen=True)
class State:
    """Arrays, and how far the program had come with them.

    ``index`` names each array's type and shape, ``data`` are their bytes in turn.
    """

    epoch: int
    passes: int
    index: list[list[Any]]
    data: list[memoryview]


class LastState:
    """The process's end.

    Parameters
    ----------
    places : sequence of str
        :attr:`StateMemory.places`.

    Examples
    --------
    >>> import numpy as np
    >>> memory = StateMemory()
    >>> LastState(memory.places).put(3, 3, [np.arange(4.0)])
    >>> state = LastState(memory.places).newest()
    >>> state.epoch, np.frombuffer(state.data[0])
    (3, array([0., 1., 2., 3.]))
    >>> memory.close()
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._places = list(places)

    def put(self, epoch: int, passes: int, arrays: Iterable[Any]) -> None:
        """Write a state over the older one of the two; NumPy arrays of numbers.

        Raises
        ------
        OSError
            If there is not enough memory; the other one is as it was.
        """
        import numpy as np

        arrays = [np.asarray(array, order="C") for array in arrays]
        index = json.dumps([[array.dtype.name, list(array.shape)] for array in arrays]).encode()
        place = min(self._places, key=_epochs_in)
        with open(place, "r+b", buffering=0) as file:
            file.truncate(0)
            try:
                file.seek(_HEAD.size)
                for part in (index, *(array.reshape(-1).view(np.uint8) for array in arrays)):
                    _write(file, memoryview(part))
                file.seek(0)
                file.write(_HEAD.pack(_WHOLE, epoch, passes, len(index)))  # last: now it is whole
            except OSError:
                file.truncate(0)
                raise

    def newest(self) -> State | None:
        """Return the later state that is whole; None if there is none."""
        found = sorted(((_epochs_in(place), place) for place in self._places), reverse=True)
        states = (_state_in(place) for epochs, place in found if epochs >= 0)
        return next((state for state in states if state is not None), None)

    def clear(self) -> None:
        """Forget what there is."""
        for place in self._places:
            with contextlib.suppress(OSError), open(place, "r+b") as file:
                file.truncate(0)


def _epochs_in(place: str) -> int:
    """Return the epochs of the state in a memory; -1 if it has none that is whole."""
    with open(place, "rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_WHOLE):
        return -1
    return int(_HEAD.unpack(head)[1])


def _state_in(place: str) -> State | None:
    """Read a state; None if its parts do not fit together: then the process that wrote it had gone wrong."""
    with open(place, "rb") as file:
        _, epoch, passes, length = _HEAD.unpack(file.read(_HEAD.size))
        content = memoryview(file.read())
    try:
        index = json.loads(bytes(content[:length]))
        data, start = [], length
        for name, shape in index:
            end = start + _bytes_of(name, shape)
            data.append(content[start:end])
            start = end
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return State(epoch, passes, index, data) if start == len(content) else None


def _write(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]  # the system writes two gigabytes at a time


def _bytes_of(name: str, shape: Sequence[int]) -> int:
    import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it; TensorFlow brings it
    import numpy as np

    kind = np.dtype(name)
    if kind.hasobject or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name} and {shape} do not describe an array of numbers")
    return kind.itemsize * math.prod(shape)
