"""Files without a name that a process holds open for its child processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

__all__ = ["HeldFiles", "can_hold_files"]


def can_hold_files() -> bool:
    """Whether child processes can reach the open files of their parent, as on Linux."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class HeldFiles:
    """Files in memory and on the disk, which are gone with the last process that holds them, however it ends.

    Parameters
    ----------
    inherited : sequence of int
        :attr:`descriptors` of a parent process that this one has inherited, to begin with.

    Examples
    --------
    >>> files = HeldFiles()
    >>> files.add_in_memory("note")
    >>> with open(files.places[0], "r+b") as file:
    ...     file.write(b"one")
    3
    >>> files.close()
    """

    def __init__(self, inherited: Sequence[int] = ()) -> None:
        self._files = list(inherited)

    def add_in_memory(self, name: str) -> None:
        """Add an empty file in memory; the name is seen in the list of open files only."""
        self._files.append(os.memfd_create(name))

    def add_on_disk(self, directory: str | None = None) -> None:
        """Add an empty file on the disk.

        Parameters
        ----------
        directory : str, optional
            Where it takes space. By default the temporary directory.

        Raises
        ------
        OSError
            If it cannot be made there.
        """
        with tempfile.TemporaryFile(dir=directory) as file:
            self._files.append(os.dup(file.fileno()))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files, in the order in which they were added."""
        return tuple(self._files)

    @property
    def places(self) -> list[str]:
        """Where a child process finds the files, in the order in which they were added."""
        return [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]

    def close(self) -> None:
        """Release the memory and the disk space."""
        for file in self._files:
            os.close(file)
        self._files.clear()
