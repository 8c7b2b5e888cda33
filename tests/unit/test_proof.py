"""`make proof`: which commands it runs, where they write, and how it says that they ended."""

import argparse
import re
import sys
from pathlib import Path

import pytest

from tests.bench import proof
from tests.bench.document import PROOF, prove
from tests.bench.proof import ALL_MINUTES, PARTS, Ending, Part, command_of, ending_of, status_within
from tests.bench.section import Section, spread

PLAYED = Part("played", ("wear",), 1, ("wear", "conversation_trace.jsonl.gz"), ("wear", "quick"))
TEST = Part("test", (), 1, ("pytest", "a.py"), ("pytest", "a.py"))


def test_each_place_of_the_page_is_written_by_one_part() -> None:
    places = re.findall("<!-- measured: (.*) -->", PROOF.read_text())
    assert sorted(places) == sorted(["parts", *(place for part in PARTS for place in part.places)])


def test_page_says_the_hours_that_no_part_outlives() -> None:
    assert ALL_MINUTES == 180 and "three hours" in PROOF.read_text()
    assert sum(part.minutes for part in PARTS) <= ALL_MINUTES


@pytest.mark.parametrize(
    ("part", "status", "is_written", "ending"),
    [
        (PLAYED, 0, True, Ending.MET),
        (PLAYED, 1, True, Ending.MISSED),
        (PLAYED, 1, False, Ending.FAILED),
        (PLAYED, 0, False, Ending.FAILED),
        (PLAYED, 2, True, Ending.FAILED),
        (PLAYED, -9, True, Ending.FAILED),
        (PLAYED, None, True, Ending.LATE),
        (TEST, 0, False, Ending.MET),
        (TEST, 1, False, Ending.FAILED),
    ],
)
def test_ending(part: Part, status: int | None, is_written: bool, ending: Ending) -> None:
    assert ending_of(part, status, is_written=is_written) is ending


def test_command_names_the_page_and_the_traces() -> None:
    command = command_of(PLAYED, Path("/traces"), Path("/page"), is_quick=False)
    where = ["--page=/page", "--document"]
    assert command[1:] == ["-m", "wear", *where, "/traces/conversation_trace.jsonl.gz"]
    assert command_of(PLAYED, None, Path("/page"), is_quick=True)[3:] == [*where, "quick"]
    assert command_of(TEST, None, Path("/page"), is_quick=False)[3:] == ["a.py"]


def test_command_that_does_not_end_is_ended() -> None:
    assert status_within(0.1, [sys.executable, "-c", "import time; time.sleep(600)"]) is None
    assert status_within(60.0, [sys.executable, "-c", "import sys; sys.exit(3)"]) == 3


def test_a_part_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before")
    monkeypatch.setattr(proof, "PARTS", (PLAYED, TEST, TEST))
    monkeypatch.setattr(proof, "status_within", lambda seconds, command: 1)
    given = argparse.Namespace(only=None, traces=None, quick=False)
    endings = [ending for _, _, ending in proof.run(given, page)]
    assert endings == [Ending.NOT_RUN, Ending.FAILED, Ending.FAILED]


def test_a_page_without_the_place_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing is measured here")
    given = argparse.Namespace(document=True, add=False, page=page)
    with pytest.raises(KeyError):
        prove(given, "wear", [Section("Wear", "", ("trace",))])
    prove(argparse.Namespace(document=False, page=page), "wear", [])


def test_several_runs_are_told_with_their_range() -> None:
    assert spread([1000.0]) == "1,000"
    assert spread([3.0, 1.04, 2.0], ".1f") == "2.0 (1.0 to 3.0)"


def test_a_piece_keeps_the_rows_of_the_page_that_it_did_not_measure(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- measured: tests -->\n<!-- end -->\n")

    def measured(title: str, *rows: tuple[str, str, bool]) -> Section:
        section = Section(title, "all pass", ("file", "kind", "passed"), n_keys=2)
        for name, kind, is_met in rows:
            section.add(name, kind, "", is_met=is_met)
        return section

    given = argparse.Namespace(document=True, add=True, page=page)
    prove(given, "tests", [measured("A", ("a", "x", True), ("b", "x", False))])
    prove(given, "tests", [measured("A", ("c", "x", True), ("b", "x", True), ("b", "y", False))])
    whole = measured("A", ("a", "x", True), ("b", "x", True), ("c", "x", True), ("b", "y", False))
    assert whole.markdown() in page.read_text()
    prove(given, "tests", [measured("B", ("a", "x", True))])
    assert measured("B", ("a", "x", True)).markdown() in page.read_text()
    assert "# A" not in page.read_text()
