"""The kernel's port without the server extension: a link opens once, and leads to a separate address."""

from __future__ import annotations

import http.cookiejar
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.events import write_a_number
from tests.jupyter_server import TOKEN, JupyterServer, a_server
from tests.waiting import until
from tfos_nb.errors import PlanError, TfosError
from tfos_nb.jupyter.access_links import AccessLinks
from tfos_nb.jupyter.endpoint import Endpoint
from tfos_nb.widgets.tensorboard import LogDirectory

__all__ = ["a_server"]


@pytest.fixture
def endpoint(a_server: JupyterServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", a_server.runtime_dir)
    made = Endpoint()
    yield made
    made.close()


@pytest.fixture
def logs(endpoint: Endpoint, tmp_path: Path) -> LogDirectory:
    write_a_number(tmp_path)
    directory = LogDirectory(str(tmp_path))
    endpoint.serve(directory)
    return directory


class Browser:
    """Keeps cookies and follows redirections, as a browser does."""

    def __init__(self, token: str = "") -> None:
        self.cookies = http.cookiejar.CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))
        self._headers = {"Authorization": f"token {token}"} if token else {}

    def open(self, url: str) -> tuple[int, str, str]:
        request = urllib.request.Request(url, headers=self._headers)
        try:
            with self._opener.open(request, timeout=60) as answer:
                return answer.status, answer.url, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.url or url, error.read().decode()

    def open_until_shown(self, url: str) -> tuple[int, str, str]:
        """Open a link, and reload its target like the waiting page."""
        found = [self.open(url)]

        def shown() -> bool:
            if found[-1][0] == 503:
                found.append(self.open(found[-1][1]))
            return found[-1][0] != 503

        assert until(shown)
        return found[-1]


def test_a_link_opens_tensorboard_once(endpoint: Endpoint, logs: LogDirectory) -> None:
    root = f"http://127.0.0.1:{endpoint.open_port()}/"
    link = root + endpoint.access_link(logs.id)
    friend, stranger = Browser(), Browser()
    status, url, body = friend.open_until_shown(link)
    assert (status, "<title>TensorBoard</title>" in body) == (200, True)
    assert re.fullmatch(rf"{re.escape(root)}{logs.id}/[\w-]{{43}}/tb/", url)
    assert friend.open(f"{url}data/environment")[0] == 200, "without a cookie: a frame of another site's page has none"
    assert not list(friend.cookies)
    assert stranger.open(link)[0] == 403
    assert stranger.open(f"{root}{logs.id}/tb/data/environment")[0] == 404
    assert stranger.open(f"{root}{logs.id}/{'x' * 43}/tb/data/environment")[0] == 403


@pytest.mark.slow
def test_the_address_of_a_link_works_for_anyone_until_the_kernel_ends(endpoint: Endpoint, logs: LogDirectory) -> None:
    root = f"http://127.0.0.1:{endpoint.open_port()}/"
    url = Browser().open_until_shown(root + endpoint.access_link(logs.id))[1]
    assert Browser().open_until_shown(url)[0] == 200, "a pass in the address, no cookie: so the documentation says it"
    assert Browser().open_until_shown(root + endpoint.access_link(logs.id))[1] == url, "one pass for a cluster"
    endpoint.close()
    with pytest.raises(urllib.error.URLError):
        Browser().open(url)


@pytest.mark.slow
def test_a_link_works_through_jupyter_server_proxy(
    a_server: JupyterServer, endpoint: Endpoint, logs: LogDirectory
) -> None:
    root = f"{a_server.url}proxy/{endpoint.open_port()}/"
    status, url, body = Browser(TOKEN).open_until_shown(root + endpoint.access_link(logs.id))
    assert (status, "<title>TensorBoard</title>" in body) == (200, True)
    assert url.startswith(f"{root}{logs.id}/")


def test_the_port_serves_only_tensorboard(endpoint: Endpoint, logs: LogDirectory) -> None:
    root = f"http://127.0.0.1:{endpoint.open_port()}/"
    browser = Browser()
    inside = browser.open(root + endpoint.access_link(logs.id))[1].removesuffix("tb/")
    for path in ("log?node=worker:0", "stop", "tb/..%2fstop", "tb/..%2f..%2fstop"):
        assert browser.open(inside + path)[0] == 404, path
    assert browser.open(root)[0] == 204, "a page may ask whether a proxy leads here"


def test_the_port_is_local_and_stays_the_same(endpoint: Endpoint) -> None:
    port = endpoint.open_port()
    assert endpoint.open_port() == port
    with socket.socket() as elsewhere, pytest.raises(ConnectionRefusedError):
        elsewhere.settimeout(5)
        elsewhere.bind(("127.0.0.2", 0))
        elsewhere.connect(("127.0.0.3", port))  # another address of this machine


def test_a_full_range_of_ports_is_named(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("TFOS_NB_PORT", str(taken.getsockname()[1]))
        with pytest.raises(TfosError, match=r"no port for TensorBoard: \d+ on 127.0.0.1 is taken. Set TFOS_NB_PORT"):
            endpoint.open_port()


def test_an_invalid_range_is_refused(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFOS_NB_PORT", "many")
    with pytest.raises(PlanError, match="TFOS_NB_PORT must be one port.*, got many"):
        endpoint.open_port()


def test_a_code_is_valid_for_one_cluster() -> None:
    links = AccessLinks()
    code = links.new_code("one")
    assert links.enter("another", code) is None
    assert links.enter("one", code) is None, "and whoever tried it elsewhere has used it up"


def test_a_pass_is_valid_for_one_cluster() -> None:
    links = AccessLinks()
    admitted = links.enter("one", links.new_code("one"))
    assert admitted is not None
    assert links.knows("one", admitted)
    assert not links.knows("another", admitted)
    assert not links.knows("one", "")


def test_a_missing_directory_is_named() -> None:
    with pytest.raises(PlanError, match="/no/such/logs: no such directory on"):
        LogDirectory("/no/such/logs")
