"""A node's last training states, in memory that others hold: they outlive the process that made them.

::

    its holders: memory A, memory B ◀── written in turn ── TF process of generation 1
                                   ─── read ────────────▶ TF process of generation 2

The memory has no name in any file system. The node's supervisor holds it as open files, and Spark's task does
(:mod:`tfos_nb.runtime.node.node_files`). It is gone with the last of them, however that ends. One of the two is always
whole: a process may be killed while it writes. A state for which the memory is too small is written to two files on the
host's disk instead, which have no names either.

:func:`write_state` and :func:`read_state` are both ends of the format. A state that is saved in the ``model_dir`` has
it, too (recovery.stored_states).

The states are those of one ``fit`` after another. When the next one begins, the last state of the one before is copied
to a file on the host's disk (:class:`FinishedFits`), which has no name either.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfos_nb.runtime.host.held_files import HeldFiles, can_hold_files
from tfos_nb.runtime.host.memory import Memory
from tfos_nb.runtime.storage.checkpoint_directory import FIT

__all__ = [
    "MOST_FITS",
    "FinishedFits",
    "LastState",
    "State",
    "StateMemory",
    "StateVersion",
    "read_state",
    "write_state",
]

_log = logging.getLogger(__name__)

# What it is; fit, epoch, generation, step; passes; bytes of the index and of the rest
_HEAD = struct.Struct("!8sQQQQQQQ")
_WHOLE = b"tfos_nb3"
_COPIES = 2
_RESERVE = 0.2  # of the free memory is left to TensorFlow and to the host
MOST_FITS = 32  # whose last states are kept: each takes the disk that the model takes


@dataclass(frozen=True, order=True)
class StateVersion:
    """When a state was saved: after so many epochs, or after a step of the next one in a generation. Later is greater.

    ``fit`` numbers the fits of ``main``, from 0.

    Examples
    --------
    >>> StateVersion(2) < StateVersion(2, 1, 40) < StateVersion(2, 2, 10) < StateVersion(3) < StateVersion(0, fit=1)
    True
    >>> StateVersion(2).name, StateVersion(2, 1, 40).name, StateVersion(2, 1, 40, fit=1).name
    ('', 'fit/00000002-0001-00000040', 'fit-2/00000002-0001-00000040')
    >>> StateVersion(2).directory, StateVersion.of("00000002-0001-00000040")
    ('00000002', StateVersion(fit=0, epoch=2, generation=1, step=40))
    """

    fit: int = field(default=0, kw_only=True)  # the first one, since moments are compared by it first
    epoch: int
    generation: int = 0
    step: int = 0

    @property
    def folder(self) -> str:
        """Directory of the fit's states among the cluster's checkpoints."""
        return FIT if not self.fit else f"{FIT}-{self.fit + 1}"

    @property
    def name(self) -> str:
        """Name of the state among nodes and driver, if it was saved within an epoch."""
        return f"{self.folder}/{self.directory}" if self.step else ""

    @property
    def directory(self) -> str:
        """Name of the state's directory, among those of its fit or its loop."""
        within = f"-{self.generation:04d}-{self.step:08d}" if self.step else ""
        return f"{self.epoch:08d}{within}"

    @classmethod
    def of(cls, directory: str, fit: int = 0) -> StateVersion:
        """Return when the state of a directory was saved."""
        return cls(*map(int, directory.split("-")), fit=fit)


class StateMemory:
    """The side of the process that holds the states' memory. Only Linux has it.

    Parameters
    ----------
    directory : str, optional
        Where the files are that hold what the memory cannot. By default the temporary directory.
    inherited : sequence of int
        :attr:`descriptors` of the process that has created the memory, if this one has inherited it.
    """

    def __init__(self, directory: str | None = None, inherited: Sequence[int] = ()) -> None:
        self._files = HeldFiles(inherited)
        if not inherited and can_hold_files():
            for copy in range(_COPIES):
                self._files.add_in_memory(f"tfos_nb-state-{copy}")
            for _ in range(_COPIES):
                self._files.add_on_disk(directory)
            self._files.add_in_memory("tfos_nb-state-said")

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files, for a child process that inherits them."""
        return self._files.descriptors

    @property
    def places(self) -> list[str]:
        """Where a child process finds the memory: its two copies, the two files on the disk, and what was said."""
        return self._files.places

    def close(self) -> None:
        """Free the memory and the files."""
        self._files.close()


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
    free_memory : callable, optional
        Returns how many bytes of memory are free.

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

    def __init__(self, places: Sequence[str], free_memory: Callable[[], int] = lambda: Memory.now().free) -> None:
        self._places = list(places[: 2 * _COPIES])
        self._memory, self._disk = self._places[:_COPIES], self._places[_COPIES:]
        self._said = places[-1]  # has content if an earlier process has said that the memory is too small
        self._free_memory = free_memory

    def put(self, moment: StateVersion, passes: int, arrays: Iterable[Any], rest: bytes = b"") -> None:
        """Write a state over the older one of the two; NumPy arrays of numbers.

        If the memory is too small, it goes to the disk. What is in the memory is freed with the second one there: until
        the driver knows the rows of the newest state, training can continue from the one before only.

        Raises
        ------
        OSError
            If there is not enough memory or disk; the other one is as it was.
        """
        arrays = list(arrays)
        place = min(self._memory, key=_when)
        if self._disk and not self._has_memory_for(sum(array.nbytes for array in arrays), place):
            place = min(self._disk, key=_when)
        write_state(place, moment, passes, arrays, rest)
        if place in self._disk and min(map(_when, self._disk)) > max(map(_when, self._memory)):
            for other in self._memory:
                self._truncate(other)

    def _has_memory_for(self, size: int, place: str) -> bool:
        """Return whether a state of so many bytes may be written to a place in memory, over the one that is there."""
        has = os.stat(place).st_size
        if size <= has:  # as most states: its memory is used again, and so the system is not asked
            return True
        free = self._free_memory() + has
        if size <= free * (1 - _RESERVE):
            return True
        if not os.stat(self._said).st_size:
            with open(self._said, "wb") as file:
                file.write(b"1")
            _log.warning(
                "the state of %.1f GB does not fit into the free memory of %.1f GB: this node keeps it in a file "
                "on its host's disk, and saves less often",
                size / 1e9,
                free / 1e9,
            )
        return False

    def newest(self, accepts: Callable[[StateVersion], bool] = lambda moment: True) -> State | None:
        """Return the latest state that is whole and was saved at a moment that is accepted; None if there is none."""
        found = sorted((when, place) for place in self._places if (when := _when(place)) is not _NEVER)
        states = (read_state(place) for when, place in reversed(found) if accepts(when))
        return next((state for state in states if state is not None), None)

    def drop_after(self, moment: StateVersion) -> None:
        """Forget states that are later: the training goes on from an earlier one."""
        for place in self._places:
            if _when(place) > moment:
                self._truncate(place)

    def drop_from(self, fit: int) -> None:
        """Delete all states of a fit and of later ones."""
        for place in self._places:
            if _when(place).fit >= fit:
                self._truncate(place)

    def clear(self) -> None:
        """Delete all states."""
        self.drop_from(0)

    @staticmethod
    def _truncate(place: str) -> None:
        with contextlib.suppress(OSError), open(place, "r+b") as file:
            file.truncate(0)


class FinishedFits:
    """The last state of each fit that has ended while another has begun, on the host's disk.

    Parameters
    ----------
    places : sequence of str
        An empty file for each fit, which other processes hold.

    Examples
    --------
    >>> import numpy as np
    >>> from tfos_nb.runtime.host.held_files import HeldFiles
    >>> files = HeldFiles()
    >>> files.add_on_disk()
    >>> FinishedFits(files.places).put(StateVersion(3), 3, [np.arange(4.0)])
    >>> finished = FinishedFits(files.places)
    >>> finished.has(0), finished.has(1), finished.of(0).moment.epoch
    (True, False, 3)
    >>> files.close()
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._places = list(places)

    def put(self, moment: StateVersion, passes: int, arrays: Sequence[Any], rest: bytes = b"") -> None:
        """Write the last state of a fit.

        Raises
        ------
        OSError
            If there is not enough disk.
        """
        write_state(self._places[moment.fit], moment, passes, arrays, rest)

    def has(self, fit: int) -> bool:
        """Return whether the last state of a fit is there."""
        return fit < len(self._places) and _when(self._places[fit]) is not _NEVER

    def of(self, fit: int) -> State | None:
        """Return the last state of a fit; None if it is not there."""
        return read_state(self._places[fit]) if self.has(fit) else None


_NEVER = StateVersion(-1, fit=-1)


def _when(place: str) -> StateVersion:
    """Return when the state in a memory was saved; ``_NEVER`` if it has none that is whole."""
    with open(place, "rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_WHOLE):
        return _NEVER
    _, fit, *when = _HEAD.unpack(head)[:5]
    return StateVersion(*when, fit=fit)


def write_state(place: str, moment: StateVersion, passes: int, arrays: Sequence[Any], rest: bytes) -> None:
    """Write a state to a file, over what is there; NumPy arrays of numbers. It is whole or not there at all.

    Raises
    ------
    OSError
        If the file cannot be written; then it is empty.
    """
    import numpy as np

    arrays = [np.asarray(array, order="C") for array in arrays]
    index = json.dumps([[array.dtype.name, list(array.shape)] for array in arrays]).encode()
    with open(place, "r+b", buffering=0) as file:
        try:
            file.write(bytes(len(_WHOLE)))  # what is there is no state any more, and its memory is used again
            file.seek(_HEAD.size)
            for part in (index, *(array.reshape(-1).view(np.uint8) for array in arrays), rest):
                _write(file, memoryview(part))
            file.truncate()
            file.seek(0)
            when = moment.fit, moment.epoch, moment.generation, moment.step
            file.write(_HEAD.pack(_WHOLE, *when, passes, len(index), len(rest)))  # last: now it is whole
        except OSError:
            file.truncate(0)
            raise


def read_state(place: str) -> State | None:
    """Read a state from a file; None if there is none, or it is incomplete or damaged."""
    with open(place, "rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_WHOLE):
            return None
        _, fit, *when, passes, length, behind = _HEAD.unpack(head)
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
    return State(StateVersion(*when, fit=fit), passes, index, data, bytes(content[start:])) if whole else None


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
