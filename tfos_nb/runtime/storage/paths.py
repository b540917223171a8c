"""Resolve paths on Hadoop's default file system, and find this host's directories."""

from __future__ import annotations

import errno
import getpass
import os
import re
import tempfile
import xml.etree.ElementTree as ElementTree
from typing import Any

from tfos_nb.errors import PlanError

__all__ = [
    "absolute",
    "default_file_system",
    "hadoop_conf_dirs",
    "is_forbidden",
    "is_hidden",
    "is_local",
    "spill_directory",
    "tf_path",
    "user_name",
]

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:/")


def absolute(place: str) -> str:
    """Return a path in full, with ``~`` as the home directory; a URL as it is.

    Examples
    --------
    >>> absolute("/data/../models"), absolute("hdfs:///models")
    ('/models', 'hdfs:///models')
    """
    return place if "://" in place else os.path.abspath(os.path.expanduser(place))


def tf_path(path: str, default_fs: str | None = None, working_dir: str | None = None) -> str:
    """Return the full path or URL of a path, as TensorFlowOnSpark's ``hdfs_path`` does.

    A URL of any scheme (``hdfs``, ``s3a``, ``gs``, ``abfs``, ``file``, …) is returned unchanged. An absolute path is on
    the default file system. A relative path is in the user's directory there, or if the default file system is the
    local one, in the working directory.

    Parameters
    ----------
    path : str
        Path or URL.
    default_fs : str, optional
        Hadoop's ``fs.defaultFS``. Default: :func:`default_file_system`.
    working_dir : str, optional
        Default: that of the process.

    Raises
    ------
    PlanError
        If the path is relative to a user's directory, and the user has no name.

    Examples
    --------
    >>> tf_path("gs://bucket/data", "hdfs://nn:8020")
    'gs://bucket/data'
    >>> tf_path("/data/mnist", "hdfs://nn:8020")
    'hdfs://nn:8020/data/mnist'
    """
    if _URL.match(path):
        return path
    root = (default_fs if default_fs is not None else default_file_system()).rstrip("/")
    local = root in ("", "file:")
    if os.path.isabs(path):
        return path if local else f"{root}{path}"
    if local:
        return os.path.join(working_dir or os.getcwd(), path)
    return f"{root}/user/{user_name(path)}/{path}"


def user_name(path: str) -> str:
    """Return the user in whose directory on the default file system a relative path is.

    As in Hadoop with simple authentication, it is ``HADOOP_USER_NAME``, or the user of this process.

    Raises
    ------
    PlanError
        If the user has no name, as in a container that runs under an arbitrary user id. The message contains ``path``.
    """
    named = os.environ.get("HADOOP_USER_NAME")
    try:
        return named or getpass.getuser()
    except (KeyError, OSError, ImportError):
        raise PlanError(
            f"{path} is relative to the directory of a user, and user {os.getuid()} of this host has no name: give the "
            "path in full, or set HADOOP_USER_NAME"
        ) from None


def is_local(filesystem: Any) -> bool:
    """Return whether a file system of fsspec is the local one."""
    protocol = filesystem.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def is_forbidden(error: OSError) -> bool:
    """Return whether an error means that writing is not permitted, or that a path's parent is no directory."""
    return isinstance(error, (PermissionError, NotADirectoryError)) or error.errno == errno.EROFS


def is_hidden(name: str) -> bool:
    """Return whether Spark leaves out a file or directory of this name when it reads a directory.

    A partition's directory is read, even if its column's name begins with ``_``.

    Examples
    --------
    >>> [is_hidden(name) for name in ("_SUCCESS", ".part-0.crc", "part-1._COPYING_", "_day=1", "part-0")]
    [True, True, True, False, False]
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name) or name.endswith("._COPYING_")


def hadoop_conf_dirs() -> list[str]:
    """Return the directories of this host's Hadoop configuration.

    In a YARN container without such variables, it is the submitter's configuration, which Spark's YARN client puts into
    each container's working directory.
    """
    named = [os.environ.get(variable, "") for variable in ("HADOOP_CONF_DIR", "YARN_CONF_DIR")]
    sent = os.path.abspath(os.path.join("__spark_conf__", "__hadoop_conf__"))
    return list(filter(None, named)) or ([sent] if os.path.isdir(sent) else [])


def default_file_system() -> str:
    """Return ``fs.defaultFS`` from ``core-site.xml`` of this host's Hadoop configuration; ``file://`` if not found."""
    for directory in hadoop_conf_dirs():
        try:
            root = ElementTree.parse(os.path.join(directory, "core-site.xml")).getroot()  # noqa: S314 - the host's own
        except (OSError, ElementTree.ParseError):
            continue
        for entry in root.iter("property"):
            if entry.findtext("name") in ("fs.defaultFS", "fs.default.name"):
                return (entry.findtext("value") or "file://").strip()
    return "file://"


def spill_directory() -> str:
    """Return the executor's local directory, to which Spark itself spills, or else the system's temporary one."""
    for variable in ("SPARK_LOCAL_DIRS", "LOCAL_DIRS"):
        for directory in os.environ.get(variable, "").split(","):
            if directory and os.access(directory, os.W_OK):
                return directory
    return tempfile.gettempdir()
