"""Find the run whose training a cluster continues that was launched with ``resume=``: on an executor's host.

The driver may not see the ``model_dir``; the executors must.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tfos_nb.redaction import without_password
from tfos_nb.runtime.storage.checkpoint_directory import (
    BACKUP,
    CheckpointDirectory,
    directory_of_run,
    folders_of_fits,
    generation_of,
    is_of_a_whole_epoch,
)

__all__ = ["RESUME_SCHEMA", "Resumable", "ResumeProbe", "find_resumable", "place_of_run"]

RESUME_SCHEMA = "found string"
_RUN = re.compile(r"[0-9a-f]{12}")
_BELOW = re.compile(r"(?P<model_dir>.*)/checkpoints/(?P<run>[0-9a-f]{12})(/.*)?")


@dataclass(frozen=True)
class Resumable:
    """A run with a state from which training can continue.

    Parameters
    ----------
    run : str
        Its name: that of the directory under ``checkpoints``.
    generation : int
        The last generation that has written something there.
    state : str
        The path or URL of its newest state.
    written : float
        When that was written, in seconds since 1970; 0 if it does not say so.
    refused : str
        Why no run can be continued; then all else is empty.
    """

    run: str = ""
    generation: int = 0
    state: str = ""
    written: float = 0.0
    refused: str = ""


def place_of_run(resume: str) -> tuple[str, str]:
    """Return the ``model_dir`` and the name of a run that are in a path of it, such as ``tfos_nb.attach`` names.

    Examples
    --------
    >>> place_of_run("/models/clicks/checkpoints/0123456789ab/fit/00000002")
    ('/models/clicks', '0123456789ab')
    >>> place_of_run("0123456789ab")
    ('', '0123456789ab')

    Raises
    ------
    ValueError
        If it is none.
    """
    if _RUN.fullmatch(resume):
        return "", resume
    found = _BELOW.fullmatch(resume.rstrip("/"))
    if found is None:
        raise ValueError(resume)
    return found["model_dir"], found["run"]


def find_resumable(model_dir: str, run: str = "") -> Resumable:
    """Return the run in a ``model_dir`` that was written last, or the one of this name.

    Raises
    ------
    OSError
        If the directory cannot be read.
    """
    place = f"{model_dir.rstrip('/')}/checkpoints"
    known = [name for name in CheckpointDirectory.at(place).names() if _RUN.fullmatch(name)]
    shown = f"{without_password(place)} on {socket.gethostname()}"
    if run and run not in known:
        listed = f"; there are {', '.join(sorted(known))}" if known else ", and no other"
        return Resumable(refused=f"there is no run {run} in {shown}{listed}")
    found = [one for name in ([run] if run else known) if (one := _newest_of(name, model_dir)) is not None]
    if not found:
        which = f"run {run} in {shown} has no" if run else f"no run in {shown} has a"
        return Resumable(refused=f"{which} state from which training can continue")
    return max(found, key=lambda one: one.written)


def _newest_of(run: str, model_dir: str) -> Resumable | None:
    directory = directory_of_run(model_dir, run)
    usable: list[tuple[float, str]] = []
    generations = [1]
    for place in (directory, *folders_of_fits(directory)):
        states = CheckpointDirectory.at(place)
        with_rows = set(states.rows())
        generations += map(generation_of, with_rows)
        for name, says in states.checkpoints():
            generations.append(int(says["generation"]))
            if is_of_a_whole_epoch(name) or name in with_rows:
                usable.append((float(says.get("written", 0)), f"{place}/{name}"))
    usable += [(written, path) for written, path in _backups(CheckpointDirectory.at(directory), directory)]
    if not usable:
        return None
    written, state = max(usable)
    return Resumable(run, max(generations), state, written)


def _backups(directory: CheckpointDirectory, url: str) -> Iterator[tuple[float, str]]:
    """Yield when each backup of ``BackupAndRestore`` was written, and its path; each worker may have its own."""
    own = [name for name in directory.names() if re.fullmatch(r"worker-\d+", name)]
    for below in ("", *(f"/{name}" for name in own)):
        for name in CheckpointDirectory.at(f"{url}{below}").names():
            if name.startswith(BACKUP) and name.removeprefix(BACKUP).isdecimal():
                path = f"{directory.path}{below}/{name}"
                yield (Path(path).stat().st_mtime if directory.local else 0.0), path


@dataclass(frozen=True)
class ResumeProbe:
    """Spark task that looks for the run on an executor: one row, a :class:`Resumable` as JSON."""

    model_dir: str
    run: str = ""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Look, and yield the row."""
        for _ in batches:
            pass
        try:
            found = find_resumable(self.model_dir, self.run)
        except OSError as error:
            where = f"{without_password(self.model_dir)} cannot be read on {socket.gethostname()}"
            found = Resumable(refused=f"{where}: {error}")
        yield pa.RecordBatch.from_pydict({"found": pa.array([json.dumps(asdict(found))], pa.string())})

    @staticmethod
    def read(found: Any) -> Resumable:
        """Return what the row says."""
        return Resumable(**json.loads(found))
