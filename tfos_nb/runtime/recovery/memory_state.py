"""A node's last training states, in memory that its supervisor holds: they outlive the process that made them.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LastState", "State", "StateMemory", "StateVersion"]

_HEAD = struct.Struct("!8sQQQQQQ")  # what it is; epoch, generation, step; passes; bytes of the index and of the rest
_WHOLE = b"tfos_nb2"
_COPIES = 2


@dataclass(frozen=True, order=True)
class StateVersion:
    """When a state was saved: after so many epochs, or after a step of the next one in a generation. Later is greater.

    Examples
    --------
    >>> StateVersion(2) < StateVersion(2, 1, 40) < StateVersion(2, 2, 10) < StateVersion(3)
    True
    >>> StateVersion(2).name, StateVersion(2, 1, 40).name
    ('', 'fit-00000002-0001-00000040')
    """

    epoch: int
    generation: int = 0
    step: int = 0

    @property
    def name(self) -> str:
        """Name of the state among nodes and driver, if it was saved within an epoch."""
        return f"fit-{self.epoch:08d}-{self.generation:04d}-{self.step:08d}" if self.step else ""


class StateMemory:
    """The supervisor's side of the states' memory. Only Linux has it."""

    def __init__(self) -> None:
        self._files = [os.memfd_create(f"tfos_nb-state-{copy}") for copy in range(_COPIES)] if _has_memory() else []

    @property
    def places(self) -> list[str]:
        """Place where a child process finds it."""
        return [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]

    def close(self) -> None:
        """Free the memory."""
        for file in self._files:
            os.close(file)
        self._files.clear()


def _has_memory() -> bool:
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


@dataclass(frozen=True)
class State:
    """Arrays, and how far the program had come with them.

    ``index`` names each array's type and shape, ``data`` are their bytes in turn. ``rest`` holds the state's other
    values.
    """

    moment: StateVersion
    passes: int
    index: list[list[Any]]
    data: list[memoryview]
    rest: bytes = b""


class LastState:
    """TensorFlow's process's side of the states' memory.

    Parameters
    ----------
    places : sequence of str
        :attr:`StateMemory.places`.

    Examples
    --------
    >>> import numpy as np
    >>> memory = StateMemory()
    >>> LastState(memory.places).put(StateVersion(3), 3, [np.arange(4.0)])
    >>> state = LastState(memory.places).newest()
    >>> state.moment.epoch, np.frombuffer(state.data[0])
    (3, array([0., 1., 2., 3.]))
    >>> memory.close()
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._places = list(places)

    def put(self, moment: StateVersion, passes: int, arrays: Iterable[Any], rest: bytes = b"") -> None:
        """Write a state over the older one of the two; NumPy arrays of numbers.

        Raises
        ------
        OSError
            If there is not enough memory; the other one is as it was.
        """
        import numpy as np

        arrays = [np.asarray(array, order="C") for array in arrays]
        index = json.dumps([[array.dtype.name, list(array.shape)] for array in arrays]).encode()
        place = min(self._places, key=_when)
        with open(place, "r+b", buffering=0) as file:
            file.truncate(0)
            try:
                file.seek(_HEAD.size)
                for part in (index, *(array.reshape(-1).view(np.uint8) for array in arrays), rest):
                    _write(file, memoryview(part))
                file.seek(0)
                when = moment.epoch, moment.generation, moment.step
                file.write(_HEAD.pack(_WHOLE, *when, passes, len(index), len(rest)))  # last: now it is whole
            except OSError:
                file.truncate(0)
                raise

    def newest(self, accepts: Callable[[StateVersion], bool] = lambda moment: True) -> State | None:
        """Return the latest state that is whole and was saved at a moment that is accepted; None if there is none."""
        found = sorted((when, place) for place in self._places if (when := _when(place)) is not _NEVER)
        states = (_state_in(place) for when, place in reversed(found) if accepts(when))
        return next((state for state in states if state is not None), None)

    def drop_after(self, moment: StateVersion) -> None:
        """Forget states that are later: the training goes on from an earlier one."""
        for place in self._places:
            if _when(place) > moment:
                self._truncate(place)

    def clear(self) -> None:
        """Delete all states."""
        for place in self._places:
            self._truncate(place)

    @staticmethod
    def _truncate(place: str) -> None:
        with contextlib.suppress(OSError), open(place, "r+b") as file:
            file.truncate(0)


_NEVER = StateVersion(-1)


def _when(place: str) -> StateVersion:
    """Return when the state in a memory was saved; ``_NEVER`` if it has none that is whole."""
    with open(place, "rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_WHOLE):
        return _NEVER
    return StateVersion(*_HEAD.unpack(head)[1:4])


def _state_in(place: str) -> State | None:
    """Read a state; None if it is incomplete or damaged."""
    with open(place, "rb") as file:
        _, *when, passes, length, behind = _HEAD.unpack(file.read(_HEAD.size))
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
    whole = start + behind == len(content)
    return State(StateVersion(*when), passes, index, data, bytes(content[start:])) if whole else None


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
