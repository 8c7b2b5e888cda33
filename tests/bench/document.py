"""Puts what was measured into docs/benchmarks.md, docs/proof.md or another document.

A measured part stands between `<!-- measured: NAME -->` and `<!-- end -->`; what stands outside is
written by hand, and kept.
"""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from tests.bench.section import Section
from tests.lab.server import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "benchmarks.md"
PROOF = REPOSITORY / "docs" / "proof.md"


def document(
    name: str, sections: Iterable[Section], *, level: int = 2, path: Path = DOCUMENT
) -> None:
    """Write *sections* into the document, under headings of *level*, if it has a place of that name."""
    text = path.read_text()
    if f"<!-- measured: {name} -->" in text:
        shown = [section.markdown(level) for section in sections if section.is_documented]
        path.write_text(put(text, name, "\n\n".join(shown)))


def add_page_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `prove` reads."""
    parser.add_argument("--document", action="store_true", help="write docs/proof.md")
    parser.add_argument("--page", type=Path, default=PROOF, help="or another page in its place")
    parser.add_argument(
        "--add", action="store_true", help="keep the page's rows that were not measured now"
    )


def prove(given: argparse.Namespace, name: str, sections: Iterable[Section]) -> None:
    """Write *sections* into the page if the command line says so; raises KeyError without a place."""
    if not given.document:
        return
    page = given.page.read_text()
    if given.add:
        before = _place(name).search(page)
        sections = [section.with_rows_of(before[0] if before else "") for section in sections]
    measured = "\n\n".join(section.markdown(3) for section in sections)
    given.page.write_text(put(page, name, measured))


def put(text: str, name: str, measured: str) -> str:
    """Return *text* with *measured* in the place of that name; raises KeyError if there is none."""
    filled, n_places = _place(name).subn(lambda m: f"{m[1]}\n{measured}\n\n{m[2]}", text)
    if n_places != 1:
        raise KeyError(f"{n_places} places for {name!r}")
    return filled


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- measured: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
