"""Hosts by their documented properties: what each puts into the environment, the shell and the imported modules."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Instance

from tests.conftest import RunScript
from tfos_nb.errors import PlanError
from tfos_nb.widgets.hosts import Host, detect_host, parent_server, proxied_url

JUPYTER = Host("jupyter", "widget")
LOCAL = "http://127.0.0.1:6006/tb/"


class KernelShell:
    """The parts of ipykernel's shell that are used: the trait ``kernel``, and the user's names."""

    def __init__(self, **names: object) -> None:
        self.user_ns = names

    def has_trait(self, name: str) -> bool:
        return name == "kernel"


class TerminalShell(KernelShell):
    def has_trait(self, name: str) -> bool:
        return False


class PyZeppelinContext(dict[str, object]):
    """Stand-in for the class of Zeppelin's ``z``, on which ``in`` must not be used."""

    def __contains__(self, key: object) -> bool:
        raise AssertionError("it would ask the JVM")


def a_connect_session() -> object:
    return type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()


def detected(shell: object = None, modules: tuple[str, ...] = (), **environ: str) -> Host:
    return detect_host(environ, shell=shell, modules={name: ModuleType(name) for name in modules})


def test_a_kernel_of_a_jupyter_server_is_detected_as_jupyter() -> None:
    assert detected(KernelShell(), JPY_SESSION_NAME="/a.ipynb", JPY_PARENT_PID="1") == Host("jupyter", "widget")


def test_a_kernel_of_jupyterhub_is_detected_as_jupyter() -> None:
    found = detected(KernelShell(), JPY_SESSION_NAME="/a.ipynb", JUPYTERHUB_SERVICE_PREFIX="/user/alice/")
    assert (found.name, found.headless) == ("jupyter", False)


def test_a_kernel_without_a_session_is_headless_even_on_a_hub() -> None:
    found = detected(KernelShell(), JPY_PARENT_PID="1", JUPYTERHUB_SERVICE_PREFIX="/user/alice/")
    assert (found.name, found.rendering, found.headless) == ("headless", "html", True)


def test_vs_code_is_detected_by_the_notebooks_file_even_on_a_remote_server() -> None:
    shell = KernelShell(__vsc_ipynb_file__="/home/alice/a.ipynb")
    assert detected(shell, JPY_SESSION_NAME="/a.ipynb").name == "vscode"
    assert detected(KernelShell(), VSCODE_PID="1").name == "vscode"


def test_jupyterlab_started_by_vs_code_is_detected_as_jupyter() -> None:
    assert detected(KernelShell(), VSCODE_PID="1", JPY_SESSION_NAME="/a.ipynb").name == "jupyter"


def test_colab_is_detected_by_its_module_or_release() -> None:
    assert detected(KernelShell(), ("google.colab",)) == Host("colab", "widget")
    assert detected(KernelShell(), COLAB_RELEASE_TAG="release-colab_20260101").name == "colab"


def test_zeppelin_is_detected_by_its_context_and_replaces_by_clearing() -> None:
    found = detected(KernelShell(z=PyZeppelinContext()))
    assert found == Host("zeppelin", "html", replaces_by_clearing=True)


def test_a_variable_z_alone_is_not_zeppelin() -> None:
    assert detected(KernelShell(z=[1]), JPY_SESSION_NAME="/a.ipynb", ZEPPELIN_HOME="/opt/zeppelin").name == "jupyter"


def test_databricks_in_dedicated_mode_shows_widgets_and_is_not_refused() -> None:
    found = detected(KernelShell(spark=object()), DATABRICKS_RUNTIME_VERSION="16.4", JPY_SESSION_NAME="x")
    assert (found.name, found.rendering, found.refusal) == ("databricks", "widget", "")


def test_a_job_of_databricks_without_a_notebook_writes_text() -> None:
    assert detected(DATABRICKS_RUNTIME_VERSION="16.4").rendering == "text"


@pytest.mark.parametrize(
    ("shell", "environ"),
    [
        (KernelShell(spark=a_connect_session()), {}),
        (KernelShell(), {"IS_SERVERLESS": "TRUE"}),
        (KernelShell(), {"SPARK_CONNECT_MODE_ENABLED": "1"}),
    ],
)
def test_databricks_with_spark_connect_is_refused_with_the_remedy(shell: KernelShell, environ: dict[str, str]) -> None:
    found = detected(shell, DATABRICKS_RUNTIME_VERSION="16.4", **environ)
    assert "Spark Connect" in found.refusal
    assert "Dedicated access mode" in found.refusal
    asked_for = detected(shell, DATABRICKS_RUNTIME_VERSION="16.4", TFOS_SERVER_RELAY="1", **environ)
    assert asked_for.refusal == "", "whoever asks for it may try"
    without = detected(shell, DATABRICKS_RUNTIME_VERSION="16.4", TFOS_SERVER_RELAY="0", **environ)
    assert without.refusal == found.refusal


def test_ipython_in_a_terminal_and_a_script_write_text() -> None:
    assert detected(TerminalShell()) == Host("terminal", "text")
    assert detected() == Host("script", "text")
    assert not detected(TerminalShell()).headless


def test_the_process_shell_is_used_and_its_kernel_is_detected_by_a_trait() -> None:
    InteractiveShell.clear_instance()
    try:
        shell = InteractiveShell.instance()
        assert detect_host({}).name == "terminal"
        shell.add_traits(kernel=Instance(object))
        assert detect_host({"JPY_SESSION_NAME": "/a.ipynb"}).name == "jupyter"
    finally:
        InteractiveShell.clear_instance()
    assert detect_host({}).name == "script"


def test_detection_imports_no_spark_tensorflow_or_jupyter_server(run_script: RunScript) -> None:
    ended = run_script(
        """
        import sys
        from tfos_nb.widgets.hosts import detect_host, proxied_url
        environ = {"DATABRICKS_RUNTIME_VERSION": "16", "JPY_PARENT_PID": "1"}
        host = detect_host(environ)
        proxied_url(1, "", host, environ)
        watched = {"pyspark", "tensorflow", "keras", "jupyter_server", "tornado"}
        print(host.name, sorted({name.partition(".")[0] for name in sys.modules} & watched))
        """
    )
    assert ended.stdout.strip() == "databricks []"


# --- the URL of a port


def url(host: Host = JUPYTER, template: str = "", conf: dict[str, str] | None = None, **environ: str) -> str | None:
    return proxied_url(6006, "tb/", host, environ, template=template, spark_conf=conf)


def test_the_users_url_takes_precedence() -> None:
    environ = {"TFOS_NB_PROXY_URL": "https://gate.example/%PORT%", "TENSORBOARD_PROXY_URL": "/b/%PORT%/"}
    assert url(Host("colab", "widget"), "/c/%PORT%/", **environ) == "https://gate.example/6006/tb/"
    del environ["TFOS_NB_PROXY_URL"]
    assert url(JUPYTER, "/c/%PORT%/", JUPYTERHUB_SERVICE_PREFIX="/u/", **environ) == "/b/6006/tb/"
    assert url(JUPYTER, "/c/%PORT%/", JUPYTERHUB_SERVICE_PREFIX="/u/") == "/c/6006/tb/"


@pytest.mark.parametrize("value", ["https://gate.example/6006/", "%port%"])
def test_a_url_without_the_ports_placeholder_is_refused_with_its_variable(value: str) -> None:
    with pytest.raises(PlanError, match="TENSORBOARD_PROXY_URL must contain %PORT%"):
        url(TENSORBOARD_PROXY_URL=value)
    with pytest.raises(PlanError, match="TfosMagics.proxy_url must contain %PORT%"):
        url(template=value)


@pytest.mark.parametrize("value", ["javascript:alert(%PORT%)", "data:text/html,%PORT%", '/a" onload="%PORT%'])
def test_an_address_unsuitable_for_a_browser_is_refused(value: str) -> None:
    with pytest.raises(PlanError, match="http://"):
        url(TFOS_NB_PROXY_URL=value)


def test_colab_needs_no_url() -> None:
    assert url(Host("colab", "widget"), JUPYTERHUB_SERVICE_PREFIX="/u/") is None


def test_databricks_uses_its_driver_proxy() -> None:
    conf = {
        "spark.databricks.clusterUsageTags.clusterId": "0923-164208-abc",
        "spark.databricks.clusterUsageTags.clusterOwnerOrgId": "42",
    }
    host = Host("databricks", "widget")
    assert url(host, conf=conf) == "/driver-proxy/o/42/0923-164208-abc/6006/tb/"
    conf["spark.databricks.workspaceUrl"] = "adb-1.azuredatabricks.net"
    assert url(host, conf=conf) == "https://adb-1.azuredatabricks.net/driver-proxy/o/42/0923-164208-abc/6006/tb/"
    assert url(host) is None
    conf["spark.databricks.clusterUsageTags.clusterId"] = "a/../b"
    assert url(host, conf=conf) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/alice/"}, "/user/alice/proxy/6006/tb/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/a%40b/"}, "/user/a%40b/proxy/6006/tb/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/"}, "/proxy/6006/tb/"),
        ({"NB_PREFIX": "/notebook/ns/mine"}, "/notebook/ns/mine/proxy/6006/tb/"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/hub/", "NB_PREFIX": "/nb/"}, "/hub/proxy/6006/tb/"),
        ({"NB_PREFIX": '/a"><script>'}, "/a%22%3E%3Cscript%3E/proxy/6006/tb/"),
    ],
)
def test_a_hubs_prefix_precedes_the_proxy(environ: dict[str, str], expected: str) -> None:
    assert url(**environ) == expected


def server_says(folder: Path, name: str, **info: object) -> dict[str, str]:
    (folder / f"jpserver-{name}.json").write_text(json.dumps(info))
    return {"JUPYTER_RUNTIME_DIR": str(folder), "JPY_PARENT_PID": name}


@pytest.mark.parametrize(
    ("base", "expected"), [("/", "/proxy/6006/tb/"), ("/user/alice/", "/user/alice/proxy/6006/tb/")]
)
def test_the_server_that_started_the_kernel_is_found_by_its_pid(tmp_path: Path, base: str, expected: str) -> None:
    server_says(tmp_path, "1", pid=1, base_url="/other/")
    environ = server_says(tmp_path, str(os.getpid()), pid=os.getpid(), base_url=base)
    assert url(**environ) == expected


@pytest.mark.parametrize("content", ["", "[]", '{"pid": 1, "base_url": "/other/"}'])
def test_a_file_of_another_server_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "jpserver-77.json").write_text(content)
    environ = {"JUPYTER_RUNTIME_DIR": str(tmp_path), "JPY_PARENT_PID": "77"}
    assert parent_server(environ) == {}
    assert url(**environ) == LOCAL


def test_without_a_server_the_port_is_used_on_this_machine() -> None:
    for name in ("jupyter", "vscode", "terminal", "zeppelin", "script"):
        assert url(Host(name, "text")) == LOCAL
    assert url(Host("vscode", "widget"), JUPYTERHUB_SERVICE_PREFIX="/user/alice/") == LOCAL


def test_code_servers_variable_gives_the_url_of_ports() -> None:
    assert url(Host("vscode", "widget"), VSCODE_PROXY_URI="https://code.example/p/{{port}}/") == (
        "https://code.example/p/6006/tb/"
    )


def test_a_kernel_started_by_a_cell_is_headless_despite_the_notebooks_name(run_script: RunScript) -> None:
    """papermill in a cell starts a kernel like this, with the whole environment of the cell's kernel."""
    said = run_script(
        """
        import os, subprocess, sys
        ask = "from tests.widgets.test_hosts import *; print(detect_host(shell=KernelShell()).name)"
        starter = "import os, subprocess, sys; os.environ['JPY_PARENT_PID'] = str(os.getpid()); "
        own = "os.environ['JPY_SESSION_NAME'] = '/b.ipynb'; "
        run = f"subprocess.run([sys.executable, '-c', {ask!r}], check=True)"
        notebook = {**os.environ, "JPY_SESSION_NAME": "/a.ipynb"}
        server = {name: value for name, value in os.environ.items() if name != "JPY_SESSION_NAME"}
        for environment, more in ((notebook, ""), (notebook, own), (server, own)):
            subprocess.run([sys.executable, "-c", starter + more + run], env=environment, check=True)
        """
    ).stdout
    assert said.split() == ["headless", "jupyter", "jupyter"]
