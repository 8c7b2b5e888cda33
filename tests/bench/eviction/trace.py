"""Requests as Mooncake's traces have them: when, how long, and the hashes of the prompt's blocks."""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import xxhash

from tests.bench.traces.catalogue import TRACES

BLOCK_TOKENS = 512
AGENTS = "agents"
"""In place of a path: our own traces, one after the other."""

_BLOCK_CHARACTERS = 4 * BLOCK_TOKENS
_PAUSE_SECONDS = 20.0
_ANSWER_TOKENS = 100
_LIVE = ("claude-code", "opencode")
"""Recorded bodies, whose prompts only a server can render."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, `at` so many seconds, and the hashes of its blocks; the last block may not be full."""

    at: float
    n_prompt: int
    n_answer: int
    blocks: tuple[int, ...]
    n_header: int = 0
    """Where tools and system prompt end; 0 if the trace does not tell."""
    turn_start: int = 0
    """Where the last user message ends; 0 if the trace does not tell."""
    n_turns: int = 1
    """How many requests this one goes on from, itself included: its messages tell."""

    @property
    def n_full_blocks(self) -> int:
        return self.n_prompt // BLOCK_TOKENS


def read_trace(name: str) -> list[Asked]:
    """Return the requests of a JSON-lines file, compressed or not, or of our own traces."""
    return list(_with_turns(_of_agents() if name == AGENTS else _of_file(Path(name))))


def _with_turns(requests: Iterable[Asked]) -> Iterator[Asked]:
    """Yield requests with the turns that lie before them."""
    trace, n_turns = list(requests), list[int]()
    for asked, earlier in zip(trace, earlier_of(trace), strict=True):
        n_turns.append(1 if earlier is None else n_turns[earlier] + 1)
        yield replace(asked, n_turns=n_turns[-1])


def earlier_of(trace: Iterable[Asked]) -> Iterator[int | None]:
    """Yield for each request the number of the one that it goes on from.

    A trace of hashes has no messages. A request goes on from the last one that had its deepest known block,
    if it has all full blocks of that one, and one that not everybody shares.
    """
    last_with: dict[int, tuple[int, Asked]] = {}
    for number, asked in enumerate(trace):
        known = list(takewhile(last_with.__contains__, asked.blocks))
        earlier = last_with[known[-1]] if len(known) > 1 else None
        yield earlier[0] if earlier and len(known) >= earlier[1].n_full_blocks else None
        last_with.update(dict.fromkeys(asked.blocks, (number, asked)))


def _of_file(path: Path) -> Iterator[Asked]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for row in map(json.loads, lines):
            lengths = row["input_length"], row["output_length"]
            yield Asked(row["timestamp"] / 1000, *lengths, tuple(row["hash_ids"]))


def _of_agents() -> Iterator[Asked]:
    """Yield our own traces; a token is four characters of the request's JSON."""
    at = 0.0
    for name, trace in TRACES.items():
        for request in () if name in _LIVE else trace().requests():
            at += _PAUSE_SECONDS
            messages, is_user = request.messages, [m["role"] == "user" for m in request.messages]
            n_before = len(is_user) - is_user[::-1].index(True)
            text, before, begin = (
                json.dumps([request.tools, *messages[:n]]) for n in (None, n_before, 1)
            )
            n_header = len(begin) // 4 if messages[0]["role"] == "system" else 0
            ends = range(_BLOCK_CHARACTERS, len(text) + _BLOCK_CHARACTERS, _BLOCK_CHARACTERS)
            blocks = tuple(xxhash.xxh3_64_intdigest(text[:end].encode()) for end in ends)
            yield Asked(at, len(text) // 4, _ANSWER_TOKENS, blocks, n_header, len(before) // 4)


def n_distinct_blocks(trace: list[Asked]) -> int:
    return len(set().union(*(asked.blocks for asked in trace)))
