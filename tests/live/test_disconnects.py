"""150 requests whose clients leave at any moment: none fails, hangs or keeps a slot."""

import asyncio
import random
from typing import Any

import aiohttp
import pytest

from tests.lab.conversation import agent_requests, system, tools
from tests.lab.rig import Rig
from tests.lab.run import slots_in
from tests.live.conftest import StartRig, in_long

N_REQUESTS = 150
N_AT_ONCE = 6
HUNG_SECONDS = 300.0
TOOLS = tools(2)
CONVERSATIONS = [agent_requests(3, 1, header=[system(120)], seed=100 * i) for i in range(4)]


def next_body(chance: random.Random) -> tuple[str, dict[str, Any]]:
    messages = chance.choice(chance.choice(CONVERSATIONS))
    stream = chance.random() < 0.7
    n_tokens = chance.choice([1, 8, 60])
    if chance.random() < 0.2:
        body = {"messages": [messages[1]], "max_tokens": n_tokens, "stream": stream}
        return "/v1/messages", body
    body = {"messages": messages, "tools": TOOLS, "max_tokens": n_tokens, "stream": stream}
    return "/v1/chat/completions", {**body, "temperature": 0}


async def visit(rig: Rig, client: aiohttp.ClientSession, chance: random.Random) -> str:
    """Send one request and leave it at a random moment, or see it through."""
    path, body = next_body(chance)
    patience_seconds = chance.choice([0.001, 0.005, 0.02, 0.05, 0.2, HUNG_SECONDS, HUNG_SECONDS])
    try:
        async with asyncio.timeout(patience_seconds):
            async with client.post(rig.base_url + path, json=body) as reply:
                content = await reply.read()
                assert reply.status == 200, content
                assert b'"error"' not in content, content
                return "served"
    except TimeoutError:
        assert patience_seconds < HUNG_SECONDS, "a request hung"
        return "left"


@pytest.mark.parametrize("kind", ["hybrid", *in_long("full")])
async def test_clients_that_leave_at_random_moments_leak_nothing(
    start_rig: StartRig, kind: str
) -> None:
    chance = random.Random(2026)
    places = asyncio.Semaphore(N_AT_ONCE)
    async with start_rig(kind, idle_save_seconds=0.3) as rig:

        async def one(client: aiohttp.ClientSession) -> str:
            async with places:
                return await visit(rig, client, chance)

        async with aiohttp.ClientSession() as client:
            outcomes = await asyncio.gather(*(one(client) for _ in range(N_REQUESTS)))
        assert min(map(outcomes.count, ("left", "served"))) > 20
        await rig.settled()
        health = await rig.health()
        assert (slots_in(health)["leased"], health["n_waiting"]) == (0, 0)
        reply = await rig.chat(CONVERSATIONS[0][0], tools=TOOLS)
        assert reply["choices"]
        assert rig.sample("restore_ineffective_total") == 0
        assert rig.sample("tokenization_disagreements_total") == 0
        assert rig.sample("drift_total") == 0
