"""The Jupyter server extension, in a real Jupyter server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfos_nb
from tests.conftest import ENVIRONMENT, RunScript

TOKEN = "a-token"
START_SECONDS = 90.0


def an_unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def a_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Jupyter server under a base URL, with the extension named: an editable install enables none."""
    port, folder = an_unused_port(), tmp_path_factory.mktemp("jupyter")
    url = f"http://127.0.0.1:{port}/user/alice/"
    settings = {
        "ServerApp.port": port,
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.base_url": "/user/alice/",
        "ServerApp.jpserver_extensions": "{'tfos_nb.serverext': True}",
        "ServerApp.root_dir": folder,
        "IdentityProvider.token": TOKEN,
    }
    command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"]
    command += [f"--{name}={value}" for name, value in settings.items()]
    own = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    log = folder / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env={**ENVIRONMENT, **own}, stdout=output, stderr=output)
    try:
        await_answer(url + "api", server, log)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def await_answer(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
        threading.Event().wait(0.1)


def get(url: str, token: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"token {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def test_says_its_version_to_whoever_has_the_token(a_server: str) -> None:
    status, body = get(a_server + "tfos-nb/api/version", TOKEN)
    assert (status, json.loads(body)) == (200, {"version": tfos_nb.__version__})


@pytest.mark.parametrize("token", [None, "another-token"])
def test_says_nothing_to_anybody_else(a_server: str, token: str | None) -> None:
    status, body = get(a_server + "tfos-nb/api/version", token)
    assert status in (401, 403)
    assert tfos_nb.__version__ not in body


def test_loads_neither_spark_nor_tensorflow_into_the_server(run_script: RunScript) -> None:
    said = run_script(
        """
        import sys
        import tfos_nb.serverext
        print(sorted({name.partition(".")[0] for name in sys.modules} & {"pyspark", "tensorflow", "keras", "py4j"}))
        """
    ).stdout
    assert said == f"[]{os.linesep}"
