"""What each change that clients make costs, replayed before a real llama-server with a tiny hybrid model.

A replay is sent twice, as the client sends it and without its change, once with the safe stabilizers and
once with those that help. What the one evaluates beyond the other was evaluated again.

python -m tests.bench.replays [NAME ...]
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import structlog

from proxy.stabilize.model import SAFE, Name
from tests.bench.section import Section
from tests.lab.clients.replays import PATHS, REPLAYS, Body, Replay, tagged
from tests.lab.models import TEMPLATE_FOLDER, model_path
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

MOST_TOKENS = 600
_TAGS = (f"agent_{n}" for n in count(100))


async def measure(rig: Rig, replay: Replay) -> tuple[list[int], list[str]]:
    """Return how many tokens each request but the first evaluates again, and the causes named."""
    changed, causes = await evaluated(rig, replay, replay.changed)
    unchanged, _ = await evaluated(rig, replay, replay.unchanged)
    again = [one - other for one, other in zip(changed, unchanged, strict=True)]
    return again[1:], causes[1:]


async def evaluated(
    rig: Rig, replay: Replay, bodies: Sequence[Body]
) -> tuple[list[int], list[str]]:
    """Return how many tokens each request evaluates, and the causes named."""
    tag, n_evaluated, causes = next(_TAGS), [], []
    for i, body in enumerate(bodies):
        before = await rig.evaluated()
        given = {"max_tokens": 4, **tagged(body, tag), "stream": False}
        given["max_tokens"] = min(4, given["max_tokens"])
        session = tag if replay.is_one_conversation else f"{tag}-{i}"
        await rig.post(PATHS[replay.form], given, headers={"x-session-id": session})
        n_evaluated.append(await rig.evaluated() - before)
        async with rig.client.get(rig.admin_url + "/requests/last") as reply:
            record: dict[str, Any] = (await reply.json())["request"]
        causes.append(record["cause"])
    return n_evaluated, causes


async def measure_all(names: Sequence[str], kind: str = "hybrid") -> Section:
    """Return the table."""
    section = Section(
        "What clients change (tiny hybrid model)",
        f"at most {MOST_TOKENS} tokens, or the cause is named and there is a switch",
        ("row", "change", "safe", "cause", "switched on", "then"),
    )
    chosen = [r for r in REPLAYS if not names or r.name.split()[0] in names or r.name in names]
    found: dict[str, list[tuple[list[int], list[str]]]] = {r.name: [] for r in chosen}
    switches = sorted({SAFE, *(SAFE | r.opt_in for r in chosen)}, key=len)
    for switched_on in switches:
        async with AsyncRig(kind, switched_on) as rig:
            for replay in chosen:
                if switched_on in (SAFE, SAFE | replay.opt_in):
                    found[replay.name].append(await measure(rig, replay))
                    print(replay.name, found[replay.name][-1], file=sys.stderr, flush=True)
    for replay in chosen:
        (safe, causes), *more = found[replay.name]
        then = more[0][0] if more else []
        is_met = max(then or safe) <= MOST_TOKENS or replay.cause in causes
        helps = ", ".join(f"`{name}`" for name in replay.opt_in) or replay.switch or "-"
        told = next((cause for cause in causes if cause == replay.cause), causes[-1])
        cells = [" / ".join(map(str, n)) or "-" for n in (safe, then)]
        section.add(replay.name, replay.words, cells[0], told, helps, cells[1], is_met=is_met)
    return section


class AsyncRig:
    """A rig with these stabilizers, in a folder of its own."""

    def __init__(self, kind: str, switched_on: frozenset[Name]) -> None:
        self._kind, self._switched_on, self._leftovers = kind, switched_on, ExitStack()

    async def __aenter__(self) -> Rig:
        folder = self._leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-"))
        model = model_path(self._kind, "tiny", DEFAULT_MODEL_FOLDER)
        template = ("--chat-template-file", str(TEMPLATE_FOLDER / "strict.jinja"))
        server = LlamaServer(model, Path(folder), n_slots=2, n_ctx=65536, extra_args=template)
        self._rig = Rig(server, Path(folder), stabilizers=", ".join(sorted(self._switched_on)))
        return await self._rig.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self._rig.__aexit__(*error)
        self._leftovers.close()


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


if __name__ == "__main__":
    structlog.configure(processors=[_drop])
    print(asyncio.run(measure_all(sys.argv[1:])).markdown())
