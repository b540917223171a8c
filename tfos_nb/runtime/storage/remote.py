"""Access URLs through fsspec, since TensorFlow itself opens few kinds of them.

TensorFlow itself supports paths, ``file://``, ``gs://`` and ``ram://``. For other places, such as ``hdfs://``, it
writes to this host's disk, and the files are copied from there. :class:`Draft` is for files that are written once, and
:class:`tfos_nb.runtime.storage.log_mirror.LogMirror` for files that grow.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tfos_nb.errors import TfosError
from tfos_nb.runtime.storage.paths import hadoop_conf_dirs, is_forbidden, is_local
from tfos_nb.truncate import without_password

__all__ = [
    "Draft",
    "Unreachable",
    "answered_within",
    "check_places",
    "file_system",
    "last_sign",
    "put_whole",
    "refuse_unknown",
    "rename_over",
    "scheme_of",
    "tensorflow_opens",
    "writing",
]

_TENSORFLOW_OPENS = ("", "file", "gs", "ram")
_HADOOP = ("hdfs", "viewfs")
_NEARLY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_KNOCK_SECONDS = 10.0
_REPLY_SECONDS = 1.0
_HTTP_QUESTION = b"GET / HTTP/1.0\r\n\r\n"
_WRONG_DOOR = b"Hadoop IPC port"  # "It looks like you are making an HTTP request to your Hadoop IPC port."
_SAVED_MODEL = "saved_model.pb"  # a directory without it is no SavedModel
_LOOK_SECONDS = 60.0  # in which a place must answer before a program begins

_T = TypeVar("_T")
_sign_at = time.monotonic()


class Unreachable(TfosError, OSError):
    """No file system is known here for a URL; the message says what to install or to set."""


class _Silent(OSError):
    """No server answers, or another kind of server does: a client would not help."""


def scheme_of(url: str) -> str:
    """Return what is before ``://``; empty for a path.

    Examples
    --------
    >>> scheme_of("hdfs://nn:8020/models"), scheme_of("/models")
    ('hdfs', '')
    """
    return url.partition("://")[0].lower() if "://" in url else ""


def tensorflow_opens(url: str) -> bool:
    """Whether TensorFlow reads and writes there by itself."""
    return scheme_of(url) in _TENSORFLOW_OPENS


def refuse_unknown(url: str) -> None:
    """Look at a place before anything is done with it: what no host can open is known here, too.

    Raises
    ------
    Unreachable
        If it is nearly a URL, or its scheme is none that fsspec knows.

    Examples
    --------
    >>> refuse_unknown("hdfs:///models"), refuse_unknown("/models"), refuse_unknown("simplecache::s3://bucket/models")
    (None, None, None)
    >>> refuse_unknown("hdfs:/models")
    Traceback (most recent call last):
    ...
    tfos_nb.runtime.storage.remote.Unreachable: hdfs:/…: a URL has two slashes after its scheme, as in hdfs:///models
    """
    import fsspec

    scheme = scheme_of(url)
    if nearly := _NEARLY.match(url):
        before = f"{nearly[1]}://{'/' if nearly[1] in ('file', *_HADOOP) else ''}"  # a host may be left out there
        raise Unreachable(f"{nearly[1]}:/…: a URL has two slashes after its scheme, as in {before}models")
    for one in scheme.split("::"):  # fsspec's file systems may be chained
        if one in (*_TENSORFLOW_OPENS, *_HADOOP):
            continue
        try:
            fsspec.get_filesystem_class(one)
        except ValueError:
            like = difflib.get_close_matches(one, [*_HADOOP, *fsspec.available_protocols()], 1)
            meant = f"; did you mean {like[0]}://?" if like else ""
            raise Unreachable(f"{_place(url)}: no file system is known for {one}://{meant}") from None
        except ImportError:  # the package may be where the nodes are
            pass


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it.

    Raises
    ------
    Unreachable
        If there is none here.
    """
    import fsspec

    scheme = scheme_of(url)
    try:
        if scheme in _HADOOP:
            _find_hadoop_conf()
        _knock(url)
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError, RuntimeError) as error:  # the last one is how hdfs-native says it
        reason = str(error).partition("\n")[0] or type(error).__name__
        here = f"{_place(url)} cannot be opened on {socket.gethostname()}"
        advice = "" if isinstance(error, _Silent) else _advice(scheme)
        raise Unreachable(f"{here}: {reason}{advice}") from error
    return system, str(path)


def _place(url: str) -> str:
    """Return the beginning of a URL, without a password and without a path that may hold one."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"


def _advice(scheme: str) -> str:
    if scheme not in _HADOOP:
        return ". The package that opens it has to be there on every host of the cluster"
    if importlib.util.find_spec("hdfs_native") is not None:
        return (
            ". A URL that names no host, or a nameservice, needs HADOOP_CONF_DIR, where core-site.xml says which it is"
        )
    return (
        ". Python needs an HDFS client there, and on every executor: pip install hdfs-native brings one; pyarrow "
        "takes the libhdfs.so of a Hadoop distribution instead (HADOOP_HOME, CLASSPATH of `hadoop classpath --glob`). "
        "A URL that names no host, or a nameservice, also needs HADOOP_CONF_DIR"
    )


def _find_hadoop_conf() -> None:
    """Let the HDFS client, which looks at the environment alone, find the configuration that a YARN container has."""
    for directory in hadoop_conf_dirs()[:1]:
        os.environ["HADOOP_CONF_DIR"] = directory


def _knock(url: str) -> None:
    """Check that a URL's server answers: HDFS clients try for minutes before they report that none does."""
    with contextlib.suppress(ValueError):  # no port is no number of one
        there = urlsplit(url)
        if there.hostname and there.port:
            _answers(there.hostname, there.port, scheme_of(url) in _HADOOP)


@functools.cache
def _answers(host: str, port: int, is_hadoop: bool) -> None:
    """Check that a server listens, and that the port is not that of a NameNode's web page.

    Hadoop's RPC servers tell a browser that it has come to the wrong port (``org.apache.hadoop.ipc.Server``), and
    nobody else says that. Who says nothing within a moment may be a NameNode that is busy.
    """
    wanted = ", which has to be the NameNode's RPC address" if is_hadoop else ""
    try:
        with socket.create_connection((host, port), _KNOCK_SECONDS) as there:
            said = _said_to_a_browser(there) if is_hadoop else b""
    except OSError as error:
        raise _Silent(f"no server answers at {host}:{port}{wanted} ({error})") from error
    if said.startswith(b"HTTP/") and _WRONG_DOOR not in said:
        raise _Silent(f"a web server answers at {host}:{port}{wanted}: fs.defaultFS in core-site.xml, often port 8020")


def _said_to_a_browser(there: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(OSError):  # who hangs up or is slow has said what he has
        there.settimeout(_REPLY_SECONDS)
        there.sendall(_HTTP_QUESTION)
        while len(said) < 4096 and (more := there.recv(4096)):
            said += more
    return said


def answered_within(seconds: float, place: str, call: Callable[[], _T]) -> _T:
    """Return what a call of a file system returns, or say that the place does not answer.

    Raises
    ------
    Unreachable
        If it has not returned within so many seconds. The call continues in a thread that is not waited for.
    """
    found: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            raised.append(error)

    thread = threading.Thread(target=run, name="tfos_nb look", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise Unreachable(
            f"{without_password(place)} has not answered on {socket.gethostname()} for {seconds:g} s. Check that the "
            "store is up and that this host reaches it, or give another place"
        )
    return found[0]


def last_sign() -> float:
    """Return when a place that this process copies to has answered last, by the monotonic clock."""
    return _sign_at


def _note_sign() -> None:
    global _sign_at
    _sign_at = time.monotonic()


@functools.cache
def _signs() -> Any:
    """Return what fsspec calls for each part of a file that has gone, and for each file."""
    from fsspec.callbacks import Callback

    class Signs(Callback):  # type: ignore[misc]
        def call(self, hook_name: Any = None, **kwargs: Any) -> None:
            _note_sign()

        def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Any:
            return self

    return Signs()


def _put(system: Any, source: str, place: str, *, recursive: bool) -> None:
    """Copy a local file or directory to a place, noting each sign of life."""
    system.put(source, place, recursive=recursive, callback=_signs())
    _note_sign()


def rename_over(system: Any, source: str, place: str) -> None:
    """Rename what was written beside its place. What is there gives way: HDFS has to be told so."""
    if system.isdir(source) and system.exists(place):  # otherwise it would get into the one that is there
        if is_local(system):
            _rename_over(source, place)
            return
        system.rm(place, recursive=True)
    options = {"overwrite": True} if type(system).__module__.startswith("hdfs_native") else {}
    try:
        system.mv(source, place, recursive=True, **options)
    except OSError:
        if not system.exists(source) or not system.exists(place):
            raise
        system.rm(place, recursive=True)
        system.mv(source, place, recursive=True)


def put_whole(system: Any, folder: str, part: str, place: str, last: str) -> None:
    """Copy a local directory to a place, so that it is whole or is none, which is told by its ``last`` file.

    A rename in an object store copies file by file. ``part`` is beside the place; ``folder`` loses its ``last`` file.
    """
    with tempfile.TemporaryDirectory(prefix="tfos_nb-last-", dir=os.path.dirname(folder)) as aside:
        os.rename(os.path.join(folder, last), os.path.join(aside, last))
        _put(system, folder, part, recursive=True)
        if system.exists(f"{place}/{last}"):
            system.rm_file(f"{place}/{last}")
        rename_over(system, part, place)
        _note_sign()
        system.put_file(os.path.join(aside, last), f"{place}/{last}")


def _rename_over(source: str, place: str) -> None:
    """Rename a local directory. What is there goes aside first: to remove it takes a while, and may be broken off."""
    aside = os.path.join(os.path.dirname(place), f".part-{uuid.uuid4().hex}")
    os.rename(place, aside)
    os.rename(source, place)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def writing(place: str) -> Iterator[None]:
    """Say of a place that this host may not write what to do about it.

    Raises
    ------
    TfosError
        If what is done in the block is forbidden.
    """
    try:
        yield
    except OSError as error:
        if not is_forbidden(error):
            raise
        raise _unwritable(place, error) from error


def check_places(model_dir: str, log_dir: str, *, writes: bool) -> None:
    """Look at the places that a program was given before it begins, and not when all is trained.

    Parameters
    ----------
    model_dir, log_dir : str
        Empty if there is none.
    writes : bool
        Whether this host is to write to the former.

    Raises
    ------
    TfosError
        If one cannot be opened on this host, or not be written, or does not answer: the message says why.
    """
    for place in (model_dir, log_dir):
        if not tensorflow_opens(place):
            answered_within(_LOOK_SECONDS, place, functools.partial(file_system, place))
    if model_dir and writes and (scheme_of(model_dir) in ("", "file") or not tensorflow_opens(model_dir)):
        answered_within(_LOOK_SECONDS, model_dir, functools.partial(_try_to_write, model_dir))


def _try_to_write(place: str) -> None:
    """Write a file that is gone at once. On this host no directory is made for it: a program may not save anything."""
    system, path = file_system(place)
    try:
        if is_local(system):
            with tempfile.TemporaryFile(dir=_nearest(path)):
                return
        probe = f"{path.rstrip('/')}/.part-{uuid.uuid4().hex}"
        system.makedirs(path, exist_ok=True)
        system.pipe_file(probe, b"")
        system.rm_file(probe)
    except (OSError, RuntimeError) as error:  # the latter of hdfs-native
        raise _unwritable(without_password(place), error) from error


def _nearest(path: str) -> str:
    """Return the directory that is there: this one, or the one in which it would be made."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _unwritable(place: str, error: Exception) -> TfosError:
    return TfosError(
        f"{place} cannot be written on {socket.gethostname()}: {error}. Give a model_dir that this host may write"
    )


class Draft:
    """A local place for a file or a directory that belongs at a URL; it is copied there whole, or not at all.

    Parameters
    ----------
    url : str
        A URL, or a path; then it is written beside its place and renamed.

    Attributes
    ----------
    path : str
        Where to write. It has the ending of the URL, by which Keras knows the format.

    Examples
    --------
    >>> with Draft("hdfs://nn:8020/models/digits") as draft:  # doctest: +SKIP
    ...     model.export(draft.path)
    """

    def __init__(self, url: str) -> None:
        self._system, self._place = file_system(url)
        self._place = self._place.rstrip("/")
        above, name = os.path.split(self._place)
        self._part = f"{above}/.{uuid.uuid4().hex}{os.path.splitext(name)[1]}"
        self._scratch = ""
        self.path = self._part

    def __enter__(self) -> Draft:
        self._system.makedirs(os.path.dirname(self._place), exist_ok=True)
        if not is_local(self._system):
            self._scratch = tempfile.mkdtemp(prefix="tfos_nb-draft-")
            self.path = os.path.join(self._scratch, os.path.basename(self._part))
        return self

    def __exit__(self, kind: type[BaseException] | None, *of: object) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _publish(self) -> None:
        if not self._scratch:
            rename = _rename_over if os.path.isdir(self._place) else os.replace
            rename(self._part, self._place)
        elif os.path.isfile(os.path.join(self.path, _SAVED_MODEL)):
            put_whole(self._system, self.path, self._part, self._place, _SAVED_MODEL)
        else:
            _put(self._system, self.path, self._part, recursive=os.path.isdir(self.path))
            rename_over(self._system, self._part, self._place)
