"""Locations that TensorFlow cannot open: complete writes, growing logs, and errors for unreachable ones."""

from __future__ import annotations

import http.server
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.waiting import until
from tfos_nb.driver.settings import Settings
from tfos_nb.errors import PlanError, TfosError
from tfos_nb.runtime.storage import log_mirror
from tfos_nb.runtime.storage.log_mirror import LogMirror, mirrored
from tfos_nb.runtime.storage.remote import (
    Draft,
    Unreachable,
    file_system,
    refuse_unknown,
    rename_over,
    tensorflow_opens,
)


@pytest.fixture
def memory() -> Any:
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    return system


@pytest.fixture
def without_hdfs_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The installation without the extra: fsspec uses pyarrow, which needs a library that is missing here."""
    known = sys.modules["fsspec.registry"]
    by_pyarrow = {"class": "fsspec.implementations.arrow.HadoopFileSystem", "err": "pyarrow is needed"}
    monkeypatch.setitem(known.known_implementations, "hdfs", by_pyarrow)
    monkeypatch.setenv("ARROW_LIBHDFS_DIR", "/nowhere")
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    found = known._registry.pop("hdfs", None)
    yield
    known._registry.pop("hdfs", None)
    if found is not None:
        known._registry["hdfs"] = found


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which a server listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.usefixtures("without_hdfs_client")
def test_hdfs_without_a_client_is_refused_and_the_error_names_what_to_install(port: int) -> None:
    with pytest.raises(Unreachable) as raised:
        file_system(f"hdfs://me:secret@127.0.0.1:{port}/models/digits")
    said = str(raised.value)
    assert said.startswith(f"hdfs://127.0.0.1:{port} cannot be opened on {os.uname().nodename}: ")
    assert "pip install hdfs-native" in said
    assert "libhdfs" in said
    assert "secret" not in said
    assert isinstance(raised.value, TfosError)


def test_an_address_without_a_server_is_refused_at_once() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but does not listen
        port = held.getsockname()[1]
        with pytest.raises(
            Unreachable, match=f"no server answers at 127.0.0.1:{port}, which has to be the NameNode's RPC"
        ):
            file_system(f"hdfs://127.0.0.1:{port}/models")


def test_the_web_port_of_a_name_node_is_recognized_and_refused() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as page:
        threading.Thread(target=page.serve_forever).start()
        port = page.server_address[1]
        try:
            with pytest.raises(Unreachable, match=f"a web server answers at 127.0.0.1:{port}, .*fs.defaultFS"):
                file_system(f"hdfs://127.0.0.1:{port}/models")
        finally:
            page.shutdown()


def test_a_web_file_system_without_a_server_is_refused_at_once() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(Unreachable, match=rf"no server answers at {place} \("):
            file_system(f"webhdfs://{place}/models")


def test_no_client_is_suggested_for_a_server_that_does_not_answer() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(Unreachable) as raised:
            file_system(f"hdfs://127.0.0.1:{held.getsockname()[1]}/models")
    assert "install" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("hdsf://me:secret@nn/models", "hdsf://nn: no file system is known for hdsf://; did you mean hdfs://?"),
        ("hdfs:/models", "two slashes after its scheme, as in hdfs:///models"),
        ("s3:/bucket/key", "as in s3://models"),
        ("file:/models", "as in file:///models"),
        ("nosuchthing://bucket", "no file system is known for nosuchthing://"),
    ],
)
def test_an_invalid_url_is_refused_without_a_connection(url: str, told: str) -> None:
    with pytest.raises(Unreachable) as raised:
        refuse_unknown(url)
    assert told in str(raised.value)
    assert "secret" not in str(raised.value)
    with pytest.raises(PlanError, match="^model_dir: "):
        Settings(model_dir=url)


@pytest.mark.parametrize(
    "url", ["/a", "a/b:/c", "", "file:///a", "gs://b/a", "hdfs://nn/a", "viewfs://c/a", "s3://b/a"]
)
def test_urls_that_some_host_may_open_are_not_refused(url: str) -> None:
    refuse_unknown(url)


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(Unreachable, match=r"nosuch://bucket cannot be opened .*on every host"):
        file_system("nosuch://bucket/key")


@pytest.mark.parametrize(
    ("url", "opens"), [("/a", True), ("file:///a", True), ("gs://b/a", True), ("hdfs://nn/a", False), ("s3://b", False)]
)
def test_urls_that_tensorflow_opens_by_itself_are_recognized(url: str, opens: bool) -> None:
    assert tensorflow_opens(url) is opens


def test_the_configuration_in_a_yarn_container_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__spark_conf__" / "__hadoop_conf__").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (None, url))
    file_system("hdfs:///models")
    assert os.environ["HADOOP_CONF_DIR"] == str(tmp_path / "__spark_conf__" / "__hadoop_conf__")
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop/conf")
    file_system("hdfs:///models")
    assert os.environ["HADOOP_CONF_DIR"] == "/etc/hadoop/conf", "what the host names goes first"


@pytest.mark.parametrize("place", ["memory://models/digits", "{tmp}/models/digits"])
@pytest.mark.parametrize("directory", [True, False])
def test_a_draft_replaces_the_old_content_completely_or_not_at_all(
    memory: Any, tmp_path: Path, place: str, directory: bool
) -> None:
    url = place.format(tmp=tmp_path)

    def write(text: str) -> None:
        with Draft(url) as draft:
            if directory:
                os.makedirs(f"{draft.path}/variables")
            Path(draft.path, "variables/a" if directory else "").write_text(text)

    write("old")
    write("new")
    with pytest.raises(ZeroDivisionError), Draft(url) as draft:
        os.makedirs(draft.path)
        _ = 1 / 0
    system, path = file_system(url)
    assert system.cat_file(f"{path}/variables/a" if directory else path) == b"new"
    assert [name for name in system.find(os.path.dirname(path)) if "old" in str(system.cat_file(name))] == []


@pytest.mark.parametrize("broken", ["mv", "put_file"])
def test_a_model_with_an_interrupted_upload_is_invalid_and_the_next_is_complete(
    memory: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def write(text: str) -> None:
        with Draft("memory://models/digits") as draft:
            os.makedirs(f"{draft.path}/variables")
            for name in ("saved_model.pb", "variables/a"):
                Path(draft.path, name).write_text(text)

    whole = getattr(type(memory), broken)

    def broken_off(self: Any, source: str, place: str, **how: Any) -> None:
        if broken == "mv" or place.endswith("/digits/saved_model.pb"):
            raise ConnectionResetError
        whole(self, source, place, **how)

    write("old")
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), broken, broken_off)
        with pytest.raises(ConnectionResetError):
            write("half")
    assert not memory.exists("/models/digits/saved_model.pb")
    write("new")
    assert {memory.cat_file(name) for name in memory.find("/models/digits")} == {b"new"}


def test_a_local_directory_is_replaced_by_a_rename_and_removed_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing takes a while: if the process is killed meanwhile, the new directory is complete."""
    for name in ("place", "part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    seen: list[str] = []
    monkeypatch.setattr("shutil.rmtree", lambda *of, **how: seen.append((tmp_path / "place" / "file").read_text()))
    rename_over(fsspec.filesystem("file"), f"{tmp_path}/part", f"{tmp_path}/place")
    assert seen == ["part"]
    assert not (tmp_path / "part").exists()


class Strict:
    """A file system whose rename does not overwrite, as pyarrow's HDFS does not."""

    def __init__(self) -> None:
        self.files = {"/part": b"new", "/place": b"old"}

    def exists(self, path: str) -> bool:
        return path in self.files

    def isdir(self, path: str) -> bool:
        return False

    def rm(self, path: str, recursive: bool = False) -> None:
        del self.files[path]

    def mv(self, source: str, place: str, recursive: bool = False) -> None:
        if place in self.files:
            raise OSError(f"{place}: file exists")
        self.files[place] = self.files.pop(source)


def test_the_old_file_is_removed_first_if_a_rename_does_not_overwrite() -> None:
    system = Strict()
    rename_over(system, "/part", "/place")
    assert system.files == {"/place": b"new"}
    with pytest.raises(KeyError):
        rename_over(system, "/nothing", "/elsewhere")


def test_logs_are_copied_while_they_grow_and_again_at_the_end(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_mirror, "_EVERY", 0.02)
    mirror = LogMirror("memory://logs", str(tmp_path))
    events = Path(mirror.path, "train", "events.out.tfevents.1")
    events.parent.mkdir()
    place = "/logs/train/events.out.tfevents.1"
    for text in (b"first ", b"first second "):
        events.write_bytes(text)
        assert until(lambda text=text: memory.exists(place) and memory.cat_file(place) == text)
    events.write_bytes(b"first second last")
    Path(mirror.path, "words.tsv").write_text("a")
    mirror.stop()
    assert memory.cat_file(place) == b"first second last"
    assert memory.cat_file("/logs/words.tsv") == b"a"


def test_an_unresponsive_location_does_not_prevent_a_training_from_ending(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(type(memory), "open", lambda *args, **options: answers.wait(60))
    monkeypatch.setattr(log_mirror, "_EVERY", 0.02)
    monkeypatch.setattr(log_mirror, "_LAST_WITHIN", 0.2)
    mirror = LogMirror("memory://logs", str(tmp_path))
    Path(mirror.path, "events.out.tfevents.1").write_bytes(b"first")
    mirror.stop()
    answers.set()
    assert "the last logs are not copied to memory://logs: it has not answered for 0.2 s" in caplog.text


def test_the_warning_for_a_log_that_cannot_be_copied_hides_the_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = LogMirror("nowhere://me:secret@host/logs", str(tmp_path))
    Path(mirror.path, "events.out.tfevents.1").write_bytes(b"first")
    mirror.stop()
    assert "the logs cannot be copied to nowhere://…@host/logs" in caplog.text
    assert "secret" not in caplog.text


def test_a_store_that_cannot_append_gets_complete_files(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = type(memory).open

    def without_append(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "ab":
            raise NotImplementedError("append")
        return opened(self, path, mode, **options)

    monkeypatch.setattr(type(memory), "open", without_append)
    mirror = LogMirror("memory://logs", str(tmp_path))
    events = Path(mirror.path, "events.out.tfevents.1")
    events.write_bytes(b"first ")
    mirror._try()
    events.write_bytes(b"first second")
    mirror.stop()
    assert memory.cat_file("/logs/events.out.tfevents.1") == b"first second"


def test_logs_that_cannot_be_copied_cause_one_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = LogMirror("nosuch://place/logs", str(tmp_path))
    Path(mirror.path, "events.out.tfevents.1").write_bytes(b"first")
    with caplog.at_level(logging.WARNING):
        mirror._try()
        mirror.stop()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["the logs cannot be copied to nosuch"]


def test_a_log_directory_that_tensorflow_can_write_has_no_mirror(tmp_path: Path) -> None:
    assert mirrored("", str(tmp_path)) is None
    assert mirrored(str(tmp_path / "logs"), str(tmp_path)) is None
    assert mirrored("gs://bucket/logs", str(tmp_path)) is None


def test_remote_storage_does_not_import_tensorflow() -> None:
    assert "tensorflow" not in sys.modules["tfos_nb.runtime.storage.remote"].__dict__
