"""The pages agree with the code: options, messages, names, links and the order of the site."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import tfos_nb
from tests.docs.reading import CHECKOUT, PAGES
from tfos_nb.magics.defaults import Defaults
from tfos_nb.magics.options import describe
from tfos_nb.magics.parsers import ALL

DOCS = CHECKOUT / "docs"
API = "".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.rst")))


def text_of(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


# --- links, and the order of the site


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_to_existing_files_and_headings(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", text_of(page)):
        file = PAGES[page].parent / target if target else PAGES[page]
        assert file.exists(), f"{page} links to {target}"
        assert not anchor or anchor[1:] in headings_of(file), f"{page} links to {target}{anchor}"


def headings_of(file: Path) -> set[str]:
    """Return a page's headings as GitHub and the site write them in links."""
    told = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in told}


def test_the_site_lists_every_page() -> None:
    told = yaml.safe_load((DOCS / "_toc.yml").read_text(encoding="utf-8"))
    listed = {told["root"], *_files(told["subtrees"])}
    pages = [path.relative_to(DOCS).with_suffix("") for kind in ("md", "rst") for path in DOCS.rglob(f"*.{kind}")]
    there = {page.as_posix() for page in pages}
    assert listed == there


def _files(entries: list[dict[str, object]]) -> Iterator[str]:
    for entry in entries:
        if "file" in entry:
            yield str(entry["file"])
        below = entry.get("entries", [])
        assert isinstance(below, list)
        yield from _files(below)


def test_the_api_has_every_public_name() -> None:
    wanted = set(tfos_nb.__all__) - {"__version__"}
    assert [name for name in sorted(wanted) if not re.search(rf":: tfos_nb\.{name}\b", API)] == []


# --- the magics


@pytest.mark.parametrize("magic", sorted(set(ALL) - {"%tfos_cluster", "%tfos_plan"}))
def test_the_page_of_the_magics_has_the_help_of_each_magic(magic: str) -> None:
    told = describe(tfos_nb.launch).split("\nExample\n")[0] if magic == "%%tfos_cluster" else ALL[magic].document()
    assert f"```text\n{told.strip()}\n```" in text_of("magics")


def test_the_page_of_the_magics_has_every_trait_and_every_variable() -> None:
    page = text_of("magics")
    assert [name for name in Defaults.class_own_traits() if f"`{name}`" not in page] == []
    read = {name for path in sources() for name in re.findall(r'"(TFOS_(?:NB|SERVER)_[A-Z_]+)"', path.read_text())}
    assert {"TFOS_NB_PROGRESS", "TFOS_SERVER_PORT"} <= read
    told = set(re.findall(r"`(TFOS_[A-Z_]+)`", page))
    assert told <= read


# --- the messages

THEIRS = ("input depth must be evenly divisible by filter depth",)
"""Messages of TensorFlow."""

SAMPLE = re.compile(
    r"=?…|; |, and |%PORT%|TFOS_\w+_PORT|%tfos_\w+|--w\w+|worker:\d|'[^']*'|\d+"
    r"|\b(?:NAME|HOST|DataFrame|SIGKILL|ValueError|df|main|at|timestamp|[abx])\b"
)
"""What stands in a page's message for what the code puts there."""


def sources() -> list[Path]:
    return sorted((CHECKOUT / "tfos_nb").rglob("*.py"))


@functools.cache
def texts() -> str:
    """Return every text of the code, one a line; a single character stands for a part inserted at run time."""
    lines = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                lines.append("".join(map(str, parts)).replace("\n", " "))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value.replace("\n", " "))
    pages = (path for kind in ("js", "html") for path in (CHECKOUT / "tfos_nb").rglob(f"*.{kind}"))
    return "\n".join([*lines, *(path.read_text(encoding="utf-8") for path in pages)])


def messages() -> list[str]:
    """Return the first column of the tables of messages; texts *in italics* describe a display and are left out."""
    found = []
    heads = r"\| (?:the message says|what is said or seen) \|.*\n\|---\|---\|\n((?:\|.*\n)+)"
    for table in re.findall(heads, text_of("troubleshooting")):
        for row in table.splitlines():
            cell = re.sub(r"\(`\w+`\)|\*[^*]+\*", "", row.split("|")[1]).replace("`", "")
            found += [part.strip() for part in re.split(r" · |; also ", cell) if part.strip()]
    return found


@pytest.mark.parametrize("message", messages())
def test_messages_of_the_troubleshooting_page_exist_in_the_code(message: str) -> None:
    if message.startswith(THEIRS):
        return
    pieces = [piece.strip() for piece in SAMPLE.split(message)]
    told = [piece for piece in pieces if len(piece) > 4]
    assert told, "there is something to be looked for"
    assert [piece for piece in told if piece not in texts()] == []
