"""What can go wrong between the proxy and llama-server, and what comes of it.

In every row a conversation is on disk and another one is in the only slot. The fault begins, the first
conversation comes back, and the fault ends. docs/reliability.md shows the rows.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from proxy.core.conditions import DegradationKind as Kind
from tests.fakes.llama_server import FakeLlamaServer

PATIENCE_SECONDS = 0.3
"""How long the tests wait for a helper call that is not answered."""

Script = Callable[[FakeLlamaServer], object]


class Client(StrEnum):
    """What the client gets."""

    ANSWER = "the answer"
    LATER = "the answer, when the fault is over"
    SAME_ERROR = "llama-server's error"
    BAD_GATEWAY = "502"
    EVENT = "an error event in the stream"
    HALF = "the same half"


@dataclass(frozen=True, slots=True)
class Row:
    """One fault; `outcome` is that of the request, `says` what /health names meanwhile."""

    at: str
    fault: str
    script: Script
    client: Client
    outcome: str
    says: Kind | None = None
    wants_stream: bool = False

    def __str__(self) -> str:
        return f"{self.at} {self.fault}"


def _set(**fields: Any) -> Script:
    def script(server: FakeLlamaServer) -> None:
        for name, value in fields.items():
            setattr(server.faults, name, value)

    return script


def _stall(place: str) -> Script:
    def script(server: FakeLlamaServer) -> None:
        server.hold(place)
        server.faults.forgets_dropped_actions = True

    return script


def _faults_of(place: str) -> dict[str, Script]:
    """Return all that can go wrong with one kind of call, in words."""
    return {
        **{f"answers {status}": _set(refuse={place: status}) for status in (400, 500, 501, 503)},
        "resets the connection": _set(drop={place}),
        "breaks off in its answer": _set(break_off={place}),
        "answers half of the JSON": _set(cut_short={place}),
        "does not answer": _stall(place),
    }


Result = tuple[Client, str, Kind | None]


def _rows_of(at: str, place: str, result: Result, **others: Result) -> Iterator[Row]:
    """Yield a row for each fault of a call; those in *others* end otherwise."""
    for fault, script in _faults_of(place).items():
        yield Row(at, fault, script, *others.get(fault.replace(" ", "_"), result))


ROWS = (
    *_rows_of(
        "GET /props",
        "props",
        (Client.ANSWER, "degraded", Kind.NOT_A_LLAMA_SERVER),
        answers_503=(Client.LATER, "hit", Kind.LOADING),
        resets_the_connection=(Client.LATER, "hit", Kind.UNREACHABLE),
        breaks_off_in_its_answer=(Client.LATER, "hit", Kind.UNREACHABLE),
        does_not_answer=(Client.ANSWER, "hit", Kind.SILENT),
    ),
    *_rows_of("POST /apply-template", "apply-template", (Client.ANSWER, "bypass", None)),
    *_rows_of("POST /tokenize", "tokenize", (Client.ANSWER, "bypass", None)),
    *_rows_of(
        "a restore",
        "restore",
        (Client.ANSWER, "degraded", Kind.RESTORES_REFUSED),
        does_not_answer=(Client.LATER, "degraded", Kind.RESTORES_REFUSED),
    ),
    Row(
        *("a restore", "answers 200 and restores nothing", _set(restores_are_inert=True)),
        *(Client.ANSWER, "miss", Kind.RESTORES_NOT_REUSED),
    ),
    *_rows_of(
        "a save",
        "save",
        (Client.ANSWER, "hit", Kind.SAVES_FAIL),
        does_not_answer=(Client.LATER, "hit", Kind.SAVES_FAIL),
    ),
    Row(
        *("a save", "answers 200 and writes nothing", _set(saves_nothing=True)),
        *(Client.ANSWER, "hit", Kind.SAVES_FAIL),
    ),
    Row(
        *("a save", "writes less than it says", _set(n_bytes_lost=100)),
        *(Client.ANSWER, "hit", Kind.SAVES_FAIL),
    ),
    *_rows_of(
        "the request",
        "generate",
        (Client.SAME_ERROR, "failed", None),
        answers_400=(Client.SAME_ERROR, "refused", None),
        resets_the_connection=(Client.BAD_GATEWAY, "unanswered", None),
        breaks_off_in_its_answer=(Client.BAD_GATEWAY, "unanswered", None),
        answers_half_of_the_JSON=(Client.HALF, "miss", None),
        does_not_answer=(Client.LATER, "hit", None),
    ),
    Row(
        *("the request", "breaks off in its stream", _set(dies_after_chunks=2)),
        *(Client.EVENT, "unanswered", None),
        wants_stream=True,
    ),
    Row(
        *("the request", "stalls in its stream", _stall("chunk")),
        *(Client.LATER, "hit", None),
        wants_stream=True,
    ),
    Row(
        *("the request", "begins late", _set(slow_seconds={"generate": 2 * PATIENCE_SECONDS})),
        *(Client.ANSWER, "hit", None),
        wants_stream=True,
    ),
    Row(
        *("the request", "streams slowly", _set(chunk_seconds=PATIENCE_SECONDS)),
        *(Client.ANSWER, "hit", None),
        wants_stream=True,
    ),
)


def _joined(faults: list[str]) -> str:
    return re.sub(r", answers (\d+)(?=,|$)", r", \1", ", ".join(faults))


def table() -> str:
    """Return all rows as a Markdown table, one line for faults that end alike."""
    lines = [
        "| llama-server, asked for | does this | the client gets | outcome | `/health` says |",
        "|---|---|---|---|---|",
    ]
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for row in ROWS:
        alike.setdefault((row.at, row.client, row.outcome, row.says or "-"), []).append(row.fault)
    places: dict[tuple[str, ...], list[str]] = {}
    for (at, *result), faults in alike.items():
        places.setdefault((_joined(faults), *result), []).append(at)
    for cells, ats in places.items():
        lines.append(f"| {' | '.join((', '.join(ats), *cells))} |")
    return "\n".join(lines) + "\n"
