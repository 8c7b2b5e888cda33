"""One token more or less: where off-by-one errors of caches live."""

import asyncio
from typing import Any

import pytest

from proxy.core.tokens import BLOCK_TOKENS, FIRST_BLOCK_TOKENS
from tests.lab.rig import Rig
from tests.lab.run import slots_in
from tests.live.conftest import StartRig, in_long

SLIDING_WINDOW = 512
MARGIN_TOKENS = 6
"""A context checkpoint lies up to 5 tokens before the end of what was evaluated."""

pytestmark = pytest.mark.parametrize(
    "kind", ["swa", "hybrid", *in_long("full", "recurrent", "hybrid_no_mrope")]
)


def prompt(n_tokens: int, seed: int = 1) -> list[int]:
    return [100 + (i * 37 + seed * 101) % 3000 for i in range(n_tokens)]


async def complete(rig: Rig, tokens: list[int], **fields: Any) -> tuple[int, str]:
    """Return how many tokens were evaluated for a request, and its answer."""
    before = await rig.evaluated()
    body = {"prompt": tokens, "n_predict": 4, "temperature": 0, **fields}
    content = (await rig.post("/completion", body))["content"]
    return await rig.evaluated() - before, str(content)


async def save_and_restart(rig: Rig, tokens: list[int]) -> None:
    await complete(rig, tokens, n_predict=0)
    await rig.restart()


async def test_prompt_around_a_restore_point_reuses_it_exactly(
    start_rig: StartRig, kind: str
) -> None:
    n_state = 1000
    async with start_rig(kind) as rig:
        for n_prompt in (n_state - 1, n_state, n_state + 1, n_state + 2):
            await save_and_restart(rig, prompt(n_state))
            n_evaluated, answer = await complete(rig, prompt(n_prompt))
            assert n_evaluated <= max(0, n_prompt - n_state) + MARGIN_TOKENS
            _, cold_answer = await complete(rig, prompt(n_prompt), cache_prompt=False)
            assert answer == cold_answer


async def test_state_of_boundary_length_is_restored(start_rig: StartRig, kind: str) -> None:
    around = (BLOCK_TOKENS, BLOCK_TOKENS + 1, *range(SLIDING_WINDOW - 1, SLIDING_WINDOW + 2))
    async with start_rig(kind) as rig:
        for n_state in around:
            await save_and_restart(rig, prompt(n_state, n_state))
            longer = prompt(n_state + 10, n_state)
            n_evaluated, answer = await complete(rig, longer)
            assert n_evaluated <= 10 + MARGIN_TOKENS, n_state
            assert answer == (await complete(rig, longer, cache_prompt=False))[1], n_state


async def test_state_below_a_block_is_served_without_a_checkpoint(
    start_rig: StartRig, kind: str
) -> None:
    async with start_rig(kind) as rig:
        await save_and_restart(rig, prompt(FIRST_BLOCK_TOKENS - 1))
        n_evaluated, _ = await complete(rig, prompt(FIRST_BLOCK_TOKENS + 9))
        assert n_evaluated == FIRST_BLOCK_TOKENS + 9
        assert (await rig.health())["state"] == "caching"


async def test_short_conversation_is_never_worse_than_the_server_alone(
    start_rig: StartRig, kind: str
) -> None:
    async with start_rig(kind) as rig:
        for n_first in (31, 48, 65):
            lengths = (n_first, n_first + 17, n_first + 40, n_first + 41)
            through = [(await complete(rig, prompt(n, n_first)))[0] for n in lengths]
            alone = await asyncio.to_thread(evaluate_alone, rig, lengths, n_first)
            assert sum(through) <= alone


def evaluate_alone(rig: Rig, lengths: tuple[int, ...], seed: int) -> int:
    """Send the same requests to llama-server itself, in an empty slot."""
    rig.server.request("POST", "/slots/0?action=erase", {})
    before = rig.server.evaluated_tokens()
    for n_tokens in lengths:
        body = {"prompt": prompt(n_tokens, seed), "n_predict": 4, "temperature": 0, "id_slot": 0}
        rig.server.request("POST", "/completion", body)
    return rig.server.evaluated_tokens() - before


async def test_prompt_that_fills_the_context_is_served_and_a_larger_one_refused(
    start_rig: StartRig, kind: str
) -> None:
    n_ctx = 2048
    async with start_rig(kind, n_ctx=2 * n_ctx) as rig:
        await complete(rig, prompt(1000))
        n_evaluated, _ = await complete(rig, prompt(n_ctx - 1))
        assert n_evaluated <= n_ctx - 1 - 1000 + MARGIN_TOKENS
        for n_tokens in (n_ctx, n_ctx + 1, 3 * n_ctx):
            body = {"prompt": prompt(n_tokens), "n_predict": 4}
            async with rig.client.post(rig.base_url + "/completion", json=body) as reply:
                assert reply.status == 400
                error = (await reply.json())["error"]
                assert error["type"] == "exceed_context_size_error"
                assert error["message"].startswith(f"prompt is too long: {n_tokens} tokens > ")
        n_evaluated, _ = await complete(rig, prompt(1010))
        assert n_evaluated <= 1010
        assert slots_in(await rig.health())["leased"] == 0
