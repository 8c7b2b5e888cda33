"""`make proof`: which commands it runs, where they write, and how it says that they ended."""

import argparse
import json
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.bench import canary, processes, proof
from tests.bench.aiperf import AiperfError
from tests.bench.document import PROOF, prove, put, rewrite, taken
from tests.bench.neutral_load import Bench, Run
from tests.bench.proof import (
    ALL_MINUTES,
    N_CORES,
    PARTS,
    Ending,
    Job,
    Part,
    command_of,
    ending_of,
    may_begin,
    new_section,
    run,
    with_rows,
)
from tests.bench.section import Section, spread
from tests.lab.server import find_free_port

PLAYED = Part("played", ("wear",), 1, 1, ("wear", "conversation_trace.jsonl.gz"), ("wear", "quick"))
TEST = Part("test", (), 1, 1, ("pytest", "a.py"), ("pytest", "a.py"))
TIMED = Part("timed", ("aiperf",), N_CORES, 1, ("aiperf",), ("aiperf",))
PLACES = "".join(f"<!-- measured: {name} -->\nold\n<!-- end -->\n" for name in ("wear", "aiperf"))
PROVE = """
import argparse, pathlib, sys
from tests.bench.document import prove
from tests.bench.section import Section
given = argparse.Namespace(document=True, add=False, page=pathlib.Path(sys.argv[1]))
prove(given, sys.argv[2], [Section(sys.argv[2], "", ("of one",))])
"""


def test_each_place_of_the_page_is_written_by_one_part() -> None:
    places = re.findall("<!-- measured: (.*) -->", PROOF.read_text())
    assert sorted(places) == sorted(["parts", *(place for part in PARTS for place in part.places)])


def test_page_says_the_hours_that_no_part_outlives() -> None:
    assert ALL_MINUTES == 180 and "three hours" in PROOF.read_text()
    assert minutes_of_all() <= ALL_MINUTES


def minutes_of_all() -> float:
    """Return how long all parts take if each takes all its minutes."""
    waiting, running, now = list(PARTS), dict[Part, float](), 0.0
    while waiting or running:
        for part in may_begin(waiting, running):
            waiting.remove(part)
            running[part] = now + part.minutes
        now = min(running.values())
        running = {part: ends_at for part, ends_at in running.items() if ends_at > now}
    return now


def test_two_parts_run_at_once_and_what_measures_time_alone() -> None:
    one, other, long = PLAYED, TEST, replace(PLAYED, minutes=9)
    assert may_begin([one, other, long], []) == [long, one]
    assert may_begin([TIMED, one], [other]) == [one]
    assert may_begin([TIMED, one, long], []) == [long, one]
    assert may_begin([TIMED, one], []) == [TIMED]
    assert may_begin([one, TIMED], [TIMED]) == []
    timed = {"aiperf", "vLLM", "side by side"}
    assert timed <= {part.name for part in PARTS if part.n_cores == N_CORES}


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


def commands(monkeypatch: pytest.MonkeyPatch, code_of: dict[str, str]) -> None:
    """Let each part run a piece of Python, which is told its copy of the page and its places."""

    def command_of(part: Part, traces: object, page: Path, *, is_quick: bool) -> list[str]:
        return [sys.executable, "-c", code_of[part.name], str(page), *part.places]

    monkeypatch.setattr(proof, "command_of", command_of)


GIVEN = argparse.Namespace(only=None, traces=None, quick=False)


def test_parts_write_their_places_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PLACES)
    code_of = {"played": PROVE + "sys.exit(1)", "test": "1 / 0", "timed": PROVE}
    commands(monkeypatch, code_of)
    endings = {job.part.name: ending for job, ending in run((PLAYED, TEST, TIMED), GIVEN, page)}
    assert endings == {"played": Ending.MISSED, "test": Ending.FAILED, "timed": Ending.MET}
    assert taken(page.read_text(), "wear").startswith("### wear\n")
    assert taken(page.read_text(), "aiperf").startswith("### aiperf\n")


def test_part_that_does_not_end_in_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PLACES)
    commands(monkeypatch, {"endless": "import time; time.sleep(600)"})
    endless = Part("endless", ("wear",), 1, 0.001, ("wear",), ("wear",))
    assert [ending for _, ending in run([endless], GIVEN, page)] == [Ending.LATE]
    assert page.read_text() == PLACES


def test_what_a_part_wrote_before_it_is_ended_is_kept(tmp_path: Path) -> None:
    page, copy = tmp_path / "page.md", tmp_path / "copy.md"
    for path in (page, copy):
        path.write_text(PLACES)
    endless = PROVE + "import time; time.sleep(600)"
    command = [sys.executable, "-c", endless, str(copy), "wear"]
    job = Job(PLAYED, command, copy, 600.0, 0)
    while taken(copy.read_text(), "wear") == "old":
        assert not job.is_over
        time.sleep(0.01)
    assert job.end() is Ending.LATE
    job.deliver(page)
    assert taken(page.read_text(), "wear").startswith("### wear\n")
    assert taken(page.read_text(), "aiperf") == "old"


def test_parts_that_do_not_run_now_keep_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "machine", lambda: "two cores")
    page = "<!-- measured: parts -->\n\n### Parts\n\nNot run yet.\n\n<!-- end -->\n"

    def row(name: str, date: str) -> str:
        return f"| {name} | `a` | 1.0 | met | {date} | abc | 0.1 |"

    for name, date in (("vLLM", "Monday"), ("wear", "Tuesday"), ("vLLM", "Friday")):
        section = new_section()
        section.add(name, "`a`", "1.0", "met", date, "abc", "0.1", is_met=None)
        page = with_rows(page, section)
    assert f"{row('wear', 'Tuesday')}\n{row('vLLM', 'Friday')}\n" in page
    assert "Monday" not in page and "Not run yet" not in page


def put_number(page: Path, name: str) -> None:
    rewrite(page, lambda text: put(text, name, str(int(taken(text, name)) + 1)))


def test_two_processes_write_one_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PLACES.replace("old", "0"))
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(partial(put_number, page), ["wear", "aiperf"] * 100))
    assert [taken(page.read_text(), name) for name in ("wear", "aiperf")] == ["100", "100"]
    assert list(tmp_path.iterdir()) == [page]


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


def test_programs_with_other_numbers_have_other_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    ports = []
    for worker in ("0", "1"):
        monkeypatch.setenv("LAB_WORKER", worker)
        ports.append([find_free_port() for _ in range(50)])
    assert max(ports[0]) < min(ports[1])


async def test_a_run_of_aiperf_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(self: Bench, run: Run) -> dict[str, float]:
        if run.contender == "defaults":
            raise AiperfError("requests failed")
        folder = tmp_path / run.name
        folder.mkdir()
        first_token = {"p50": 1.0, "p95": 2.0, "count": 30}
        said = {"error_summary": [], "was_cancelled": False, "time_to_first_token": first_token}
        (folder / "profile_export_aiperf.json").write_text(json.dumps(said))
        return {"n_evaluated": 7, "cpu_seconds": 3.0}

    monkeypatch.setattr(Bench, "_play", play)
    bench = Bench(tmp_path, ExitStack(), only_known=False)
    measured = await bench.measure("full", "two conversations", [], None)
    assert [(each.contender, len(each.p50s)) for each in measured] == [
        ("proxy", 2),
        ("similarity", 2),
    ]
    assert bench.n_failed == 2


def test_a_model_that_is_missing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "DEFAULT_MODEL_FOLDER", tmp_path)
    monkeypatch.setenv("LLAMA_SERVER_BIN", sys.executable)
    with ExitStack() as leftovers:
        processes.Stack("full", "tiny", leftovers, has_proxy=False)
    assert [path.name for path in tmp_path.iterdir()] == ["full-tiny.gguf"]


async def test_a_cell_of_the_canary_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def examine(kind: str, *_: object, **__: object) -> canary.Examined:
        assert kind != "swa"
        return canary.Examined("any prefix: 1.006", 4, is_met=True)

    monkeypatch.setattr(canary, "examine", examine)
    monkeypatch.setattr(canary, "install", lambda version: None)
    monkeypatch.setattr(canary, "find_llama_server", lambda: Path("llama-server"))
    kinds = ["full", "swa", "hybrid"]
    version = ["2026.9.11063"]
    given = argparse.Namespace(version=version, kind=kinds, rule_only=False, document=False)
    section = await canary.examine_all(given)
    [(_, version_of_files, full, swa, hybrid, verdict)] = section.rows
    assert full == hybrid == "any prefix: 1.006" and swa.startswith("**failed: ")
    assert version_of_files == "4" and verdict == "**no**" and section.n_missed == 1
