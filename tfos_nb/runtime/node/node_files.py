"""The files of a node that outlive its processes: states, rows, and which process uses them.

::

    Spark's task ── inherited ──▶ supervisor 1 ──▶ TF process 1
                 ── inherited ──▶ supervisor 2 ──▶ TF process 2, after the task has ended TF process 1

The task that holds a node's slot creates them, so that a node whose supervisor was killed needs neither rows from Spark
nor a state from its peers. A supervisor without such a task creates them itself. The files have no names, so they are
gone with the last process that holds them, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Sequence

import psutil

from tfos_nb.runtime.control.processes import kill_group, ticks_at_start
from tfos_nb.runtime.feed.kept_rows import KeptFiles
from tfos_nb.runtime.host.held_files import HeldFiles, can_hold_files
from tfos_nb.runtime.recovery.memory_state import MOST_FITS, StateMemory
from tfos_nb.runtime.storage.paths import spill_directory

__all__ = ["NodeFiles"]

_PROCESS = struct.Struct("!qq")  # its id, and when it was started, since ids are used again
_ENDED_WITHIN, _LOOK_SECONDS = 5.0, 0.01  # the kernel may take a moment to end a killed process


class NodeFiles:
    """Create a node's files, or take over those that another process has created.

    Parameters
    ----------
    inherited : sequence of sequences of int
        :attr:`descriptors` of the process that has created them, if this one has inherited them.

    Examples
    --------
    >>> files = NodeFiles()
    >>> again = NodeFiles(inherited=files.descriptors)
    >>> again.states == files.states, again.rows == files.rows
    (True, True)
    >>> files.close()
    """

    def __init__(self, inherited: Sequence[Sequence[int]] = ()) -> None:
        states, loop, finished, rows, validation, process = inherited or ((), (), (), (), (), ())
        disk = spill_directory()  # the temporary directory may be in memory
        self._states = StateMemory(disk, states)
        self._loop_states = StateMemory(disk, loop)
        self._finished = HeldFiles(finished)
        self._rows = KeptFiles(disk, rows)
        self._validation = KeptFiles(disk, validation)
        self._process = HeldFiles(process)
        if not process and can_hold_files():
            self._process.add_in_memory("tfos_nb-process")
            for _ in range(MOST_FITS):
                self._finished.add_on_disk(disk)

    @property
    def descriptors(self) -> tuple[tuple[int, ...], ...]:
        """The open files, for a child process that inherits them."""
        return tuple(one.descriptors for one in self._all)

    @property
    def _all(self) -> tuple[StateMemory | HeldFiles | KeptFiles, ...]:
        return self._states, self._loop_states, self._finished, self._rows, self._validation, self._process

    @property
    def states(self) -> list[str]:
        """Where a child process finds the memory of a fit's states."""
        return self._states.places

    @property
    def loop_states(self) -> list[str]:
        """Where a child process finds the memory of the states of a loop of the user's."""
        return self._loop_states.places

    @property
    def finished_fits(self) -> list[str]:
        """Where a child process finds the last states of fits that have ended."""
        return self._finished.places

    @property
    def rows(self) -> list[str]:
        """Where a child process finds the rows."""
        return self._rows.places

    @property
    def validation_rows(self) -> list[str]:
        """Where a child process finds the validation rows."""
        return self._validation.places

    def used_by(self, pid: int) -> None:
        """Record which process uses them."""
        for file in self._process.descriptors:
            if ticks := ticks_at_start(pid):  # else it has ended already
                os.pwrite(file, _PROCESS.pack(pid, ticks), 0)

    def end_user(self) -> bool:
        """End the process that uses them, whose supervisor has ended; return False if it does not end.

        Another process must not share the files with it.
        """
        for file in self._process.descriptors:
            said = os.pread(file, _PROCESS.size, 0)
            if len(said) == _PROCESS.size:
                return _ends(*_PROCESS.unpack(said))
        return True

    def close(self) -> None:
        """Release the memory and the disk space, unless another process holds the files too."""
        for files in self._all:
            files.close()


def _ends(pid: int, since: int) -> bool:
    deadline, never = time.monotonic() + _ENDED_WITHIN, threading.Event()
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if ticks_at_start(pid) != since:
            return True
        kill_group(process)
        while process.status() != psutil.STATUS_ZOMBIE:  # its parent may take a second to wait for it
            if time.monotonic() > deadline:
                return False
            never.wait(_LOOK_SECONDS)
    return True
