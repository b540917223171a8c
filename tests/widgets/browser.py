"""A real browser, and a small server instead of Jupyter's, for the tests of the panel's page."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tfos_nb import widgets
from tfos_nb.widgets.charts.esm import joined

BASE = "/user/alice/"
WIDGETS = Path(widgets.__file__).parent
FILES: dict[str, tuple[Path | str, str]] = {
    "/": (Path(__file__).with_name("panel_page.html"), "text/html"),
    "/panel.js": ("panel.js", "text/javascript"),
    "/page.js": ("page.js", "text/javascript"),
    "/panel.css": ("panel.css", "text/css"),
    "/chart.css": ("chart.css", "text/css"),
}


class Request(NamedTuple):
    """A request of the page."""

    method: str
    path: str
    headers: dict[str, str]


class Server(ThreadingHTTPServer):
    """Serves the page, and the answers that a test sets below :data:`BASE`; other paths are not found."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.forget()

    def forget(self) -> None:
        """Forget the answers and requests, for the next test."""
        self.answers: dict[str, tuple[int, object]] = {}
        self.requests: list[Request] = []

    def answer(self, path: str, content: object, status: int = 200) -> None:
        """Set the answer for this path, which begins after the base URL and may have a query."""
        self.answers[f"{BASE}tfos-nb/{path}"] = (status, content)

    def asked(self, part: str) -> list[Request]:
        """Return the requests whose path has this part."""
        return [request for request in self.requests if part in request.path]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path in FILES:
            file, kind = FILES[self.path]
            joint = joined(file).encode() if isinstance(file, str) else file.read_bytes()  # as anywidget receives it
            self._send(200, kind, joint)
            return
        self.server.requests.append(Request(self.command, self.path, dict(self.headers)))
        status, content = self.server.answers.get(self.path, (404, {"message": "not found"}))
        self._send(status, "application/json", json.dumps(content).encode())

    do_POST = do_GET  # noqa: N815

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    """Serve in a thread."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, name="page-server")
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the machine's Chromium; skip the test if it or Playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
