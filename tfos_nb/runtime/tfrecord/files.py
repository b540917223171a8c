"""List TFRecord files, find their partition values, and open them.

A path is local, or a URL of a scheme that fsspec supports. As in Spark, names that begin with ``_`` or ``.`` are
ignored. Files in a directory ``column=value`` have this value in a partition column.
"""

from __future__ import annotations

import os
import posixpath
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import unquote

from tfos_nb.errors import PlanError
from tfos_nb.redaction import without_password
from tfos_nb.runtime.storage import remote
from tfos_nb.runtime.storage.paths import is_hidden, is_local
from tfos_nb.runtime.tfrecord.framing import HEAD, is_framed

__all__ = [
    "NULL_PARTITION", "SUCCESS", "DataFile", "Inflated", "NoFileSystem", "absolute", "file_system", "found",
    "open_file", "partition_directory", "partitions_of", "plain",
]  # fmt: skip

SUCCESS = "_SUCCESS"
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_GLOB = re.compile(r"[*?\[]")
# The characters that Spark and Hive escape in the name of a partition's directory.
_ESCAPED = re.compile(r"[\x00-\x1f\"#%'*/:=?\\\x7f{\[\]^]")
_AUTOMATIC = 32 | zlib.MAX_WBITS  # zlib's code for "detect gzip or zlib"
_PIECE = 1 << 20
# Opens a file by its URL, for reading and decompressed.
Opener = Callable[[str], BinaryIO]


class NoFileSystem(Exception):
    """fsspec does not support such URLs here."""


@dataclass(frozen=True)
class DataFile:
    """File of records.

    Parameters
    ----------
    url : str
        Absolute path or URL.
    size : int
        Size in bytes, compressed.
    partition : tuple of (str, str or None)
        Partition columns and their values, from the names of its directories.
    """

    url: str
    size: int
    partition: tuple[tuple[str, str | None], ...] = ()


def absolute(path: Any) -> str:
    """Return an absolute path or a URL. ``file:`` URLs become paths, and ``~`` is expanded.

    Raises
    ------
    PlanError
        If ``path`` is empty, or neither a string nor ``os.PathLike``.

    Examples
    --------
    >>> absolute("file:/data/a%20b"), absolute("s3://bucket/records/")
    ('/data/a b', 's3://bucket/records')
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise PlanError(f"path must be a path or a URL, got a {type(path).__name__}, {path!r}")
    text = str(os.fspath(path))
    if re.match(r"file:/(?!/[^/])", text):
        text = unquote("/" + text[len("file:") :].lstrip("/"))
    if re.match(r"\w[\w+.-]+:/", text):
        return text.rstrip("/") if not text.endswith("://") else text
    return os.path.abspath(os.path.expanduser(text))


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it.

    Raises
    ------
    NoFileSystem
        If fsspec cannot open such URLs here. The message says why.
    """
    try:
        return remote.file_system(url)
    except remote.Unreachable as error:
        raise NoFileSystem(str(error.__cause__).partition("\n")[0]) from error


def plain(url: str) -> str:
    """Return a URL without user name and password, for messages."""
    return without_password(url, instead="")


def found(url: str) -> list[DataFile]:
    """Return the files of records at a path: the file itself, all in a directory, or those that a pattern matches.

    Empty files are left out.

    Raises
    ------
    PlanError
        If nothing exists at the path.
    NoFileSystem
        If fsspec does not support such URLs.
    """
    fs, root = file_system(url)
    roots = [root]
    if _GLOB.search(root) and not fs.exists(root):
        roots = sorted(map(str, fs.glob(root)))
    files = [file for one in roots for file in _under(fs, one)]
    if not files and not any(fs.exists(one) for one in roots):
        what = "file" if _GLOB.search(root) else "path"
        raise PlanError(f"{plain(url)}: no such {what} exists; correct it, or write the files first")
    return files


def _under(fs: Any, root: str) -> list[DataFile]:
    fs.invalidate_cache()
    listed = fs.find(root, detail=True)
    files = []
    for path in sorted(listed):
        inside = posixpath.relpath(path, root).split("/") if path != root else []
        size = listed[path].get("size")
        size = int(fs.size(path) if size is None else size)  # fs.find() of a single file may lack its size
        if size and not any(map(is_hidden, inside)):
            files.append(DataFile(_url(fs, path), size, partitions_of(inside[:-1])))
    return files


def _url(fs: Any, path: str) -> str:
    return path if is_local(fs) else str(fs.unstrip_protocol(path))


def partitions_of(directories: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Return the partition columns and values from the names of directories, the outermost first."""
    pairs = [name.partition("=") for name in directories]
    values = [(unquote(name), unquote(value)) for name, sign, value in pairs if sign and name]
    return tuple((name, None if value == NULL_PARTITION else value) for name, value in values)


def partition_directory(name: str, value: str | None) -> str:
    """Return the name of the directory of a partition, as Spark writes it."""
    return f"{_escaped(name)}={_escaped(value) if value else NULL_PARTITION}"


def _escaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: f"%{ord(match.group()):02X}", text)


def open_file(url: str) -> BinaryIO:
    """Open a file for reading, decompressed if necessary.

    Compression is detected by the first bytes and not by the name. A plain file is recognized with certainty, because
    the header of a record has a checksum.
    """
    fs, path = file_system(url)
    return inflated(fs.open(path, "rb"))


def inflated(file: Any) -> BinaryIO:
    """Return a decompressing file if a file is gzip or zlib, else the file itself."""
    head = file.read(HEAD)
    file.seek(0)
    gzip = head[:3] == b"\x1f\x8b\x08"
    zlib_ = len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0
    if (gzip or zlib_) and not is_framed(head):
        return Inflated(file)  # type: ignore[return-value]
    return file  # type: ignore[no-any-return]


class Inflated:
    """Decompressed content of a gzip or zlib file, with one or several members. It ends where the file is damaged.

    Attributes
    ----------
    broken : str
        Why it ended early; empty if it did not.
    """

    def __init__(self, file: Any) -> None:
        self.broken = ""
        self._file = file
        self._member = zlib.decompressobj(_AUTOMATIC)
        self._rest = b""
        self._begun = False

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes, fewer only at the end."""
        parts: list[bytes] = []
        while size > 0 and not self.broken:
            raw = self._rest or self._file.read(_PIECE)
            if not raw and not self._begun:
                break
            part = self._inflate(raw, size)
            if not (raw or part or self.broken):
                self.broken = "the compressed file ends too early"
            size -= len(part)
            parts.append(part)
        return b"".join(parts)

    def _inflate(self, raw: bytes, size: int) -> bytes:
        self._begun = True
        try:
            part = self._member.decompress(raw, size)
        except zlib.error as error:
            self.broken = f"the compressed file is damaged ({error})"
            return b""
        self._rest = self._member.unconsumed_tail
        if self._member.eof:
            self._rest = self._member.unused_data.lstrip(b"\0")
            self._member, self._begun = zlib.decompressobj(_AUTOMATIC), False
        return part

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Inflated:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()
