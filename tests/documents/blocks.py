"""The fenced blocks of the pages that users read, and what is known of each.

Directly above a block that is more than text stands one of

    <!-- run by tests/FILE.py -->           its commands, as they are
    <!-- checked by tests/FILE.py -->       by the program that would read it, or against what it shows
    <!-- not run here: REASON -->

with more words behind a colon where the test needs them. The file named takes its blocks from `blocks_for`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

from tests.documents.files import REPOSITORY

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
TEXT = "text"
"""The language of what is no command and no configuration: output, logs, diagrams, formulas."""
_MARK = re.compile(r"<!-- (run by|checked by|not run here)(?: (\S+?))?(?:: (.+))? -->")


@dataclass(frozen=True)
class Block:
    """One fenced block; `treatment` is None if no mark stands above it."""

    page: Path
    line: int
    language: str
    text: str
    treatment: str | None = None
    tested_by: Path | None = None
    words: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@cache
def all_blocks() -> tuple[Block, ...]:
    """Return every block of every page, in order."""
    return tuple(block for page in PAGES for block in blocks_of(page))


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of one page; one that is indented instead of fenced has no language."""
    above = ""
    for token in MarkdownIt().parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            assert token.map
            mark = _MARK.fullmatch(above)
            block = Block(page, token.map[0] + 1, token.info.strip(), token.content)
            yield _marked(block, mark) if mark else block
        above = token.content.strip() if token.type == "html_block" else ""


def _marked(block: Block, mark: re.Match[str]) -> Block:
    treatment, file, words = mark.groups()
    tested_by = REPOSITORY / file if file else None
    return Block(
        block.page, block.line, block.language, block.text, treatment, tested_by, words or ""
    )


def blocks_for(file: str) -> list[Block]:
    """Return the blocks that a test, named by its `__file__`, runs or checks; there is at least one."""
    path = Path(file).resolve()
    found = [block for block in all_blocks() if block.tested_by == path]
    assert found, f"no page names {path.relative_to(REPOSITORY)}"
    return found
