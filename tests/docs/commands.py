"""Check the pages' commands: the programs exist and accept the arguments."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pyspark

from benchmarks.__main__ import _parser as parser_of_benchmarks
from tests.conftest import ENVIRONMENT
from tests.docs.reading import CHECKOUT
from tfos_nb.__main__ import _COMMANDS
from tfos_nb.spark.java import find_java

__all__ = ["faults_of"]

Words = list[str]
MAKEFILE = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
THEIRS = ("program.py", "train.py", "/shared/train.py")
"""What the pages call the reader's own program."""
READ = ("HADOOP_CONF_DIR", "PYSPARK_PYTHON", "SPARK_HOME")
"""The variables that Spark and Hadoop look at."""


def faults_of(text: str, *, allowed: bool = False) -> list[str]:
    """Return the faults of a block's commands: missing programs, targets and options.

    An unknown command is a fault, unless its block says that it is not run.
    """
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    found = []
    for words in (shlex.split(re.sub(r"(^|\s)#\s.*", "", part)) for line in lines for part in line.split(" && ")):
        known = next((check for start, check in _KNOWN.items() if " ".join(words).startswith(start)), None)
        if known is not None:
            found += [f"{' '.join(words)}: {fault}" for fault in known(words)]
        elif words and not allowed:
            found.append(f"{' '.join(words)}: an unknown command")
    return found


def _make(words: Words) -> Words:
    faults = []
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if equals:
            faults += [] if f"$({name})" in MAKEFILE or f"$(or $({name})" in MAKEFILE else [f"no variable {name}"]
        elif not re.search(rf"^{re.escape(name)}:", MAKEFILE, re.MULTILINE):
            faults.append(f"no target {name}")
        if words[1] == "bench" and name == "ARGS":
            faults += _benchmarks(["python", "-m", "benchmarks", *shlex.split(value)])
    return faults


def _pip(words: Words) -> Words:
    extras = set(metadata.metadata("tfos_nb").get_all("Provides-Extra") or ())
    asked = [word for word in words[words.index("install") + 1 :] if word.startswith(".[")]
    return [f"no extra {extra}" for word in asked for extra in word[2:-1].split(",") if extra not in extras]


def _benchmarks(words: Words) -> Words:
    try:
        parser_of_benchmarks().parse_args(words[3:])
    except SystemExit:
        return ["its options are others"]
    return []


def _own(words: Words) -> Words:
    if words[3:5] == ["kubernetes", "render"]:
        known = _help_of("-m", "tfos_nb", "kubernetes", "render")
        return [f"no option {word}" for word in words[5:] if word.startswith("--") and word not in known]
    return [] if words[3] in _COMMANDS else [f"no command {words[3]}"]


def _demo(words: Words) -> Words:
    asked = [word for word in words[3:] if word.startswith("--")]
    return [f"no option {word}" for word in asked if word not in _help_of("-m", "tfos_nb.demo")]


def _submit(words: Words) -> Words:
    program = next(place for place, word in enumerate(words) if word.endswith(".py"))
    asked = [word for word in words[1:program] if word.startswith("--")]
    return [f"no option {word}" for word in asked if word not in _help_of_submit()] + _program(words[program:])


def _example(words: Words) -> Words:
    return _program(words[1:])


def _program(words: Words) -> Words:
    if words[0] in THEIRS:
        return []
    if not (CHECKOUT / words[0]).exists():
        return [f"no file {words[0]}"]
    asked = [word for word in words[1:] if word.startswith("--")]
    return [f"no option {word}" for word in asked if word not in _help_of(str(CHECKOUT / words[0]))]


def _export(words: Words) -> Words:
    names = re.findall(r"\b([A-Z_]+)=", " ".join(words[1:]))
    return [f"nobody reads {name}" for name in names if name not in READ]


_KNOWN: dict[str, Callable[[Words], Words]] = {
    "make ": _make,
    "pip install ": _pip,
    "tf/bin/pip install ": _pip,
    "python -m benchmarks": _benchmarks,
    "python -m tfos_nb ": _own,
    "python -m tfos_nb.demo": _demo,
    "python notebooks/": _example,
    "spark-submit ": _submit,
    "export ": _export,
    "jupyter server extension enable tfos_nb.serverext": lambda words: [],
}


@functools.cache
def _help_of_submit() -> set[str]:
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    environment = {**ENVIRONMENT, "JAVA_HOME": str(find_java().home)}
    ended = subprocess.run(
        [str(submit), "--help"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return set(re.findall(r"--[a-z-]+", ended.stderr + ended.stdout))


@functools.cache
def _help_of(*program: str) -> set[str]:
    command = [sys.executable, *program, "--help"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True)
    return set(re.findall(r"--[a-z-]+", ended.stdout))
