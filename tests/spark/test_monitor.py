"""sparkmonitor: its jar for each Spark, its monitor without a page, the profile's line, and a real kernel."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyspark
import pytest
import sparkmonitor
from sparkmonitor import kernelextension

from tests.conftest import ENVIRONMENT
from tfos_nb.spark import monitor
from tfos_nb.spark.monitor import LISTENER, Listener, listener, listener_jar

JARS = Path(sparkmonitor.__file__).parent


class KernelShell:
    def has_trait(self, name: str) -> bool:
        return name == "kernel"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """sparkmonitor's module with its monitor, as after loading, but without the thread."""
    made = kernelextension.ScalaMonitor(SimpleNamespace(kernel=None))
    made.scalaSocket = SimpleNamespace(port=4711)
    monkeypatch.setattr(kernelextension, "monitor", made, raising=False)
    logger = logging.getLogger("tests.sparkmonitor")
    logger.setLevel(logging.INFO)
    monkeypatch.setattr(kernelextension, "logger", logger, raising=False)
    return kernelextension


def jars(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


# --- the jar


@pytest.mark.parametrize(
    ("core", "expected"),
    [
        ("spark-core_2.12-3.5.8.jar", "listener_spark3_2.12.jar"),
        ("spark-core_2.13-3.5.1.jar", "listener_spark3_2.13.jar"),
        ("spark-core_2.13-4.0.0.jar", "listener_spark4_2.13.jar"),
        ("spark-core_2.13-4.1.4-SNAPSHOT.jar", "listener_spark4_2.13.jar"),
    ],
)
def test_the_jar_matches_the_versions_of_spark_and_scala(tmp_path: Path, core: str, expected: str) -> None:
    found = listener_jar(jars(tmp_path, core, "spark-sql_2.13-9.jar"), JARS)
    assert found == JARS / expected
    assert found.is_file()


def test_the_jar_for_the_installed_pyspark_is_found() -> None:
    found = listener_jar(Path(pyspark.__file__).parent / "jars", JARS)
    assert found is not None


@pytest.mark.parametrize("core", ["spark-core_2.13-5.0.0.jar", "spark-core.jar", "other.jar"])
def test_an_unsupported_spark_gets_no_jar(tmp_path: Path, core: str) -> None:
    assert listener_jar(jars(tmp_path, core), JARS) is None
    assert listener_jar(tmp_path / "nowhere", JARS) is None


# --- when it is used


def found_listener(folder: Path, extension: ModuleType, shell: Any = None, **environ: str) -> Listener | None:
    return listener(
        jars(folder, "spark-core_2.13-4.1.1.jar"), shell=shell or KernelShell(), environ=environ, extension=extension
    )


def test_spark_gets_the_listener_if_the_notebooks_profile_loaded_it(tmp_path: Path, loaded: ModuleType) -> None:
    found = found_listener(tmp_path, loaded, JPY_SESSION_NAME="/a.ipynb")
    assert found == Listener(JARS / "listener_spark4_2.13.jar", 4711)


def test_a_headless_run_gets_no_listener_and_its_monitor_drops_messages(tmp_path: Path, loaded: ModuleType) -> None:
    with pytest.raises(AttributeError, match="comm"):
        loaded.monitor.send({"msgtype": "fromscala"})
    assert found_listener(tmp_path, loaded, JPY_PARENT_PID="1") is None
    loaded.monitor.send({"msgtype": "fromscala"})


def test_without_a_kernel_or_its_extension_spark_gets_no_listener(tmp_path: Path, loaded: ModuleType) -> None:
    terminal = SimpleNamespace(has_trait=lambda name: False)
    assert found_listener(tmp_path, loaded, terminal, JPY_SESSION_NAME="/a.ipynb") is None
    assert found_listener(tmp_path, ModuleType("sparkmonitor.kernelextension"), JPY_SESSION_NAME="/a.ipynb") is None


def test_a_pages_comm_replaces_the_silent_one(loaded: ModuleType) -> None:
    sent: list[object] = []
    monitor.keep_quiet(loaded)
    page = SimpleNamespace(send=sent.append, on_msg=lambda callback: callback)
    loaded.monitor.target_func(page, {})
    monitor.keep_quiet(loaded)
    loaded.monitor.send("told")
    assert sent == [{"msgtype": "commopen"}, "told"]


def test_informational_messages_of_the_monitor_are_not_shown_in_the_cell(loaded: ModuleType) -> None:
    monitor.keep_quiet(loaded)
    assert not loaded.logger.isEnabledFor(logging.INFO)
    assert loaded.logger.isEnabledFor(logging.WARNING)


def test_the_users_listeners_and_class_path_are_kept() -> None:
    found = Listener(Path("/jars/l.jar"), 1)
    conf = {"spark.extraListeners": "a.B", "spark.driver.extraClassPath": "/x.jar"}
    merged = found.merged(conf)
    assert merged == {
        "spark.extraListeners": f"a.B,{LISTENER}",
        "spark.driver.extraClassPath": "/x.jar:/jars/l.jar",
    }
    assert found.merged(merged) == merged
    assert found.merged({})["spark.extraListeners"] == LISTENER


# --- the profile


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tfos_nb", *words],
        env={**ENVIRONMENT, "IPYTHONDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def extensions_of(config: Path) -> list[str]:
    """Return the extensions that IPython reads from the file."""
    from traitlets.config.loader import PyFileConfigLoader

    loaded = PyFileConfigLoader(config.name, str(config.parent)).load_config()
    return list(loaded.InteractiveShellApp.extensions.get_value([]))


def test_enable_writes_a_line_for_ipython_and_disable_removes_it(tmp_path: Path) -> None:
    config = tmp_path / "profile_default" / "ipython_kernel_config.py"
    first = command(tmp_path, "enable-sparkmonitor")
    assert first.returncode == 0, first.stderr
    assert f"{config} now loads sparkmonitor" in first.stdout
    assert extensions_of(config) == ["sparkmonitor.kernelextension"]
    written = config.read_text()
    assert "nothing was changed" in command(tmp_path, "enable-sparkmonitor").stdout
    assert config.read_text() == written
    assert "no longer loads" in command(tmp_path, "disable-sparkmonitor").stdout
    assert extensions_of(config) == []
    assert "nothing was changed" in command(tmp_path, "disable-sparkmonitor").stdout


def test_the_users_configuration_is_unchanged(tmp_path: Path) -> None:
    target = tmp_path / "dotfiles.py"
    before = "c.InteractiveShellApp.extensions = ['autoreload']\n# sparkmonitor.kernelextension was tried\nc.A.b = 1"
    target.write_text(before)
    config = tmp_path / "profile_mine" / "ipython_kernel_config.py"
    config.parent.mkdir()
    config.symlink_to(target)
    monitor.enable(config.parent)
    assert config.is_symlink()
    loaded = target.read_text()
    assert loaded.startswith(before + "\n")
    scope: dict[str, Any] = {"c": SimpleNamespace(InteractiveShellApp=SimpleNamespace(), A=SimpleNamespace())}
    exec(loaded, scope)
    assert scope["c"].InteractiveShellApp.extensions == ["autoreload", "sparkmonitor.kernelextension"]
    monitor.disable(config.parent)
    assert target.read_text() == before + "\n"


def test_a_line_of_the_user_is_kept_and_reported(tmp_path: Path) -> None:
    config = tmp_path / "ipython_kernel_config.py"
    own = "c.InteractiveShellApp.extensions.append('sparkmonitor.kernelextension')\n"
    config.write_text(own)
    assert "loads sparkmonitor already" in monitor.enable(tmp_path)
    assert "a line of your own loads it" in monitor.disable(tmp_path)
    assert config.read_text() == own


@pytest.mark.parametrize("profile", ["", "../other", "/etc"])
def test_an_invalid_profile_is_refused(tmp_path: Path, profile: str) -> None:
    ended = command(tmp_path, "enable-sparkmonitor", "--profile", profile)
    assert ended.returncode == 1
    assert f"--profile {profile}: the name of a profile" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_sparkmonitor_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tfos_nb.__main__ as program

    monkeypatch.setattr(monitor, "is_installed", lambda: False)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    assert program.main(["enable-sparkmonitor"]) == 1
    assert "pip install sparkmonitor" in capsys.readouterr().err


# --- a real kernel, its profile, and its Spark

CELLS = """
import json, tfos_nb
spark = tfos_nb.spark_session(2, conf={"spark.ui.enabled": "false"})
conf = dict(spark.sparkContext.getConf().getAll())
for number in range(5):
    spark.range(100, numPartitions=4).selectExpr("sum(id)").collect()
print(json.dumps({name: conf.get(name, "") for name in ("spark.extraListeners", "spark.driver.extraClassPath")}))
"""
AGAIN = """
spark.stop()
spark = tfos_nb.spark_session(2, conf={"spark.ui.enabled": "false"})
print(spark.range(5).count(), spark.sparkContext.getConf().get("spark.extraListeners"))
"""
COUNT = """
import threading
from sparkmonitor import kernelextension
alive = any(type(one).__name__ == "SocketThread" and one.is_alive() for one in threading.enumerate())
print(json.dumps([alive, len(opened), sorted(set(opened))]))
"""
COMM = """
opened = []
from sparkmonitor import kernelextension
class Page:
    def send(self, message):
        opened.append(json.loads(message.get("msg", "{}")).get("msgtype", message["msgtype"]))
    def on_msg(self, callback):
        return callback
import json
"""


def run_cells(folder: Path, cells: list[str], **environ: str) -> list[Any]:
    """Run cells in a real kernel whose profile loads sparkmonitor; return the outputs of each."""
    import nbformat
    from nbclient import NotebookClient

    monitor.enable(folder / "profile_default")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    environment = {**ENVIRONMENT, "IPYTHONDIR": str(folder), **environ}
    client = NotebookClient(notebook, timeout=150, kernel_name="python3", shutdown_kernel="immediate")
    client.execute(env=environment, cwd=str(folder))
    return [cell.outputs for cell in notebook.cells]


def printed(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_a_notebooks_spark_has_the_listener_and_sends_nothing_without_a_page(tmp_path: Path) -> None:
    outputs = run_cells(tmp_path, [COMM, CELLS, AGAIN, COUNT], JPY_SESSION_NAME="/a.ipynb")
    conf = json.loads(printed(outputs[1]))  # nothing else was printed in the cell
    assert conf["spark.extraListeners"] == LISTENER
    assert Path(conf["spark.driver.extraClassPath"]).parent == JARS
    assert printed(outputs[2]) == f"5 {LISTENER}\n"
    assert json.loads(printed(outputs[3])) == [True, 0, []]


def test_a_page_that_opens_a_comm_receives_the_jobs(tmp_path: Path) -> None:
    opens = "kernelextension.monitor.target_func(Page(), {})"
    outputs = run_cells(tmp_path, [COMM, opens, CELLS, COUNT], JPY_SESSION_NAME="/a.ipynb")
    alive, count, kinds = json.loads(printed(outputs[3]))
    assert alive
    assert count > 5
    assert "sparkJobStart" in kinds


@pytest.mark.slow
def test_a_headless_run_with_the_same_profile_has_no_listener(tmp_path: Path) -> None:
    os.environ.pop("JPY_SESSION_NAME", None)
    outputs = run_cells(tmp_path, [CELLS])
    assert json.loads(printed(outputs[0])) == {"spark.extraListeners": "", "spark.driver.extraClassPath": ""}
