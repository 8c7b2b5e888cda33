"""Puts what was measured into docs/benchmarks.md, docs/proof.md or another document.

A measured part stands between `<!-- measured: NAME -->` and `<!-- end -->`; what stands outside is
written by hand, and kept. Several processes may write one document at the same time.
"""

import argparse
import fcntl
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.bench.section import Section
from tests.lab.server import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "benchmarks.md"
PROOF = REPOSITORY / "docs" / "proof.md"


def document(
    name: str, sections: Iterable[Section], *, level: int = 2, path: Path = DOCUMENT
) -> None:
    """Write *sections* into the document, under headings of *level*, if it has a place of that name."""
    if f"<!-- measured: {name} -->" in path.read_text():
        shown = [section.markdown(level) for section in sections if section.is_documented]
        rewrite(path, lambda text: put(text, name, "\n\n".join(shown)))


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

    measured = list(sections)

    def with_sections(page: str) -> str:
        before = taken(page, name)
        shown = [section.with_rows_of(before) for section in measured] if given.add else measured
        return put(page, name, "\n\n".join(section.markdown(3) for section in shown))

    rewrite(given.page, with_sections)


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Write what *change* makes of a document; what another process writes meanwhile is not lost."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # the document itself is another file each time
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(change(path.read_text()))
        unfinished.replace(path)
    finally:
        os.close(folder)


def taken(text: str, name: str) -> str:
    """Return what stands in the place of that name; raises KeyError if there is none."""
    if found := _place(name).search(text):
        return found[2].strip("\n")
    raise KeyError(f"no place for {name!r}")


def put(text: str, name: str, measured: str) -> str:
    """Return *text* with *measured* in the place of that name; raises KeyError if there is none."""
    filled, n_places = _place(name).subn(lambda m: f"{m[1]}\n{measured}\n\n{m[3]}", text)
    if n_places != 1:
        raise KeyError(f"{n_places} places for {name!r}")
    return filled


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- measured: {re.escape(name)} -->\n)(.*?)(<!-- end -->)", re.DOTALL)
