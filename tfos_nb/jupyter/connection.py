"""Location of a cluster: the small file with which a kernel tells the Jupyter server, and both ends of it.

``<jupyter runtime dir>/tfos_nb/<cluster id>.json`` names the unix socket on which the kernel answers for that cluster.
The directory is the user's alone, and so is the socket, so only the user can open it. The file contains no secret.

What of a page's request goes through that socket, and on to TensorBoard, is decided here for both ends: a few headers
by name. Cookies, tokens and authorization are not among them.

Loaded into the Jupyter server too: neither Spark nor TensorFlow is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlencode

from yarl import URL

from tfos_nb.errors import TfosError
from tfos_nb.runtime.control.processes import machine

__all__ = [
    "Place",
    "answered",
    "below",
    "find",
    "forget",
    "is_id",
    "passed_on",
    "private_directory",
    "publish",
    "runtime_directory",
    "stays_below",
]

_ID = re.compile(r"[a-z0-9]{8,64}")
_MOST_BYTES = 10_000
_KEPT_FILES = 200
_ELSEWHERE_KEPT = 30 * 86_400.0  # seconds
_PASSED_ON = (
    "Accept",
    "Accept-Encoding",
    "Accept-Language",
    "Cache-Control",
    "Content-Type",
    "If-Modified-Since",
    "If-None-Match",
    "Range",
)
_ANSWERED = (
    "Cache-Control",
    "Content-Disposition",
    "Content-Encoding",
    "Content-Length",
    "Content-Range",
    "Content-Security-Policy",
    "Content-Type",
    "ETag",
    "Expires",
    "Last-Modified",
    "Location",
    "Vary",
    "X-Content-Type-Options",
)
_NOT_ASKED = ("token", "_xsrf")


@dataclass(frozen=True)
class Place:
    """Where the kernel answers for a cluster: the socket's path, and the kernel's process.

    ``name`` is what the user calls the cluster; ``machine`` is whose process numbers are meant.
    """

    id: str
    name: str
    socket: str
    pid: int
    machine: str = field(default_factory=machine)

    @property
    def alive(self) -> bool:
        """Whether the kernel's process and its socket exist; for another machine's this cannot be known."""
        if self.machine != machine():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's process has the number now; the socket decides
        return os.path.exists(self.socket)


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Leave of a request's headers those that TensorBoard needs: nothing that says who asks, or proves it.

    Examples
    --------
    >>> passed_on({"Accept": "*/*", "Cookie": "secret", "Authorization": "token secret"})
    {'Accept': '*/*'}
    """
    return {name: headers[name] for name in _PASSED_ON if name in headers}


def answered(headers: Mapping[str, str]) -> dict[str, str]:
    """Leave of an answer's headers those that a page may get: no cookie for Jupyter's origin, nothing of one hop."""
    return {name: headers[name] for name in _ANSWERED if name in headers}


def below(base: str, path: str, query: Iterable[tuple[str, str]]) -> URL:
    """Return the address of a path that was asked for, after this base; Jupyter's token is left out of the query.

    It is not put right as an address that a user writes is: of a part ``.<tab>.`` that would make one that leads up.

    Examples
    --------
    >>> below("http://kernel/tb", "data/tags", [("run", "a b"), ("token", "secret")])
    URL('http://kernel/tb/data/tags?run=a+b')
    """
    asked = urlencode([(name, value) for name, value in query if name not in _NOT_ASKED])
    return URL(f"{base}/{quote(path)}" + (f"?{asked}" if asked else ""), encoded=True)


def stays_below(path: str) -> bool:
    """Whether a path stays below the address it is put after: no part of it, once unquoted, leads up or away.

    Examples
    --------
    >>> stays_below("data/plugin/timeseries/tags"), stays_below("../stop"), stays_below("..%2fstop")
    (True, False, False)
    """
    parts = re.split(r"[/\\]", unquote(unquote(path)))
    return not any(part in (".", "..") for part in parts)


def is_id(text: str) -> bool:
    """Whether this can be a cluster's id; nothing else becomes part of a path."""
    return _ID.fullmatch(text) is not None


def runtime_directory() -> Path:
    """Return the directory of the files; server and kernel have the same one.

    A user without a home directory, such as a container's that runs under any number, has one in the temporary
    directory.
    """
    from jupyter_core.paths import jupyter_runtime_dir

    elsewhere = Path(tempfile.gettempdir(), f"tfos_nb-runtime-{os.getuid()}")
    try:
        path = Path(jupyter_runtime_dir()) / "tfos_nb"
    except RuntimeError:
        return elsewhere
    there = next(one for one in (path, *path.parents) if one.exists())
    return path if there == path or os.access(there, os.W_OK | os.X_OK) else elsewhere


def private_directory(path: Path) -> Path:
    """Make a directory that only this user can enter, or check that it is one.

    Raises
    ------
    TfosError
        If it belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise TfosError(f"{path} is not a directory of yours: remove it, or set JUPYTER_RUNTIME_DIR to another place")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def publish(place: Place) -> None:
    """Tell the Jupyter server where a cluster is. Files of kernels that are gone stay a while: a page may ask."""
    directory = private_directory(runtime_directory())
    _sweep(directory, keep=place.id)
    descriptor, draft = tempfile.mkstemp(dir=directory)  # made with mode 0600
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(place), file)
    os.replace(draft, directory / f"{place.id}.json")


def forget(cluster_id: str) -> None:
    """Take a cluster's file away."""
    with contextlib.suppress(OSError):
        (runtime_directory() / f"{cluster_id}.json").unlink()


def find(cluster_id: str) -> Place | None:
    """Look a cluster up; None if there is no such file, or it is not one of this user's."""
    if not is_id(cluster_id):
        return None
    path = runtime_directory() / f"{cluster_id}.json"
    try:
        with path.open() as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            place = Place(**json.loads(file.read(_MOST_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    right = all(isinstance(part, str) for part in (place.name, place.socket, place.machine)) and type(place.pid) is int
    return place if right and 0 < place.pid < 1 << 31 and place.id == cluster_id else None


def _sweep(directory: Path, keep: str) -> None:
    """Remove the files of kernels that ended long ago; those of late still tell a page what happened.

    A home directory may be another host's too: of its kernels the files go by their age.
    """
    files = sorted(directory.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_KEPT_FILES:]:
        place = find(file.stem)
        old = time.time() - file.stat().st_mtime > _ELSEWHERE_KEPT
        if file.stem != keep and (place is None or not place.alive or (place.machine != machine() and old)):
            with contextlib.suppress(OSError):
                file.unlink()
