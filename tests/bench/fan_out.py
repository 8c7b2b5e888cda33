"""Eight children of one long parent at once, with the proxy and by llama-server alone.

The parent was just answered, or nobody has asked yet and the children share a system prompt. An exact cache
evaluates each token of the family once that nobody has behind the same tokens.

python -m tests.bench.fan_out [KIND ...]
"""

import asyncio
import hashlib
import itertools
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from tests.bench.section import Section
from tests.lab.conversation import system, user
from tests.lab.models import model_path
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

N_CHILDREN = 8
N_PARENT_WORDS = 3300
"""About 10,000 tokens."""
N_CHILD_WORDS = 100
CHAT = "/v1/chat/completions"


async def measure(kind: str, n_slots: int, *, is_cold: bool, alone: bool) -> tuple[int, int, float]:
    """Return how many tokens the family evaluated, how many an exact cache would, and the children's
    seconds."""
    with tempfile.TemporaryDirectory(prefix="prefix-cache-") as folder:
        model = model_path(kind, "tiny", DEFAULT_MODEL_FOLDER)
        server = LlamaServer(model, Path(folder), n_slots=n_slots, n_ctx=16384 * n_slots)
        async with Rig(server, Path(folder)) as rig:
            if alone:
                await rig.stop_proxy()
            base_url = server.base_url if alone else rig.base_url
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as client:
                settled = _nothing if alone else rig.settled
                found = await _fan_out(client, base_url, server, settled, is_cold=is_cold)
            if alone:
                await rig.start_proxy()
            return found


async def _nothing() -> None:
    """Stand for a proxy that saves nothing."""


async def _fan_out(
    client: aiohttp.ClientSession,
    base_url: str,
    server: LlamaServer,
    settled: Callable[[], Awaitable[None]],
    *,
    is_cold: bool,
) -> tuple[int, int, float]:
    async def post(url: str, body: Any) -> Any:
        async with client.post(url, json=body) as reply:
            content = await reply.json()
            assert reply.status == 200, content
            return content

    async def ask(messages: list[Any]) -> Any:
        body = {"messages": messages, "max_tokens": 16, "temperature": 0}
        return (await post(base_url + CHAT, body))["choices"][0]["message"]

    async def tokens(messages: list[Any]) -> list[int]:
        rendered = await post(server.base_url + "/apply-template", {"messages": messages})
        body = {"content": rendered["prompt"], "add_special": True, "parse_special": True}
        return list((await post(server.base_url + "/tokenize", body))["tokens"])

    await settled()
    before = await asyncio.to_thread(server.evaluated_tokens)
    shared = parent = [system(N_PARENT_WORDS)]
    if not is_cold:
        parent = [*shared, user(1)]
        shared = [*parent, await ask(parent)]
        await settled()
    began = time.perf_counter()
    children = [[*shared, user(10 + n, N_CHILD_WORDS)] for n in range(N_CHILDREN)]
    await asyncio.gather(*map(ask, children))
    seconds = time.perf_counter() - began
    await settled()
    n_evaluated = await asyncio.to_thread(server.evaluated_tokens) - before
    family = children if is_cold else [parent, *children]
    return n_evaluated, n_distinct([await tokens(messages) for messages in family]), seconds


def n_distinct(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens of prompts there are, with those of a common beginning counted once."""
    known: set[bytes] = set()
    for prompt in prompts:
        prefix = hashlib.sha256()
        for token in prompt:
            prefix.update(token.to_bytes(4, "little"))
            known.add(prefix.digest())
    return len(known)


async def measure_all(kinds: Sequence[str]) -> Section:
    """Return the table."""
    section = Section(
        "Eight children of one parent at once (tiny models)",
        "evaluated / exact at most 1.02; seconds / llama-server alone at most 0.8",
        (
            "memory",
            "slots",
            "parent",
            "evaluated",
            "exact",
            "ratio",
            "seconds",
            "alone: evaluated",
            "seconds",
        ),
    )
    for kind, n_slots, is_cold in itertools.product(kinds, (2, 4, 8), (False, True)):
        n_evaluated, n_exact, seconds = await measure(kind, n_slots, is_cold=is_cold, alone=False)
        n_alone, _, alone_seconds = await measure(kind, n_slots, is_cold=is_cold, alone=True)
        ratio = n_evaluated / n_exact
        is_met = ratio <= 1.02 and seconds <= 0.8 * alone_seconds
        timings = f"{ratio:.3f}", f"{seconds:.1f}", n_alone, f"{alone_seconds:.1f}"
        parent = "none" if is_cold else "answered"
        row = (kind, n_slots, parent, n_evaluated, n_exact, *timings)
        section.add(*row, is_met=is_met)
        print(row, file=sys.stderr, flush=True)
    return section


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


if __name__ == "__main__":
    structlog.configure(processors=[_drop])
    print(asyncio.run(measure_all(sys.argv[1:] or ("hybrid", "full"))).markdown())
