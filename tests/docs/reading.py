"""Read the code blocks of the README and of docs/, and the comment before a block."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

CHECKOUT = Path(__file__).parents[2]
PAGES = {path.stem: path for path in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md")))}

_SAID = re.compile(r"<!-- (?:not run: (?P<why>.+?)|run as: (?P<name>\S+)) -->\s*", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    ``why_not`` is the reason in ``<!-- not run: … -->`` before it; it is empty if the block runs. ``run_as`` is the
    name in ``<!-- run as: … -->``: a separate test runs the block with a cluster, or in a process without a session.
    """

    page: str
    line: int
    language: str
    text: str
    why_not: str = ""
    run_as: str = ""

    @property
    def in_turn(self) -> bool:
        """Whether it runs after the page's other blocks."""
        return not (self.why_not or self.run_as)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """Return a page's blocks; an indented block has no language."""
    found: list[Block] = []
    said = None
    for token in MarkdownIt("commonmark").parse(PAGES[page].read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            why_not, run_as = said.groups(default="") if said else ("", "")
            found.append(Block(page, token.map[0] + 1, token.info.strip(), token.content, why_not, run_as))
        said = _SAID.fullmatch(token.content) if token.type == "html_block" else None
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
