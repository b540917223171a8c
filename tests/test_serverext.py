"""The Jupyter server extension in a real Jupyter server: only logged-in users reach the kernel."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import tfos_nb
from tests.conftest import RunScript
from tests.events import write_a_number
from tests.jupyter_server import TOKEN, Answer, JupyterServer, a_server
from tests.waiting import until
from tfos_nb.errors import ClusterClosed, TfosError
from tfos_nb.jupyter import connection
from tfos_nb.jupyter.connection import Place
from tfos_nb.jupyter.endpoint import Endpoint
from tfos_nb.runtime.node.tensorboard import make_log_dir
from tfos_nb.state.chart_data import chart_data
from tfos_nb.state.cluster_state import ClusterState, ClusterStatus, LogLine, NodeState
from tfos_nb.state.training_curve import Point

__all__ = ["a_server"]

NOBODYS = "0123456789ab"


class EndedCluster:
    """An ended cluster of this kernel, with the methods that the endpoint calls."""

    tensorboard_socket = ""

    def __init__(self, cluster_id: str, log_dir: str = "", status: ClusterStatus = ClusterStatus.DONE) -> None:
        self.id, self._log_dir, self._status = cluster_id, log_dir, status
        self.stops = 0

    def snapshot(self) -> ClusterState:
        nodes = (NodeState("worker:0"),)
        return ClusterState("<b>mnist</b>", self.id, status=self._status, nodes=nodes, log_dir=self._log_dir)

    def request_stop(self) -> str:
        self.stops += 1
        return f"stopped {self.stops}"

    def log_lines(self, node: str, limit: int) -> Sequence[LogLine]:
        if node not in ("", "worker:0"):
            raise ValueError(f"no node {node!r}")
        return [LogLine(1.5, node, "<script>alert(1)</script>")]

    def curves(self, metric: str, by: str, node: str) -> dict[str, Any]:
        if node not in ("", "worker:0"):
            raise ValueError(f"no node {node!r}")
        return chart_data([Point(1, 8, {"loss": 0.5}, ends_epoch=True)], metric=metric, by=by, node=node)

    def stacks(self) -> dict[str, str]:
        if self._status.ended:
            raise ClusterClosed("cluster mnist has ended")
        return {"worker:0": 'Thread (main)\n  File "train.py", line 3 in main'}


@pytest.fixture
def runtime_dir(a_server: JupyterServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make this process a kernel of that server; return its runtime directory."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", a_server.runtime_dir)
    return a_server.runtime_dir


@pytest.fixture
def endpoint(runtime_dir: str) -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


def test_the_version_is_given_to_requests_with_the_token(a_server: JupyterServer) -> None:
    answer = a_server.ask("tfos-nb/api/version")
    assert (answer.status, json.loads(answer.body)) == (200, {"version": tfos_nb.__version__})


@pytest.mark.parametrize("token", [None, "another-token"])
@pytest.mark.parametrize(
    "path",
    [
        "api/version",
        f"api/clusters/{NOBODYS}/log",
        f"api/clusters/{NOBODYS}/curves",
        f"api/clusters/{NOBODYS}/stacks",
        f"tb/{NOBODYS}/",
        f"tb/{NOBODYS}",
    ],
)
def test_requests_without_the_token_are_refused(a_server: JupyterServer, path: str, token: str | None) -> None:
    answer = a_server.ask(f"tfos-nb/{path}", token=token)
    assert answer.status in (302, 401, 403)
    assert answer.status != 302 or "/login?" in answer.headers["Location"]
    assert tfos_nb.__version__ not in answer.text


def test_each_stop_request_reaches_the_cluster(a_server: JupyterServer, endpoint: Endpoint) -> None:
    cluster = EndedCluster("aaaabbbbcccc")
    endpoint.serve(cluster)
    said = [json.loads(a_server.ask(f"tfos-nb/api/clusters/{cluster.id}/stop", "POST").body)["said"] for _ in range(2)]
    assert said == ["stopped 1", "stopped 2"]


def test_another_site_cannot_stop_a_cluster(a_server: JupyterServer, endpoint: Endpoint) -> None:
    """Another site's page can make a browser send its cookies, but not the header that Jupyter also requires."""
    cluster = EndedCluster("aaaabbbbdddd")
    endpoint.serve(cluster)
    answer = a_server.ask(f"tfos-nb/api/clusters/{cluster.id}/stop", "POST", token=None, Cookie="_xsrf=1")
    assert answer.status in (302, 403)
    assert cluster.stops == 0


@pytest.mark.parametrize("path", ["..%2fstop", "..%2f..%2faaaabbbbddde%2fstop", "%2e%2e%2fstop", "x%2f..%2f..%2fstop"])
def test_the_path_to_tensorboard_leads_nowhere_else(a_server: JupyterServer, endpoint: Endpoint, path: str) -> None:
    """On this path, Jupyter's check against other sites is off, since TensorBoard's own requests would fail it."""
    cluster = EndedCluster("aaaabbbbddde", "/tmp")
    endpoint.serve(cluster)
    assert a_server.ask(f"tfos-nb/tb/{cluster.id}/{path}", "POST").status == 404
    assert cluster.stops == 0


def test_a_nodes_log_lines_are_returned_as_json(a_server: JupyterServer, endpoint: Endpoint) -> None:
    endpoint.serve(EndedCluster("aaaabbbbeeee"))
    answer = a_server.ask("tfos-nb/api/clusters/aaaabbbbeeee/log?node=worker%3A0")
    assert json.loads(answer.body) == {"lines": [[1.5, "worker:0", "<script>alert(1)</script>"]]}
    assert answer.headers["Content-Type"].startswith("application/json")


def test_a_charts_numbers_are_returned_as_json(a_server: JupyterServer, endpoint: Endpoint) -> None:
    endpoint.serve(EndedCluster("aaaabbbbeee1"))
    answer = a_server.ask("tfos-nb/api/clusters/aaaabbbbeee1/curves?metric=loss&by=step&node=worker%3A0")
    told = json.loads(answer.body)
    assert (answer.status, told["metric"], told["by"], told["node"]) == (200, "loss", "step", "worker:0")
    assert told["lines"] == [{"name": "training", "metric": "loss", "x": [8.0], "y": [0.5]}]
    assert a_server.ask("tfos-nb/api/clusters/aaaabbbbeee1/curves?node=ps%3A7").status == 404


def test_the_nodes_stacks_are_returned_as_json(a_server: JupyterServer, endpoint: Endpoint) -> None:
    endpoint.serve(EndedCluster("aaaabbbbeee2", status=ClusterStatus.RUNNING))
    answer = a_server.ask("tfos-nb/api/clusters/aaaabbbbeee2/stacks")
    assert json.loads(answer.body) == {"stacks": {"worker:0": 'Thread (main)\n  File "train.py", line 3 in main'}}
    endpoint.serve(EndedCluster("aaaabbbbeee3"))
    answer = a_server.ask("tfos-nb/api/clusters/aaaabbbbeee3/stacks")
    assert json.loads(answer.body) == {"message": "cluster mnist has ended"}


def test_an_unknown_node_is_refused_by_name(a_server: JupyterServer, endpoint: Endpoint) -> None:
    endpoint.serve(EndedCluster("aaaabbbbeeef"))
    answer = a_server.ask("tfos-nb/api/clusters/aaaabbbbeeef/log?node=worker%3A9")
    assert (answer.status, "worker:9" in answer.text) == (404, True)


def test_an_unpublished_cluster_is_not_found(a_server: JupyterServer) -> None:
    assert a_server.ask(f"tfos-nb/tb/{NOBODYS}/").status == 404
    assert a_server.ask(f"tfos-nb/api/clusters/{NOBODYS}/stop", "POST").status == 404


@pytest.mark.parametrize("name", ["..%2f..%2fetc", "UPPERCASE", "short", "a" * 65, "aaaa%00bbbb"])
def test_an_invalid_id_reads_no_file(a_server: JupyterServer, name: str) -> None:
    assert a_server.ask(f"tfos-nb/tb/{name}/data").status == 404


def test_an_ended_kernel_is_reported(a_server: JupyterServer, runtime_dir: str, run_script: RunScript) -> None:
    """A killed kernel leaves its file; the page says that the kernel has ended, and does not wait."""
    run_script(
        """
        import os
        from tfos_nb.jupyter.connection import Place, publish
        publish(Place("deadbeefdead", "mnist", "/tmp/no-such-socket", os.getpid()))
        """,
        JUPYTER_RUNTIME_DIR=runtime_dir,
    )
    answer = a_server.ask("tfos-nb/tb/deadbeefdead/")
    assert (answer.status, "kernel that held this cluster has ended" in answer.text) == (410, True)
    assert a_server.ask("tfos-nb/api/clusters/deadbeefdead/stop", "POST").status == 410


def test_files_are_accessible_only_to_their_user(endpoint: Endpoint, runtime_dir: str) -> None:
    endpoint.serve(EndedCluster("aaaabbbbffff"))
    file = os.path.join(runtime_dir, "tfos_nb", "aaaabbbbffff.json")
    for path in (file, os.path.dirname(file), endpoint.socket, os.path.dirname(endpoint.socket)):
        assert os.stat(path).st_mode & 0o077 == 0, path


def test_a_file_with_another_id_is_ignored(runtime_dir: str) -> None:
    connection.publish(Place("aaaabbbb0000", "mnist", "/tmp/x", 1))
    folder = os.path.join(runtime_dir, "tfos_nb")
    os.rename(os.path.join(folder, "aaaabbbb0000.json"), os.path.join(folder, "aaaabbbb1111.json"))
    assert connection.find("aaaabbbb1111") is None


def test_a_log_directory_on_another_machine_is_named(a_server: JupyterServer, endpoint: Endpoint) -> None:
    endpoint.serve(EndedCluster("aaaabbbb2222", "/no/such/<i>logs</i>"))
    answer = a_server.ask("tfos-nb/tb/aaaabbbb2222/")
    assert answer.status == 404
    assert "/no/such/&lt;i&gt;logs&lt;/i&gt; is not on the kernel" in answer.text


class UnreachedCluster(EndedCluster):
    """A detached cluster that runs, and which this kernel does not reach."""

    @property
    def tensorboard_socket(self) -> str:  # type: ignore[override]
        raise TfosError("mnist: this kernel does not reach far:7000")


def test_a_log_directory_is_read_if_the_cluster_is_not_reached(a_server: JupyterServer, endpoint: Endpoint) -> None:
    endpoint.serve(UnreachedCluster("aaaabbbb2223", "/no/such/logs", ClusterStatus.RUNNING))
    answer = a_server.ask("tfos-nb/tb/aaaabbbb2223/")
    assert answer.status == 404
    assert "this kernel does not reach far:7000. The log directory /no/such/logs is not on the kernel" in answer.text


def test_the_page_of_a_starting_cluster_refreshes_itself(a_server: JupyterServer, endpoint: Endpoint) -> None:
    endpoint.serve(EndedCluster("aaaabbbb3333", "/tmp", ClusterStatus.STARTING))
    answer = a_server.ask("tfos-nb/tb/aaaabbbb3333/")
    assert (answer.status, 'http-equiv="refresh"' in answer.text) == (503, True)
    assert "<b>mnist" not in answer.text


def test_the_page_says_how_to_launch_with_tensorboard(a_server: JupyterServer, endpoint: Endpoint) -> None:
    endpoint.serve(EndedCluster("aaaabbbb4444"))
    answer = a_server.ask("tfos-nb/tb/aaaabbbb4444/")
    assert (answer.status, "--tensorboard" in answer.text) == (404, True)


def test_an_address_without_its_last_slash_is_redirected(a_server: JupyterServer) -> None:
    answer = a_server.ask(f"tfos-nb/tb/{NOBODYS}?x=1")
    assert (answer.status, answer.headers["Location"]) == (302, f"/user/alice/tfos-nb/tb/{NOBODYS}/")


def test_the_logs_of_an_ended_cluster_are_shown(
    a_server: JupyterServer, endpoint: Endpoint, tmp_path: os.PathLike[str]
) -> None:
    logs = os.path.join(tmp_path, "logs", "run1")
    make_log_dir(logs)
    endpoint.serve(EndedCluster("aaaabbbb5555", os.path.dirname(logs)))

    def ask() -> Answer:
        return a_server.ask(f"tfos-nb/tb/aaaabbbb5555/?token={TOKEN}", token=None)

    early = ask()
    assert (early.status, "Nothing to show yet" in early.text) == (503, True)
    assert 'http-equiv="refresh"' in early.text
    write_a_number(logs)
    assert until(lambda: ask().status != 503)
    page = ask()
    assert (page.status, "<title>TensorBoard</title>" in page.text) == (200, True)
    assert page.headers["Content-Security-Policy"].endswith("; frame-ancestors 'self'")
    assert "url(font-roboto/" in page.text, "no address of its page leaves the path that it is shown under"
    assert "url(/" not in page.text
    assert '<head><script src="tfos_nb/reload.js"></script>' in page.text
    script = a_server.ask("tfos-nb/tb/aaaabbbb5555/tfos_nb/reload.js")
    assert (script.status, script.headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
    assert "{ ...settings, autoReload: true }" in script.text
    data = a_server.ask("tfos-nb/tb/aaaabbbb5555/data/runs", Cookie="secret=1", Accept_Encoding="gzip")
    assert (data.status, data.headers["Content-Encoding"]) == (200, "gzip")


def test_two_pages_at_once_share_one_tensorboard(
    a_server: JupyterServer, endpoint: Endpoint, tmp_path: os.PathLike[str]
) -> None:
    endpoint.serve(EndedCluster("aaaabbbb6666", str(tmp_path)))
    found: list[int] = []

    def ask() -> None:
        found.append(a_server.ask("tfos-nb/tb/aaaabbbb6666/data/environment").status)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 4
    assert len(endpoint._boards) == 1


def test_files_of_another_machines_kernels_are_removed_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several hosts may share a home directory: a process on another host cannot be checked here."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(connection, "_KEPT_FILES", 0)
    theirs = Place("aaaabbbb1111", "theirs", "/tmp/nowhere", 1 << 22, "another-machine")
    gone = Place("aaaabbbb2222", "gone", "/tmp/nowhere", 1 << 22)
    assert (theirs.alive, gone.alive) == (True, False)
    for place in (theirs, gone):
        connection.publish(place)
    connection.publish(Place("aaaabbbb3333", "new", "/tmp/nowhere", os.getpid()))
    folder = connection.runtime_directory()
    assert sorted(file.stem for file in folder.glob("*.json")) == ["aaaabbbb1111", "aaaabbbb3333"]
    long_ago = time.time() - 31 * 86_400
    os.utime(folder / "aaaabbbb1111.json", (long_ago, long_ago))
    connection.publish(Place("aaaabbbb3333", "new", "/tmp/nowhere", os.getpid()))
    assert sorted(file.stem for file in folder.glob("*.json")) == ["aaaabbbb3333"]


def test_idle_tensorboards_end_and_start_again_on_request(
    a_server: JupyterServer, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfos_nb.jupyter.endpoint._BOARDS", 1)
    clusters = {"aaaabbbb7777": str(tmp_path / "one"), "aaaabbbb8888": str(tmp_path / "two")}
    for name, log_dir in clusters.items():
        os.mkdir(log_dir)
        endpoint.serve(EndedCluster(name, log_dir))
    two = clusters["aaaabbbb8888"]
    for name, log_dir in clusters.items():
        assert a_server.ask(f"tfos-nb/tb/{name}/data/environment").status == 200
        assert list(endpoint._boards) == [log_dir], "the other makes room"
    second = endpoint._boards[two].board
    assert second._process is not None
    assert endpoint._loop is not None
    asyncio.run_coroutine_threadsafe(endpoint._end_idle_boards(time.monotonic() + 3600), endpoint._loop).result(30)
    assert endpoint._boards == {}
    assert second._process.poll() is not None
    assert not os.path.exists(second._directory)
    assert a_server.ask("tfos-nb/tb/aaaabbbb8888/data/environment").status == 200, "it starts again"


def test_only_the_last_ended_clusters_are_kept(
    a_server: JupyterServer, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfos_nb.jupyter.endpoint._ENDED_KEPT", 2)
    running = EndedCluster("aaaabbbb0000", status=ClusterStatus.RUNNING)
    names = [f"aaaacccc000{number}" for number in range(4)]
    for cluster in (running, *map(EndedCluster, names)):
        endpoint.serve(cluster)
    found = [a_server.ask(f"tfos-nb/api/clusters/{name}/log?node=worker%3A0").status for name in (running.id, *names)]
    assert found == [200, 404, 200, 200, 200]


def test_credentials_are_not_passed_on() -> None:
    """No header that can hold a secret is passed to the kernel, or from it to Jupyter's origin."""
    secrets = dict.fromkeys(("Cookie", "Authorization", "X-XSRFToken", "Proxy-Authorization", "Referer"), "secret")
    assert connection.passed_on({"Accept": "*/*", **secrets}) == {"Accept": "*/*"}
    assert connection.answered({"Set-Cookie": "a=1", "Connection": "close", "ETag": "x"}) == {"ETag": "x"}
    query = [("tag", "loss/a b"), ("token", "secret"), ("_xsrf", "secret")]
    assert str(connection.below("http://127.0.0.1:6006", "data/scalars", query)) == (
        "http://127.0.0.1:6006/data/scalars?tag=loss%2Fa+b"
    )


def test_the_extension_imports_neither_spark_nor_tensorflow(run_script: RunScript) -> None:
    said = run_script(
        """
        import sys
        import tfos_nb.serverext
        print(sorted({name.partition(".")[0] for name in sys.modules} & {"pyspark", "tensorflow", "keras", "py4j"}))
        """
    ).stdout
    assert said == f"[]{os.linesep}"


def test_only_the_final_state_of_an_ended_cluster_is_kept(endpoint: Endpoint) -> None:
    first = EndedCluster("0123456789ab")
    lines = first.log_lines("", 50)
    gone = weakref.ref(first)
    endpoint.serve(first)
    endpoint.serve(EndedCluster("1123456789ab"))
    kept = endpoint._clusters[first.id]
    assert kept.snapshot() == first.snapshot()
    assert "has ended already" in kept.request_stop()
    assert kept.curves("loss", "", "")["lines"] == [], "its state has no points"
    assert [line.text for line in kept.log_lines("", 50)] == [line.text for line in lines]
    del first
    gc.collect()
    assert gone() is None, "its results and its history would stay with it"


def test_sessions_of_missing_sockets_can_be_closed_twice_at_once(endpoint: Endpoint) -> None:
    async def twice() -> list[None]:
        for number in range(3):
            endpoint._session(f"/no/such/{number}", lambda n=number: aiohttp.UnixConnector(f"/no/such/{n}"))
        return await asyncio.gather(endpoint._end_boards([]), endpoint._end_boards([]))

    assert endpoint._loop is not None
    assert asyncio.run_coroutine_threadsafe(twice(), endpoint._loop).result(30) == [None, None]
    assert endpoint._sessions == {}
