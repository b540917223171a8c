"""Any address, method or header that a browser sends: it reaches only the registered TensorBoard, and only that path.

The requests go byte by byte to a real Jupyter server with the extension, and to the kernel's own port. Behind both is
a fake TensorBoard that records its requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, unquote_to_bytes, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.inputs import examples
from tests.fuzz.web import Board, Raw, RunningCluster, ask_raw
from tests.jupyter_server import TOKEN, JupyterServer, a_server
from tfos_nb.jupyter import connection
from tfos_nb.jupyter.endpoint import Endpoint
from tfos_nb.jupyter.message_page import page

__all__ = ["a_server"]

ID = "aaaabbbbcccc"
SECRET = "5ec3e75ec3e7"
NOT_PASSED_ON = {"Cookie", "Authorization", "Proxy-Authorization", "X-Xsrftoken", "Referer", "Origin", "Forwarded"}
FOR_THE_FIRST_PAGE = ("/", "/data/plugins_listing")
REFUSALS = {0, 400, 403, 404, 405, 414, 431}


@dataclass
class Site:
    """A kernel of that server, with one cluster; its own port is open to clients that have the pass."""

    port: int
    endpoint: Endpoint
    cluster: RunningCluster
    board: Board
    link_port: int
    admitted: str = ""

    def forget(self) -> None:
        self.board.asked.clear()
        self.cluster.asked_for.clear()

    def by_jupyter(self, target: bytes, method: bytes = b"GET", headers: bytes = b"", body: bytes = b"") -> Raw:
        """Send a request as a user who is logged in."""
        known = f"Host: 127.0.0.1:{self.port}\r\nAuthorization: token {TOKEN}\r\nConnection: close\r\n".encode()
        return ask_raw(self.port, b"%s %s HTTP/1.1\r\n%s%s\r\n%s" % (method, target, known, headers, body))

    def by_link(self, target: bytes, method: bytes = b"GET", headers: bytes = b"", body: bytes = b"") -> Raw:
        known = b"Host: 127.0.0.1\r\nConnection: close\r\n"
        return ask_raw(self.link_port, b"%s %s HTTP/1.1\r\n%s%s\r\n%s" % (method, target, known, headers, body))

    def ask(self, by_jupyter: bool, path: bytes, *rest: Any) -> Raw:
        """Request a path of TensorBoard, by Jupyter or by the kernel's port."""
        if by_jupyter:
            return self.by_jupyter(b"/user/alice/tfos-nb/tb/%s/%s" % (ID.encode(), path), *rest)
        return self.by_link(b"/%s/%s/tb/%s" % (ID.encode(), self.admitted.encode(), path), *rest)

    def check_still_serves(self) -> None:
        """Check that the cluster was not stopped, and that the board answers a valid request."""
        assert self.cluster.stops == 0
        for by_jupyter in (True, False):
            self.forget()
            answer = self.ask(by_jupyter, b"data/runs?tag=loss")
            assert answer.status == 200
            assert [(method, target) for method, target, *_ in self.board.asked] == [("GET", "/data/runs?tag=loss")]


@pytest.fixture(scope="module")
def site(a_server: JupyterServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as environment, Board.at(str(tmp_path_factory.mktemp("b") / "board")) as board:
        environment.setenv("JUPYTER_RUNTIME_DIR", a_server.runtime_dir)
        endpoint = Endpoint()
        cluster = RunningCluster(ID, board.path)
        endpoint.serve(cluster)
        port = urlsplit(a_server.url).port
        assert port is not None
        site = Site(port, endpoint, cluster, board, endpoint.open_port())
        link = site.by_link(b"/" + endpoint.access_link(ID).encode())
        site.admitted = link.header("Location")[0].partition("/")[0]
        yield site
        endpoint.close()


WICKED = [
    *("..", ".", "%2e%2e", "%2E.", ".%09.", ".%0d.", "%252e%252e", "%25252e%25252e", "..;", "...", ".%00.", "%c0%ae."),
    *("/", "//", "%2f", "%2F", "%252f", "\\", "%5c", "%255c", "%ef%bc%8f", ";", ":", "@"),
    *("http://evil.example/", "//evil.example/", "http:/evil.example", "https:%2f%2fevil.example", "file:///etc/passwd"),
    *("%0d%0aX-Injected:%201", "%0a", "%09", "%20", "%00", "%7f", "%", "%z", "%ff", "%ed%a0%80", "%23", "#", "%3f"),
    *("+", "stop", "log", ID, "data", "tb", "index.html", "caf%c3%a9", "[", "]", "{", "a" * 300, "%26"),
]  # fmt: skip
part = st.sampled_from(WICKED).map(str.encode) | st.text(max_size=5).map(
    lambda text: quote(text, errors="replace").encode()
)
paths = st.lists(part, max_size=7).map(b"".join) | st.lists(part, max_size=7).map(b"/".join)
raw_paths = paths | st.binary(max_size=20)
queries = st.lists(
    st.sampled_from(["a", "token", "_xsrf", "%74oken", "a%00", "", "%ff", "TOKEN"]).map(lambda name: f"{name}={SECRET}")
    | st.sampled_from(["x=1", "&&", "=", "x=%0d%0ay", "x=a+b", "x=%26y%3d1", ";token=2", "?", "/../"]),
    max_size=4,
).map(lambda parts: "&".join(parts).encode())


def check_reached(site: Site, answer: Raw, path: bytes) -> None:
    """Check that the board was asked for this path or not at all, and that the answer has no secret and no cookie."""
    assert answer.status in {200, 302, *REFUSALS}, answer.all[:500]
    assert site.cluster.asked_for == []
    assert site.cluster.stops == 0
    assert not answer.header("X-Injected")
    assert not answer.header("X-Secret")
    assert not [value for value in answer.header("Set-Cookie") if value.startswith("a=1")]
    assert answer.status != 200 or TOKEN.encode() not in answer.all  # Jupyter's own pages have it for logged-in users
    for secret in (site.admitted, site.endpoint.socket, site.board.path):
        assert answer.status == 400 or secret.encode() not in answer.all  # a 400 repeats what could not be read
    for _, target, headers, _ in site.board.asked:
        reached = target.partition("?")[0]
        assert not {".", ".."} & set(re.split(r"[/\\]", unquote(reached)))
        assert not {"token", "_xsrf"} & {name for name, _ in parse_qsl(target.partition("?")[2])}
        assert not {name.title() for name in headers} & NOT_PASSED_ON
        if is_an_address(path) and reached not in FOR_THE_FIRST_PAGE:
            assert unquote_to_bytes(reached) == b"/" + unquote_to_bytes(path.partition(b"?")[0])


def is_an_address(path: bytes) -> bool:
    """Return whether a request can have this path, and it decodes to a text. The servers differ in other paths."""
    try:
        unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        return False
    return path.isascii() and b"#" not in path


@example(path=b".%09./x", query=b"", by_jupyter=False)
@example(path=b"a%3fb%23c", query=b"x=1", by_jupyter=True)
@examples(200)
@given(path=raw_paths, query=queries, by_jupyter=st.booleans())
def test_any_requested_path_reaches_only_the_board_and_only_that_path(
    site: Site, path: bytes, query: bytes, by_jupyter: bool
) -> None:
    """Parent paths, other hosts, control characters and double encodings are refused, or are a path of the board."""
    site.forget()
    target = path + (b"?" + query if query else b"")
    check_reached(site, site.ask(by_jupyter, target), target)
    site.check_still_serves()


NAMES = [
    *("Accept", "Range", "If-None-Match", "Content-Type", "Accept-Encoding", "Cookie", "Authorization", "X-XSRFToken"),
    *("Referer", "Origin", "Forwarded", "X-Forwarded-Host", "Location", "Proxy-Authorization", "Bad Name", ""),
]
VALUES = [SECRET.encode(), b"a\r\n b", b"a\r\nX-Injected: 1", b"\x00", b"a" * 9000]
headers = st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=8) | st.sampled_from(VALUES)), max_size=4).map(
    lambda lines: b"".join(b"%s: %s\r\n" % (name.encode(), value) for name, value in lines)
)
METHODS = b"GET POST HEAD PUT DELETE OPTIONS PATCH TRACE CONNECT get STOP".split()
methods = st.sampled_from(METHODS)


@examples(150)
@given(lines=headers, method=methods | st.binary(max_size=5), by_jupyter=st.booleans())
def test_no_headers_and_no_method_pass_a_secret_on_or_back(
    site: Site, lines: bytes, method: bytes, by_jupyter: bool
) -> None:
    site.forget()
    answer = site.ask(by_jupyter, b"data/x", method, lines)
    if answer.status != 502:  # to a HEAD that is too long the kernel's server sends a body, which it must not
        check_reached(site, answer, b"data/x")
    for _, target, passed, _ in site.board.asked:
        assert target == "/data/x"
        assert "X-Injected" not in passed
        secret = {name for name, value in passed.items() if SECRET in value}
        assert secret <= set(connection._PASSED_ON), "in a header that TensorBoard needs it is no secret"
    site.check_still_serves()


FRAMINGS = [
    (b"Content-Length: 5\r\n", b"hello", b"hello"),
    (b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
    (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\nGET /evil HTTP/1.1\r\n\r\n", None),
    (b"Content-Length: 5\r\nContent-Length: 6\r\n", b"hello!", None),
    (b"Content-Length: -1\r\n", b"hello", None),
    (b"Content-Length: +5\r\n", b"hello", None),
    (b"Content-Length: 0x5\r\n", b"hello", None),
    (b"Transfer-Encoding: xchunked\r\n", b"5\r\nhello\r\n0\r\n\r\n", None),
    (b"Transfer-Encoding: chunked\r\n", b"zz\r\nhello\r\n0\r\n\r\n", None),
    (b"Transfer-Encoding: chunked\r\n", b"-5\r\nhello\r\n0\r\n\r\n", None),
    (b"Content-Length: 0\r\n", b"GET /evil HTTP/1.1\r\nHost: x\r\n\r\n", None),
]


@pytest.mark.parametrize("by_jupyter", [True, False], ids=["Jupyter", "link"])
@pytest.mark.parametrize(("lines", "sent", "body"), FRAMINGS, ids=[repr(lines + sent) for lines, sent, _ in FRAMINGS])
def test_a_body_with_any_framing_is_at_most_one_request(
    site: Site, by_jupyter: bool, lines: bytes, sent: bytes, body: bytes | None
) -> None:
    """Bytes that two servers could read differently cause no second request to the board."""
    site.forget()
    answer = site.ask(by_jupyter, b"data/x", b"POST", lines, sent)
    assert answer.status < 500
    asked = [(target, came) for _, target, _, came in site.board.asked]
    assert asked == [("/data/x", body)] if body is not None else len(asked) <= 1
    assert "/evil" not in dict(asked)
    site.check_still_serves()


names = st.text("abc019", min_size=0, max_size=70) | st.sampled_from(
    [ID, ID.upper(), f"{ID}%00", f"{ID}%0a", "..", "%2e%2e", f"..%2f{ID}", f"{ID}%2f..%2f{ID}", "a" * 65, "short"]
)


@examples(100)
@given(
    kind=st.sampled_from(["api/clusters/{}/stop", "api/clusters/{}/log", "tb/{}/", "tb/{}", "api/{}", "{}"]),
    name=names,
    after=st.sampled_from(["", "/", "?node=worker:0", "/../stop", "%2fstop", "//"]),
)
def test_a_name_of_no_cluster_reaches_no_cluster_and_no_file(site: Site, kind: str, name: str, after: str) -> None:
    if name == ID:
        name = "bbbbccccdddd"
    site.forget()
    answer = site.by_jupyter(f"/user/alice/tfos-nb/{kind.format(name)}{after}".encode())
    assert answer.status in {302, *REFUSALS}
    assert all(value.startswith("/user/alice/") for value in answer.header("Location"))
    assert (site.board.asked, site.cluster.asked_for, site.cluster.stops) == ([], [], 0)


@examples(80)
@given(
    node=st.text(max_size=8) | st.sampled_from(["worker:0", "worker:0&x=1", "worker:0#", "../stop", "\0", "a" * 2000])
)
def test_a_nodes_name_is_passed_on_as_it_was_written(site: Site, node: str) -> None:
    """No part of it becomes another parameter or path. If the node does not exist, the answer names it as data."""
    site.forget()
    answer = site.by_jupyter(f"/user/alice/tfos-nb/api/clusters/{ID}/log?node={quote(node, errors='replace')}".encode())
    assert answer.status in (200, 404, 400)
    assert site.cluster.stops == 0
    written = re.sub(
        r"[\x00-\x08\x0e-\x1f]", " ", unquote(quote(node, errors="replace"))
    ).strip()  # as Tornado reads it
    if answer.status != 400:
        assert site.cluster.asked_for == [written]
        assert json.loads(answer.body)


@examples(150)
@given(
    segments=st.lists(part | st.sampled_from([ID.encode(), b"tb", b"enter?code=x", b"x" * 43]), max_size=5),
    method=methods,
)
def test_a_client_without_a_pass_reaches_nothing_by_the_kernels_port(
    site: Site, segments: list[bytes], method: bytes
) -> None:
    """No guessed pass or code, and no path around them, leads to the board, the log or Stop."""
    site.forget()
    answer = site.by_link(b"/" + b"/".join(segments), method)
    assert answer.status in {204, *REFUSALS}
    assert (site.board.asked, site.cluster.asked_for, site.cluster.stops) == ([], [], 0)
    assert site.admitted.encode() not in answer.all


@examples(60)
@given(changed=st.text("abcXYZ019-_", max_size=3), cut=st.integers(0, 43), of_code=st.booleans())
def test_a_wrong_pass_or_code_opens_nothing(site: Site, changed: str, cut: int, of_code: bool) -> None:
    site.forget()
    link = site.endpoint.access_link(ID)
    code = link.partition("=")[2]
    right = code if of_code else site.admitted
    wrong = right[:cut] + changed + right[cut + len(changed) :]
    wrong = wrong if wrong != right else right + "x"
    answer = site.by_link((f"/{ID}/enter?code={wrong}" if of_code else f"/{ID}/{wrong}/tb/data").encode())
    assert answer.status in (403, 404)
    assert site.board.asked == []
    assert site.by_link(f"/{link}".encode()).status == 302, "the right code has not been used up"


@pytest.mark.parametrize("target", [b"http://evil.example/", b"//evil.example/tb/", b"*", b"evil.example:80", b""])
def test_a_request_for_another_host_is_not_passed_on(site: Site, target: bytes) -> None:
    for ask in (site.by_jupyter, site.by_link):
        for method in (b"GET", b"CONNECT", b"OPTIONS"):
            site.forget()
            answer = ask(target, method)
            assert answer.status in {200, 204, 302, *REFUSALS}
            assert b"evil.example" not in b"".join(value.encode() for value in answer.header("Location"))
            assert site.board.asked == []
    site.check_still_serves()


# --- inputs that are no addresses ---------------------------------------------------------------------


@examples(100)
@given(
    content=st.binary(max_size=60)
    | st.fixed_dictionaries(
        {name: st.none() | st.integers() | st.text(max_size=4) for name in ("name", "socket", "pid")}
    ).map(lambda fields: json.dumps({"id": "ffffeeeedddd", **fields}).encode())
    | st.sampled_from([b"[" * 9000, b"{}", b'{"id": "ffffeeeedddd"}', b"null"])
)
def test_a_file_with_any_content_is_a_kernels_address_or_ignored(site: Site, content: bytes) -> None:
    """It may be incomplete, or another program's file. A page that asks for it gets no internal server error."""
    directory = connection.private_directory(connection.runtime_directory())
    Path(directory, "ffffeeeedddd.json").write_bytes(content)
    place = connection.find("ffffeeeedddd")
    if place is not None:
        assert [type(part) for part in (place.name, place.socket, place.pid)] == [str, str, int]
        assert place.alive in (True, False)
    answer = site.by_jupyter(b"/user/alice/tfos-nb/tb/ffffeeeedddd/")
    assert answer.status in (404, 410, 502)


@examples(60)
@given(title=st.text(max_size=30), text=st.text(max_size=30) | st.just("</p><script>alert(1)</script><p onload='x'>"))
def test_no_text_becomes_html(title: str, text: str) -> None:
    bare = page("", "")
    assert page(title, text).count("<") == bare.count("<")
    assert page(title, text).count('"') == bare.count('"')
