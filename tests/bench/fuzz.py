"""Damaged and odd inputs for every parser of the proxy: what raises the unforeseen, or takes too long.

Each input is a valid one that was changed at random: in its bytes, or in the values of its JSON. The front,
which reads HTTP, is held against llama-server by tests/live/test_front_fuzz.py.

python -m tests.bench.fuzz [--inputs N] [--seed N] [--document]
"""

import argparse
import asyncio
import copy
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from proxy.core.messages import Route
from proxy.core.model import FilePart
from proxy.errors import CacheFault, StateFileMalformed, UnknownShape
from proxy.llama.answers import AnswerReader, TrueUsage
from proxy.llama.files import read_state_file
from proxy.llama.requests import (
    as_chat_body,
    beside_tokens,
    chat_form,
    conversation_of,
    header_request,
    model_named,
    parse_body,
    pin,
)
from proxy.llama.state_edits import Source, order_windows, repair_window, select_context_checkpoints
from proxy.stabilize.model import Memory, Name
from proxy.stabilize.run import stabilize
from proxy.store.directory import decode_sidecar, encode_sidecar
from proxy.store.files import StateFiles
from proxy.store.offline import export_checkpoints, import_checkpoints, open_offline, read_records
from tests.bench.document import document
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.fakes.generation import Generation, Shape
from tests.lab import messages_bodies, responses_bodies
from tests.lab.server import REPOSITORY
from tests.store.test_offline import CANARY, meet
from tests.unit.state_files import state_file, words
from tests.unit.test_state_file import COMPOSITIONS, TOKENS

PAGE = REPOSITORY / "docs" / "reliability.md"
HANG_SECONDS = 1.0
_ALL = frozenset(Name)
_ODD: list[Any] = [None, True, -1, 2**70, 1e308, "", "\ud800", "x" * 5000, [], {}, [[]], {"": {}}]
_ODD_NUMBERS = (
    b"\xff" * 4,
    b"\x00" * 4,
    b"\xff\xff\xff\x7f",
    b"\x00\x00\x00\x80",
    b"\x01\x00\x00\x00",
)


@dataclass(frozen=True)
class Target:
    """A parser: valid inputs for it, how one is changed, and what it may raise."""

    name: str
    inputs: Sequence[bytes]
    change: Callable[[random.Random, bytes], bytes]
    read: Callable[[bytes], object]
    may_raise: tuple[type[Exception], ...] = ()
    share: float = 1.0
    """How many inputs it is given, in parts of what a quick parser is given."""


def change_bytes(chance: random.Random, data: bytes) -> bytes:
    """Flip bits, overwrite numbers, cut, repeat or shuffle parts."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                at -= at % 4
                changed[at : at + 4] = chance.choice(_ODD_NUMBERS)
            case 2:
                del changed[at : at + chance.choice((1, 4, 64, len(changed)))]
            case 3:
                part = changed[at : at + chance.choice((1, 8, 64))]
                changed[at:at] = part * chance.choice((1, 3))
            case _:
                changed[at:at] = chance.randbytes(chance.choice((1, 4, 16)))
    return bytes(changed)


def change_json(chance: random.Random, data: bytes) -> bytes:
    """Put odd values into a JSON object, drop or double some, or change its bytes."""
    if chance.randrange(8) == 0:
        return change_bytes(chance, data)
    content = json.loads(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        holder, key = chance.choice(list(_places(content)) or [({}, "")])
        match chance.randrange(4):
            case 0 if isinstance(holder, dict):
                holder.pop(key, None)
            case 1 if isinstance(holder, list):
                holder.insert(0, holder[key] if key < len(holder) else None)
            case 2 if isinstance(holder, dict):
                holder[
                    chance.choice(("type", "role", "content", "text", "id", "name", "input"))
                ] = copy.deepcopy(chance.choice(_ODD))
            case _:
                holder[key] = copy.deepcopy(chance.choice(_ODD))
    return json.dumps(content).encode()


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a value: what holds it, and its key or index there."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(items):
        yield content, key
        if isinstance(value, dict | list):
            yield from _places(value)


# The targets.


def _bodies(route: Route) -> list[bytes]:
    bodies: list[Any] = [
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]},
        {"prompt": ["a", 1, {"prompt_string": "b"}]},
    ]
    if route is Route.MESSAGES:
        bodies = [messages_bodies.AGENT, *messages_bodies.ACCEPTED.values()]
    elif route is Route.RESPONSES:
        bodies = [responses_bodies.AGENT, *responses_bodies.ACCEPTED.values()]
    elif route is Route.CHAT:
        for body in messages_bodies.ACCEPTED.values():
            with suppress(UnknownShape):
                parsed = parse_body(json.dumps(body).encode())
                assert parsed is not None
                bodies.append(as_chat_body(Route.MESSAGES, parsed).fields)
    return [json.dumps(body).encode() for body in bodies]


def _read_body(route: Route) -> Callable[[bytes], object]:
    """Return a function that does with a body all that is done with it before it is sent."""

    def read(raw: bytes) -> None:
        body = parse_body(raw)
        if body is None:
            return
        model_named(raw, body), beside_tokens(route, body)
        stabilize(route, body.fields, Memory(), _ALL)
        pin(body, 0)  # type: ignore[arg-type]
        header_request(route, body, is_whole=False)
        chat, _ = chat_form(route, body)
        if chat is not None and route is not Route.COMPLETION:
            chat.shape("/v1/x")
            conversation_of(chat)

    return read


def _answers() -> list[bytes]:
    done = Generation(0, 20, 10, ["a", "b"], has_probabilities=False)
    return [b"".join(done.events(shape)) for shape in Shape] + [
        json.dumps(done.whole(shape)).encode() for shape in Shape
    ]


def _read_answer(data: bytes) -> None:
    for route, path in ((Route.CHAT, "/v1/chat/completions"), (Route.MESSAGES, "/v1/messages")):
        for kind in ("text/event-stream", "application/json"):
            reader, usage = AnswerReader(kind, route), TrueUsage(path, 3)
            for begin in range(0, len(data), 37):
                reader.feed(data[begin : begin + 37])
            reader.facts()
            usage.of_answer(data)
            for line in data.splitlines():
                usage.of_line(line)


def _states() -> list[bytes]:
    return [
        state_file(words(TOKENS), *sections, version=version)
        for sections in COMPOSITIONS.values()
        for version in (3, 4)
    ]


def _read_state(path: Path) -> Callable[[bytes], object]:
    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_state_file(path)

    return read


def _edit(folder: Path) -> Callable[[bytes], object]:
    """Return a function that orders, repairs and thins a state file, as a save does."""
    path, donor = folder / "state", folder / "donor"
    donor.write_bytes(state_file(words(TOKENS), *COMPOSITIONS["hybrid"], version=4))
    whole = (FilePart(donor.stat().st_size, b""),)

    def edit(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(StateFileMalformed):
            order_windows(path, read_state_file(path))
            repair_window(path)
        source = Source(path, (FilePart(path.stat().st_size, b""),))
        select_context_checkpoints(source, {2, 3}, {4: Source(donor, whole)})

    return edit


def _bundle(leftovers: ExitStack, folder: Path) -> tuple[bytes, bytes, Callable[[bytes], object]]:
    """Return a record, an exported file, and a function that imports one."""
    first, second = folder / "first", folder / "second"
    first.mkdir()
    second.mkdir()
    asyncio.run(meet(first, CANARY, commits=True))
    files, file, changed = StateFiles(first), folder / "exported", folder / "changed"
    records = read_records(files)
    export_checkpoints(files, records, file, _nothing)
    store = leftovers.enter_context(open_offline(second, may_be_new=True))

    def take(data: bytes) -> None:
        changed.write_bytes(data)
        import_checkpoints(store, changed, _nothing)

    return encode_sidecar(records[0]), file.read_bytes(), take


def _change_record(chance: random.Random, data: bytes) -> bytes:
    """Change a record behind its checksum, which is made right again."""
    changed = change_bytes(chance, data[16:])
    return xxhash.xxh3_128_digest(changed) + changed


def _nothing(_: int) -> None:
    """Take no note of progress."""


def targets(leftovers: ExitStack) -> list[Target]:
    """Return all parsers, with folders of their own."""
    folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
    record, bundle, take = _bundle(leftovers, folder)
    states = _states()
    return [
        *(Target(f"bodies: {r.value}", _bodies(r), change_json, _read_body(r)) for r in Route),
        Target("answers", _answers(), change_bytes, _read_answer),
        Target(
            *("state files", states, change_bytes, _read_state(folder / "read")),
            (StateFileMalformed,),
        ),
        Target(
            *("edits of state files", states, change_bytes, _edit(folder)),
            (StateFileMalformed,),
            share=0.2,
        ),
        Target("records", [record], _change_record, decode_sidecar),
        Target("exported files", [bundle], change_bytes, take, (CacheFault,), share=0.02),
    ]


def fuzz(target: Target, n_inputs: int, seed: int) -> tuple[list[str], float]:
    """Return what was raised unforeseen, and the longest time that one input took, in seconds."""
    chance, found, longest = random.Random(seed), [], 0.0
    for number in range(n_inputs):
        data = target.change(chance, chance.choice(target.inputs))
        began = time.perf_counter()
        try:
            target.read(data)
        except target.may_raise:
            pass
        except Exception as error:
            found.append(f"{type(error).__name__} at input {number} of seed {seed}: {error}")
        longest = max(longest, time.perf_counter() - began)
    return found, longest


def main() -> int:
    parser = argparse.ArgumentParser(description="Give the proxy's parsers damaged and odd inputs.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--document", action="store_true")
    arguments = parser.parse_args()
    bar = f"nothing unforeseen is raised, and no input takes {HANG_SECONDS:.0f} s"
    columns = ("parser", "inputs", "raised", "longest, ms")
    section, whole = (
        Section("Inputs for each parser", bar, columns),
        Section("Inputs", bar, columns),
    )
    n_found, longest_of_all = 0, 0.0
    with ExitStack() as leftovers:
        chosen = targets(leftovers)
        total = sum(target.share for target in chosen)
        for target in chosen:
            n_inputs = round(arguments.inputs * target.share / total)
            tell(f"{target.name}: {n_inputs:,} inputs")
            found, longest = fuzz(target, n_inputs, arguments.seed)
            for line in found[:5]:
                print(f"{target.name}: {line}")
            is_met = not found and longest < HANG_SECONDS
            section.add(target.name, n_inputs, len(found), f"{1000 * longest:.0f}", is_met=is_met)
            n_found, longest_of_all = n_found + len(found), max(longest_of_all, longest)
    print(section.markdown())
    if arguments.document:
        longest_ms = f"{1000 * longest_of_all:.0f}"
        whole.add("all", arguments.inputs, n_found, longest_ms, is_met=not section.n_missed)
        document("fuzz", [whole], level=3, path=PAGE)
    return 1 if section.n_missed else 0


if __name__ == "__main__":
    sys.exit(main())
