"""Fixture of a real Jupyter server under a base URL, with the extension."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT

TOKEN = "a-token"
START_SECONDS = 90.0


@dataclass(frozen=True)
class Answer:
    """Answer of a server."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True)
class JupyterServer:
    """Address of a running server, and the directory in which its kernels publish themselves."""

    url: str
    runtime_dir: str

    def ask(
        self, path: str, method: str = "GET", token: str | None = TOKEN, body: bytes | None = None, **headers: str
    ) -> Answer:
        """Send a request with a token, or without one."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["Authorization"] = f"token {token}"
        request = urllib.request.Request(self.url + path, headers=sent, method=method, data=body)
        opener = urllib.request.build_opener(_NoRedirect())
        try:
            with opener.open(request, timeout=60) as answer:
                return Answer(answer.status, answer.read(), dict(answer.headers))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read(), dict(error.headers))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object) -> None:
        return None


def an_unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def a_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    """A Jupyter server under a base URL. It names the extension, since an editable install does not enable it."""
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
        yield JupyterServer(url, own["JUPYTER_RUNTIME_DIR"])
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
