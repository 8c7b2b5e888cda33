"""Storms: clients on all routes that leave at any moment, before a llama-server that fails in every way.

After a storm nothing may be left: no lease, no turn, no task, no file; and a new request is answered.
"""

import asyncio
import random
from typing import Any

import aiohttp
import pytest

from proxy.core.rates import Rates
from proxy.core.slots import SlotPhase
from proxy.serving.process import Process
from tests.fakes.faults import Faults
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig
from tests.integration.rig import (
    CHAT,
    COMPLETION,
    Messages,
    Reply,
    Rig,
    next_question,
    question,
    text,
    with_image,
)
from tests.lab.waiting import until

N_CLIENTS = 6
STORM_SECONDS = 6.0
LEAVES = 0.3
"""The share of requests whose client does not wait for the answer."""
PATIENCE_SECONDS = (0.001, 0.01, 0.03, 0.1)
HELPERS = ["slots", "tokenize", "apply-template", "save", "restore", "erase", "evaluate"]
HELD = [*HELPERS, "props", "generate", "chunk"]
DEADLY = ["restore", "save", "answer", "stream", "evaluate"]
MEMORIES = [Memory.ANY_PREFIX, Memory.RESTORE_POINTS, Memory.END_ONLY]


class Clients:
    """Clients that send one request after the other, go on with what they were answered, or leave."""

    def __init__(self, rig: Rig, lasting: aiohttp.ClientSession, chance: random.Random) -> None:
        self._rig = rig
        self._lasting = lasting
        self._chance = chance
        self._begun: list[Messages] = []
        self.is_over = False
        self.statuses: set[int] = set()

    def _next(self) -> tuple[str, dict[str, Any]]:
        chance = self._chance
        messages = question(chance.choice("abcd"), chance.choice([20, 300, 300, 900]))
        body = {"max_tokens": chance.choice([0, 1, 4, 12]), "stream": chance.random() < 0.6}
        match chance.randrange(10):
            case 0 | 1:
                return "/v1/messages", {**body, "messages": messages}
            case 2:
                return "/v1/messages", {**body, "messages": with_image(messages)}
            case 3:
                prompt = text(chance.choice("abcd"), 200)
                return COMPLETION, {"prompt": prompt, "n_predict": 4, "stream": body["stream"]}
            case 4:
                return "/embedding", {"content": "a word"}
            case 5:
                return CHAT, {**body, "messages": messages, "n": 2}
            case 6 | 7 | 8 if self._begun:
                begun = self._begun.pop(chance.randrange(len(self._begun)))
                return CHAT, {"messages": begun, "max_tokens": 4}
        return CHAT, {**body, "messages": messages}

    async def run(self) -> None:
        while not self.is_over:
            path, body = self._next()
            leaves = self._chance.random() < LEAVES
            patience_seconds = self._chance.choice(PATIENCE_SECONDS) if leaves else None
            http = self._chance.choice([self._rig.client, self._lasting])
            try:
                async with asyncio.timeout(patience_seconds):
                    async with http.post(self._rig.base_url + path, json=body) as answer:
                        reply = Reply(answer.status, await answer.read(), {})
            except TimeoutError:
                continue
            self.statuses.add(reply.status)
            if reply.status == 200 and path == CHAT and not body.get("stream") and "n" not in body:
                self._begun.append(next_question(body["messages"], reply))
            await asyncio.sleep(self._chance.choice([0.0, 0.0, 0.01, 0.05]))


async def disturb(rig: Rig, chance: random.Random) -> None:
    """Let one thing go wrong, for a while or once."""
    faults, helper, seconds = rig.server.faults, chance.choice(HELPERS), chance.uniform(0.05, 0.5)
    match chance.randrange(9):
        case 0:
            rig.server.replace_process()
        case 1:
            await rig.server.crash()
            await asyncio.sleep(seconds)
            await rig.server.restart()
        case 2:
            held = chance.choice(HELD)
            rig.server.hold(held)
            await asyncio.sleep(seconds)
            rig.server.release(held)
        case 3:
            faults.refuse[helper] = chance.choice([400, 500, 503])
            await asyncio.sleep(seconds)
        case 4:
            faults.drop.add(helper)
            await asyncio.sleep(seconds)
        case 5:
            faults.slow_seconds[helper] = chance.choice([0.01, 0.05])
        case 6:
            faults.dies_at[chance.choice(DEADLY)] = 1
        case 7:
            faults.chunk_seconds = chance.choice([0.0, 0.005, 0.02])
        case 8 if rig.process:
            rig.process.rates = Rates().after_evaluation(0, 1000, chance.choice([0.01, 0.5]))
    faults.refuse.clear()
    faults.drop.clear()


def left(process: Process) -> dict[str, object]:
    """Return what is still held, waited for or under way."""
    queue, launches = process.queue, process.launches
    return {
        "leases": [slot for slot in process.slots if slot.phase is not SlotPhase.FREE],
        "queue": queue.n_waiting or queue.expected or queue.is_placing,
        "turns": list(queue._choosing._queue) + list(launches.turns._queue),
        "evaluations": launches._evaluations,
        "settling": process.settling,
        "saves": process.saves.under_way,
        "on way": process.on_way,
    }


@pytest.mark.long
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("clears", [False, True], ids=["kept", "cleared"])
@pytest.mark.parametrize("n_slots", [1, 2, 4])
async def test_storm_leaves_nothing(
    start_rig: StartRig, n_slots: int, clears: bool, memory: Memory
) -> None:
    chance = random.Random(f"{n_slots} {clears} {memory}")
    faults = Faults(clears_idle_slots=clears)
    options = {"idle_save_seconds": chance.choice([0.04, 5.0]), "max_store_bytes": 4 << 20}
    async with (
        aiohttp.ClientSession() as lasting,
        start_rig(n_slots=n_slots, memory=memory, faults=faults, **options) as rig,
    ):
        clients = Clients(rig, lasting, chance)
        running = [asyncio.ensure_future(clients.run()) for _ in range(N_CLIENTS)]
        over_at = asyncio.get_running_loop().time() + STORM_SECONDS
        while asyncio.get_running_loop().time() < over_at:
            await asyncio.sleep(chance.uniform(0.1, 0.5))
            await disturb(rig, chance)
        clients.is_over = True
        faults.slow_seconds.clear()
        faults.dies_at.clear()
        await asyncio.gather(*running)
        await until(lambda: rig.process and not any(left(rig.process).values()))
        assert (await rig.chat("new")).status == 200
        assert clients.statuses <= {200, 404, 422, 502, 503}
