"""Access URLs through fsspec, because TensorFlow itself opens only few kinds of them.

TensorFlow itself supports paths, ``file://``, ``gs://`` and ``ram://``. For other URLs, such as ``hdfs://``, it writes
to this host's disk, and the files are copied from there. :class:`Draft` copies files that are written once, and
:class:`tfos_nb.runtime.storage.log_mirror.LogMirror` files that grow.
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
from tfos_nb.redaction import without_password
from tfos_nb.runtime.storage.paths import hadoop_conf_dirs, is_forbidden, is_local

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
_LOOK_SECONDS = 60.0  # seconds within which a place must answer before a program begins

_T = TypeVar("_T")
_sign_at = time.monotonic()


class Unreachable(TfosError, OSError):
    """A URL cannot be opened here. The message says what to install or to set."""


class _Silent(OSError):
    """No server answers, or a server of another protocol does, so that installing a client would not help."""


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case; empty for a path.

    Examples
    --------
    >>> scheme_of("hdfs://nn:8020/models"), scheme_of("/models")
    ('hdfs', '')
    """
    return url.partition("://")[0].lower() if "://" in url else ""


def tensorflow_opens(url: str) -> bool:
    """Return whether TensorFlow itself can read and write at a path or URL."""
    return scheme_of(url) in _TENSORFLOW_OPENS


def refuse_unknown(url: str) -> None:
    """Check the form and the scheme of a path or URL, without access to it.

    Raises
    ------
    Unreachable
        If it is a URL with only one slash after its scheme, or fsspec does not support its scheme on any host.

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
        before = f"{nearly[1]}://{'/' if nearly[1] in ('file', *_HADOOP) else ''}"  # these need no host
        raise Unreachable(f"{nearly[1]}:/…: a URL has two slashes after its scheme, as in {before}models")
    for one in scheme.split("::"):  # fsspec's file systems may be chained
        if one in (*_TENSORFLOW_OPENS, *_HADOOP):
            continue
        try:
            fsspec.get_filesystem_class(one)
        except ValueError:
            like = difflib.get_close_matches(one, [*_HADOOP, *fsspec.available_protocols()], 1)
            meant = f"; did you mean {like[0]}://?" if like else "; correct it, or install its package for fsspec"
            raise Unreachable(f"{_place(url)}: no file system is known for {one}://{meant}") from None
        except ImportError:  # the package may be installed on the nodes
            pass


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it.

    Raises
    ------
    Unreachable
        If no client is installed for it, or its server does not answer.
    """
    import fsspec

    scheme = scheme_of(url)
    try:
        if scheme in _HADOOP:
            _find_hadoop_conf()
        _check_reachable(url)
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError, RuntimeError) as error:  # hdfs-native raises RuntimeError
        reason = str(error).partition("\n")[0] or type(error).__name__
        here = f"{_place(url)} cannot be opened on {socket.gethostname()}"
        advice = "" if isinstance(error, _Silent) else _advice(scheme)
        raise Unreachable(f"{here}: {reason}{advice}") from error
    return system, str(path)


def _place(url: str) -> str:
    """Return scheme and host of a URL, without a password and without the path, which may contain secrets."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"


def _advice(scheme: str) -> str:
    if scheme not in _HADOOP:
        return ". Install the package that opens it on every host of the cluster"
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
    """Set ``HADOOP_CONF_DIR`` to this host's configuration, because the HDFS client reads only this variable."""
    for directory in hadoop_conf_dirs()[:1]:
        os.environ["HADOOP_CONF_DIR"] = directory


def _check_reachable(url: str) -> None:
    """Check that a URL's server answers, because HDFS clients try for minutes before they report an error."""
    with contextlib.suppress(ValueError):  # the port is not a number
        there = urlsplit(url)
        if there.hostname and there.port:
            _answers(there.hostname, there.port, scheme_of(url) in _HADOOP)


@functools.cache
def _answers(host: str, port: int, is_hadoop: bool) -> None:
    """Check that a server listens, and that the port is not that of a NameNode's web page.

    A Hadoop RPC server answers an HTTP request with a message that this is its IPC port
    (``org.apache.hadoop.ipc.Server``). A server that sends nothing within 1 s may be a busy NameNode, and is accepted.

    Raises
    ------
    _Silent
        If no server or a web server answers.
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
    with contextlib.suppress(OSError):  # on a closed connection or a timeout, use what was received
        there.settimeout(_REPLY_SECONDS)
        there.sendall(_HTTP_QUESTION)
        while len(said) < 4096 and (more := there.recv(4096)):
            said += more
    return said


def answered_within(seconds: float, place: str, call: Callable[[], _T]) -> _T:
    """Return the result of a call, or raise an error if it takes too long.

    Parameters
    ----------
    seconds : float
        Maximum time.
    place : str
        Path or URL that the call accesses, for the message.
    call : callable
        Called without arguments, in a thread.

    Raises
    ------
    Unreachable
        If the call has not returned in time. Its thread continues in the background.
    Exception
        The error of the call.
    """
    found: list[_T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
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
    """Return the monotonic time at which a store to which this process copies files last accepted data."""
    return _sign_at


def _note_sign() -> None:
    global _sign_at
    _sign_at = time.monotonic()


@functools.cache
def _signs() -> Any:
    """Return the callback that fsspec calls for each part of a file and each file that was sent."""
    from fsspec.callbacks import Callback

    class Signs(Callback):  # type: ignore[misc]
        def call(self, hook_name: Any = None, **kwargs: Any) -> None:
            _note_sign()

        def branched(self, path_1: str, path_2: str, **kwargs: Any) -> Any:
            return self

    return Signs()


def _put(system: Any, source: str, place: str, *, recursive: bool) -> None:
    """Copy a local file or directory to a store, recording the time of each progress (:func:`last_sign`)."""
    system.put(source, place, recursive=recursive, callback=_signs())
    _note_sign()


def rename_over(system: Any, source: str, place: str) -> None:
    """Rename a file or directory and replace an existing one of the new name, which HDFS does only on request."""
    if system.isdir(source) and system.exists(place):  # otherwise the directory would be moved into the existing one
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
    """Copy a local directory to a store, so that it has the file ``last`` only when it is complete.

    A rename in an object store copies file by file, so it is not atomic. Therefore this file is copied last.

    Parameters
    ----------
    system : fsspec.AbstractFileSystem
        File system of the store.
    folder : str
        The local directory. The file ``last`` is removed from it.
    part : str
        Temporary path in the store, in the same directory as ``place``.
    place : str
        Final path in the store.
    last : str
        Name of a file without which readers ignore the directory.
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
    """Replace a local directory by another one. The old one is renamed first, because its removal takes time."""
    aside = os.path.join(os.path.dirname(place), f".part-{uuid.uuid4().hex}")
    os.rename(place, aside)
    os.rename(source, place)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def writing(place: str) -> Iterator[None]:
    """Context manager that raises a permission error as TfosError with advice.

    Raises
    ------
    TfosError
        If this host may not write to ``place``.
    """
    try:
        yield
    except OSError as error:
        if not is_forbidden(error):
            raise
        raise _unwritable(place, error) from error


def check_places(model_dir: str, log_dir: str, *, writes: bool) -> None:
    """Check a program's directories before it begins, so that a wrong one does not fail after the training.

    Parameters
    ----------
    model_dir, log_dir : str
        Paths or URLs; empty if there is none.
    writes : bool
        Whether this host writes to ``model_dir``, so that a file is written there for a test. ``gs://`` and
        ``ram://``, which TensorFlow opens itself, are not tested.

    Raises
    ------
    TfosError
        If a directory cannot be opened or written on this host, or does not answer within 60 s.
    """
    for place in (model_dir, log_dir):
        if not tensorflow_opens(place):
            answered_within(_LOOK_SECONDS, place, functools.partial(file_system, place))
    if model_dir and writes and (scheme_of(model_dir) in ("", "file") or not tensorflow_opens(model_dir)):
        answered_within(_LOOK_SECONDS, model_dir, functools.partial(_try_to_write, model_dir))


def _try_to_write(place: str) -> None:
    """Write a temporary file as a test. A local directory is not created, because the program may save nothing."""
    system, path = file_system(place)
    try:
        if is_local(system):
            with tempfile.TemporaryFile(dir=_nearest(path)):
                return
        probe = f"{path.rstrip('/')}/.part-{uuid.uuid4().hex}"
        system.makedirs(path, exist_ok=True)
        system.pipe_file(probe, b"")
        system.rm_file(probe)
    except (OSError, RuntimeError) as error:  # hdfs-native raises RuntimeError
        raise _unwritable(without_password(place), error) from error


def _nearest(path: str) -> str:
    """Return the path itself if it exists, or else its nearest parent that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _unwritable(place: str, error: Exception) -> TfosError:
    return TfosError(
        f"{place} cannot be written on {socket.gethostname()}: {error}. Give a model_dir that this host may write"
    )


class Draft:
    """Context manager with a temporary path for a file or directory, which is then copied to a URL atomically.

    If the block raises an error, nothing is copied.

    Parameters
    ----------
    url : str
        A URL, or a local path. For a local path, the temporary path is in the same directory, and is renamed.

    Attributes
    ----------
    path : str
        Temporary path to write to. It has the suffix of the URL, from which Keras derives the format.

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
