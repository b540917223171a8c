"""Write and read the file by which the Jupyter server finds a cluster's kernel, and filter the headers between them.

``<jupyter runtime dir>/tfos_nb/<cluster id>.json`` names the unix socket on which the kernel answers for that cluster.
Only the user can enter the directory and open the socket. The file contains no secret.

This module also has, for both ends, the list of headers of a page's request that are sent through that socket and on to
TensorBoard. Cookies, tokens and authorization are not in it.

The Jupyter server imports this module too, so it imports neither Spark nor TensorFlow.
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
from typing import Any
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
    "read_own",
    "runtime_directory",
    "stays_below",
    "write_own",
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
    """Place where a kernel answers for a cluster: the path of its socket, and its process id.

    ``name`` is the cluster's name. ``machine`` identifies the machine or container in which ``pid`` is valid.
    """

    id: str
    name: str
    socket: str
    pid: int
    machine: str = field(default_factory=machine)

    @property
    def alive(self) -> bool:
        """Whether the kernel's process and its socket exist; always True for another machine, which is not checked."""
        if self.machine != machine():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's process has the id now, so check only the socket
        return os.path.exists(self.socket)


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Return only the headers of a request that TensorBoard needs, and none that identifies or authenticates the user.

    Examples
    --------
    >>> passed_on({"Accept": "*/*", "Cookie": "secret", "Authorization": "token secret"})
    {'Accept': '*/*'}
    """
    return {name: headers[name] for name in _PASSED_ON if name in headers}


def answered(headers: Mapping[str, str]) -> dict[str, str]:
    """Return only the headers of an answer that a page may get: no cookies of Jupyter's origin, none of one hop."""
    return {name: headers[name] for name in _ANSWERED if name in headers}


def below(base: str, path: str, query: Iterable[tuple[str, str]]) -> URL:
    """Return the URL of a requested path below ``base``, without Jupyter's token in the query.

    The URL is not normalized like one that a user types: normalization would turn a part ``.<tab>.`` into ``..``.

    Examples
    --------
    >>> below("http://kernel/tb", "data/tags", [("run", "a b"), ("token", "secret")])
    URL('http://kernel/tb/data/tags?run=a+b')
    """
    asked = urlencode([(name, value) for name, value in query if name not in _NOT_ASKED])
    return URL(f"{base}/{quote(path)}" + (f"?{asked}" if asked else ""), encoded=True)


def stays_below(path: str) -> bool:
    """Return whether a path stays below its base: no part of it is ``.`` or ``..`` after it is unquoted twice.

    Examples
    --------
    >>> stays_below("data/plugin/timeseries/tags"), stays_below("../stop"), stays_below("..%2fstop")
    (True, False, False)
    """
    parts = re.split(r"[/\\]", unquote(unquote(path)))
    return not any(part in (".", "..") for part in parts)


def is_id(text: str) -> bool:
    """Return whether a text can be a cluster's id. No other text is used as part of a path."""
    return _ID.fullmatch(text) is not None


def runtime_directory() -> Path:
    """Return the directory of the files, which is the same for the server and the kernel.

    For a user without a home directory, such as in a container that runs under an arbitrary user id, it is in the
    temporary directory.
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
    """Make a directory that only this user can enter, or make an existing one private; return it.

    Raises
    ------
    TfosError
        If it is not a directory, or belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise TfosError(f"{path} is not a directory of yours: remove it, or set JUPYTER_RUNTIME_DIR to another place")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def write_own(path: Path, content: Mapping[str, object]) -> None:
    """Write a file as JSON that only this user can read; a reader finds the old one or the new one, each whole."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent)  # made with mode 0600
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    os.replace(draft, path)


def read_own(path: Path, most: int) -> Any:
    """Return the content of a file of :func:`write_own`, of at most ``most`` characters.

    Raises
    ------
    OSError
        If it cannot be read, or belongs to another user.
    ValueError
        If it is not JSON.
    """
    with path.open() as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        return json.loads(file.read(most))


def publish(place: Place) -> None:
    """Write a cluster's file for the Jupyter server.

    The files of kernels that have ended are kept for a while, because a page may still ask for their clusters.
    """
    directory = private_directory(runtime_directory())
    _sweep(directory, keep=place.id)
    write_own(directory / f"{place.id}.json", asdict(place))


def forget(cluster_id: str) -> None:
    """Remove a cluster's file."""
    with contextlib.suppress(OSError):
        (runtime_directory() / f"{cluster_id}.json").unlink()


def find(cluster_id: str) -> Place | None:
    """Return a cluster's place from its file; None if there is no valid file of this user."""
    if not is_id(cluster_id):
        return None
    try:
        place = Place(**read_own(runtime_directory() / f"{cluster_id}.json", _MOST_BYTES))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    right = all(isinstance(part, str) for part in (place.name, place.socket, place.machine)) and type(place.pid) is int
    return place if right and 0 < place.pid < 1 << 31 and place.id == cluster_id else None


def _sweep(directory: Path, keep: str) -> None:
    """Remove the files of kernels that ended long ago. A page may still need newer files to show what happened.

    Hosts may share a home directory. Files of another host's kernels are removed by their age.
    """
    files = sorted(directory.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_KEPT_FILES:]:
        place = find(file.stem)
        old = time.time() - file.stat().st_mtime > _ELSEWHERE_KEPT
        if file.stem != keep and (place is None or not place.alive or (place.machine != machine() and old)):
            with contextlib.suppress(OSError):
                file.unlink()
