"""TensorBoard in each host: the contents of its output, and what a saved notebook keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from tfos_nb.errors import PlanError
from tfos_nb.jupyter import endpoint as endpoint_module
from tfos_nb.jupyter.endpoint import Endpoint
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus
from tfos_nb.widgets.hosts import Host
from tfos_nb.widgets.tensorboard import show_tensorboard

WIDGET = "application/vnd.jupyter.widget-view+json"
NASTY = """<img src=x onerror="1">"""


class Running:
    """A cluster that was launched with or without TensorBoard."""

    id, tensorboard_socket = "0123456789ab", ""

    def __init__(self, log_dir: str = "/logs/<b>") -> None:
        self._log_dir = log_dir

    def snapshot(self) -> ClusterState:
        return ClusterState(NASTY, self.id, status=ClusterStatus.RUNNING, log_dir=self._log_dir)

    def request_stop(self) -> str:
        return ""

    def log_lines(self, node: str, limit: int) -> tuple[()]:
        return ()


@pytest.fixture
def endpoint(shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """The kernel's one endpoint, for one test; no server, no proxy."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    for name in ("TFOS_NB_PROXY_URL", "TENSORBOARD_PROXY_URL", "JPY_PARENT_PID", "JUPYTERHUB_SERVICE_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    made = Endpoint()
    monkeypatch.setattr(endpoint_module, "_the_one", [made])
    yield made
    made.close()


def shown(**options: Any) -> tuple[dict[str, Any], str]:
    """Show TensorBoard; return the output's data, and the printed text."""
    options.setdefault("host", Host("jupyter", "widget"))
    with capture_output() as captured:
        show_tensorboard(Running(), **options)
    data = captured._outputs[0]["data"] if captured._outputs else {}
    return data, captured.stdout


def test_jupyter_gets_a_widget_and_a_line_for_the_file(endpoint: Endpoint) -> None:
    data, _ = shown(host=Host("jupyter", "widget"))
    assert set(data) == {WIDGET, "text/html", "text/plain"}
    assert data["text/html"] == "<div>TensorBoard of &lt;img src=x onerror=&quot;1&quot;&gt;: /logs/&lt;b&gt;</div>"


def test_an_administrators_address_takes_precedence(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_PROXY_URL", "/theirs/%PORT%/")
    monkeypatch.setenv("TFOS_NB_PROXY_URL", "/ours/%PORT%/")
    for host in (Host("jupyter", "widget"), Host("colab", "widget"), Host("databricks", "widget")):
        data, _ = shown(host=host)
        assert re.search(rf'src="/ours/{endpoint.open_port()}/0123456789ab/enter\?code=[\w-]+"', data["text/html"])
        assert "onerror=" not in re.sub(r"&lt;.*?&gt;", "", data["text/html"])


def test_on_colab_a_script_requests_the_ports_address_from_the_page(endpoint: Endpoint) -> None:
    data, _ = shown(host=Host("colab", "widget"), height=640)
    found = re.search(r"\)\((\{.*\})\)</script>$", data["text/html"], re.DOTALL)
    assert found
    given = json.loads(found[1])
    assert given["port"] == endpoint.open_port()
    assert all(path.startswith("0123456789ab/enter?code=") for path in given["paths"])
    assert len(set(given["paths"])) == 2, "the link and the frame: each opens once"
    assert (given["height"], given["name"]) == (640, NASTY)
    assert "google.colab.kernel.proxyPort(given.port" in data["text/html"]
    assert "<img" not in data["text/html"], "a name does not end the script"


def test_on_databricks_the_link_uses_the_drivers_proxy(endpoint: Endpoint) -> None:
    conf = {
        "spark.databricks.clusterUsageTags.clusterId": "0123-456789-abc",
        "spark.databricks.clusterUsageTags.clusterOwnerOrgId": "987",
        "spark.databricks.workspaceUrl": "dbc-1.cloud.databricks.com",
    }
    data, _ = shown(host=Host("databricks", "widget"), spark_conf=conf, frame=False)
    base = f"https://dbc-1.cloud.databricks.com/driver-proxy/o/987/0123-456789-abc/{endpoint.open_port()}/0123456789ab"
    assert f'href="{base}/enter?code=' in data["text/html"]
    assert "iframe" not in data["text/html"]


def test_a_terminal_gets_an_address_that_opens_once(endpoint: Endpoint) -> None:
    data, printed = shown(host=Host("terminal", "text"))
    assert data == {}
    assert f"http://127.0.0.1:{endpoint.open_port()}/0123456789ab/enter?code=" in printed
    assert "the link opens once" in printed


@pytest.mark.parametrize("name", ["headless", "script"])
def test_without_a_page_no_port_is_opened(endpoint: Endpoint, name: str) -> None:
    data, printed = shown(host=Host(name, "text"))
    assert data == {}
    assert "the logs are in /logs/<b>" in printed
    assert endpoint._port is None


def test_a_cluster_without_logs_is_refused_with_the_remedy(endpoint: Endpoint) -> None:
    with pytest.raises(PlanError, match="was launched without TensorBoard: launch it with --tensorboard"):
        show_tensorboard(Running(""), host=Host("jupyter", "widget"))


def test_calling_without_a_cluster_or_directory_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(
        PlanError,
        match="got neither; name a cluster, or give --logdir DIR",
    ):
        show_tensorboard(host=Host("jupyter", "widget"))


def test_an_address_without_its_port_is_refused(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFOS_NB_PROXY_URL", "/proxy/")
    with pytest.raises(PlanError, match="TFOS_NB_PROXY_URL must contain %PORT%.* got /proxy/"):
        shown()
