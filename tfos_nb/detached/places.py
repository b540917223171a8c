"""Files that say where the processes of detached clusters answer: one for each cluster, which only this user can read.

``$XDG_DATA_HOME/tfos_nb/detached/<cluster id>.json`` is not in the runtime directory, which is emptied when the host
restarts: :func:`tfos_nb.attach` then still says what was lost. The process's output is in ``<cluster id>.log``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tfos_nb.errors import PlanError
from tfos_nb.jupyter.connection import is_id, private_directory, read_own, write_own
from tfos_nb.records.run import Process
from tfos_nb.runtime.control.processes import remove_left_behind

__all__ = [
    "LOST",
    "RUNNING",
    "SOCKETS",
    "DetachedPlace",
    "detached_directory",
    "find",
    "forget",
    "model_dirs",
    "place_of",
    "places",
    "publish",
    "runs",
]

SOCKETS = "detached"
"""The kind of the directories in which the processes have their sockets."""

RUNNING, LOST = "RUNNING", "LOST"
"""Status of a cluster that has not ended; and of one whose process has gone before its end."""

_MOST_BYTES = 100_000
_KEPT = 30 * 86_400.0  # seconds for which a file of a lost process, or of one that ended on another host, is kept


@dataclass(frozen=True)
class DetachedPlace:
    """Where a detached cluster's process answers, and what is known of the cluster without it.

    Parameters
    ----------
    id, name : str
        The cluster's.
    process : Process
        The process that runs its driver.
    version : str
        The version of this package that it runs. Another one may have written fields that this one does not know, and
        left out others: what stands before this one is what every version has.
    socket : str
        Path of its unix socket, on its host.
    launched : float
        When it was launched, in seconds since 1970.
    model_dir : str
        Where the cluster saves.
    run : str
        The name of its directory among the ``checkpoints`` there.
    status : str
        ``"RUNNING"``, or how it has ended.
    model : str
        Path or URL of the model that ``ctx.save`` has written last; empty without one.
    model_size, model_changed : int
        Size, and modification time in ns, of that file; -1 and 0 for a URL.
    door : dict
        Host, port, certificate and token of the door where a process on an executor answers; empty if it is on the
        host of the kernel that has launched it.
    """

    id: str
    name: str
    process: Process
    version: str
    socket: str = ""
    launched: float = 0.0
    model_dir: str = ""
    run: str = ""
    status: str = RUNNING
    model: str = ""
    model_size: int = -1
    model_changed: int = 0
    door: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def log(self) -> Path:
        """File of the process's output."""
        return detached_directory() / f"{self.id}.log"

    @property
    def is_lost(self) -> bool:
        """Whether its process is known to have gone: it was killed, or its host has restarted.

        Of one on an executor that is known once a kernel has asked for it.
        """
        return self.process.runs() is False or (bool(self.door) and self.status == LOST)

    def forget(self) -> None:
        """Remove the files of a cluster whose process has gone.

        Raises
        ------
        PlanError
            If it still runs, or may run on another host.
        """
        if not self.is_lost and not (self.door and self.status != RUNNING):
            raise PlanError(
                f"{self.name}: its process {self.process.pid} on {self.process.host} may run: close it first"
            )
        forget(self.id)


def detached_directory() -> Path:
    """Return the directory of the files."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return Path(data, "tfos_nb", "detached")


def publish(place: DetachedPlace) -> None:
    """Write a cluster's file."""
    write_own(private_directory(detached_directory()) / f"{place.id}.json", asdict(place))


def find(cluster_id: str) -> DetachedPlace | None:
    """Return a cluster's place from its file; None if there is no valid file of this user."""
    if not is_id(cluster_id):
        return None
    try:
        found = read_own(detached_directory() / f"{cluster_id}.json", _MOST_BYTES)
        place = place_of(found)
        door = {"host": "", "port": 0, "certificate": "", "token": "", **place.door}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    texts = (
        place.name, place.socket, place.version, place.model_dir, place.run, place.status, place.process.host,
        place.model, place.process.system,
    )  # fmt: skip
    counts = (place.process.pid, place.process.ticks, place.model_size, place.model_changed)
    times = (place.launched, place.process.started)
    numbers = all(type(one) is int for one in counts) and all(type(one) in (int, float) for one in times)
    numbers = numbers and type(door.pop("port")) is int
    texts = (*texts, *door.values())
    return place if numbers and all(isinstance(text, str) for text in texts) and place.id == cluster_id else None


def place_of(found: dict[str, Any]) -> DetachedPlace:
    """Return the place that is made of these fields; those of other versions are left out."""
    process = Process(**_known(Process, found["process"]))
    return DetachedPlace(**_known(DetachedPlace, found | {"process": process}))


def _known(kind: type, found: dict[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in found.items() if name in names}


def places() -> Iterator[DetachedPlace]:
    """Yield the places of this user's detached clusters, the newest first; remove the files of those lost long ago."""
    known = (find(file.stem) for file in detached_directory().glob("*.json"))
    for place in sorted((one for one in known if one is not None), key=lambda one: one.launched, reverse=True):
        is_old = time.time() - place.launched > _KEPT
        if is_old and (place.is_lost or (place.status != RUNNING and not place.process.runs())):
            forget(place.id)
        else:
            yield place if not place.is_lost or place.status != RUNNING else replace(place, status=LOST)


def model_dirs() -> list[str]:
    """Return the model directories of the detached clusters that run."""
    return [place.model_dir for place in _running()]


def runs() -> list[str]:
    """Return the names of the checkpoints' directories of the detached clusters that run on this host."""
    return [place.run for place in _running() if place.process.runs() is True]


def _running() -> list[DetachedPlace]:
    return [place for place in places() if place.status == RUNNING] if detached_directory().exists() else []


def forget(cluster_id: str) -> None:
    """Remove a cluster's files, and the directories of sockets that killed processes have left."""
    remove_left_behind(SOCKETS)
    for suffix in (".json", ".log"):
        with contextlib.suppress(OSError):
            (detached_directory() / f"{cluster_id}{suffix}").unlink()
