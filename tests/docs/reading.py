"""The code blocks of the README and of docs/, and what a comment before a block says of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

CHECKOUT = Path(__file__).parents[2]
PAGES = {path.stem: path for path in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md")))}

_NOT_RUN = re.compile(r"<!-- not run: (?P<why>.+?) -->\s*", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    ``why_not`` is the reason of ``<!-- not run: … -->`` before it; empty if it is run.
    """

    page: str
    line: int
    language: str
    text: str
    why_not: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """Read a page's blocks; one that is indented and not fenced has no language."""
    found, why_not = [], ""
    for token in MarkdownIt("commonmark").parse(PAGES[page].read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            found.append(Block(page, token.map[0] + 1, token.info.strip(), token.content, why_not))
        said = _NOT_RUN.fullmatch(token.content) if token.type == "html_block" else None
        why_not = said["why"] if said else ""
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
