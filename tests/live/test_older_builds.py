"""Real llama-servers of earlier months: what is learned of them, and what a conversation costs there."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.model import FAR_TOKENS, NEAR_TOKENS, Rule, RuleKind
from tests.lab.conversation import prose
from tests.lab.older_server import BUILDS, OLDEST, binary_of
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer
from tests.live.conftest import StartRig, in_long
from tests.live.test_window_repair import LOGPROB_BAR, distance

JUNE, SEPTEMBER = BUILDS[1:]
KINDS = [
    *((OLDEST, "swa"), (OLDEST, "hybrid"), (JUNE, "swa"), (SEPTEMBER, "recurrent")),
    # June's does not load the recurrent one.
    *in_long((OLDEST, "full"), (OLDEST, "recurrent"), (JUNE, "hybrid")),
    *in_long((SEPTEMBER, "swa"), (SEPTEMBER, "hybrid")),
]
RULES = {"full": Rule(RuleKind.ANY_PREFIX)}
WINDOW_RULES = {OLDEST: Rule(RuleKind.END_ONLY)}
"""The oldest build saves more than a window; the others continue only what is longer than one, repaired."""
N_TURNS = 3
LOST_TOKENS_PER_REQUEST = 12
"""The generation prompt, which is not in the state at a cut, and a context checkpoint's margin."""
CANARY_TOKENS = 128


def rule_of(kind: str, build: str) -> Rule:
    if kind == "swa":
        return WINDOW_RULES.get(build, Rule(RuleKind.END_ONLY, 2200))
    return RULES.get(kind, Rule(RuleKind.END_ONLY))


async def ask(rig: Rig, messages: list[dict[str, Any]]) -> dict[str, Any]:
    reply = await rig.chat(messages)
    await rig.settled()
    return reply


@pytest.mark.parametrize(("build", "kind"), KINDS)
async def test_conversation_over_a_restart_evaluates_only_what_is_new(
    start_rig: StartRig, build: str, kind: str
) -> None:
    async with start_rig(kind, n_slots=1, n_ctx=16384, binary=binary_of(build)) as rig:
        process = rig.running.server.process
        assert process is not None
        assert replace(process.rule, stride_tokens=NEAR_TOKENS) == rule_of(kind, build)
        assert (process.rule.stride_tokens == FAR_TOKENS) is (build != SEPTEMBER)
        assert process.clears_idle_slots is None  # there is no other slot
        messages = [{"role": "system", "content": prose(1, 520)}]
        messages.append({"role": "user", "content": prose(2, 300)})
        n_before, before = 0, await rig.evaluated()
        n_exact = 0
        for turn in range(N_TURNS):
            if turn == N_TURNS - 1:
                n_exact += CANARY_TOKENS
                before -= await rig.evaluated()
                await rig.restart()
            reply = await ask(rig, messages)
            n_prompt = reply["usage"]["prompt_tokens"]
            n_exact += n_prompt - n_before + LOST_TOKENS_PER_REQUEST
            n_before = n_prompt
            messages.append({"role": "assistant", "content": "yes"})
            messages.append({"role": "user", "content": prose(10 + turn, 20)})
        assert n_before > 2200
        assert await rig.evaluated() - before <= n_exact
        alone = await asyncio.to_thread(cold_chat, rig.server, messages[:-2])
        assert reply["choices"] == alone["choices"]


def cold_chat(server: LlamaServer, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "cache_prompt": False}
    return dict(server.request("POST", "/v1/chat/completions", body)[1])


@pytest.mark.parametrize(("build", "kind"), [(OLDEST, "hybrid"), (JUNE, "hybrid")])
async def test_restored_state_is_never_continued_at_anothers_context_checkpoint(
    start_rig: StartRig, build: str, kind: str
) -> None:
    """Builds before July 2026 keep what a slot had of another prompt over an erase and a restore."""
    async with start_rig(kind, n_slots=1, n_ctx=16384, binary=binary_of(build)) as rig:
        mine = [100 + (i * 41 + i // 30) % 3000 for i in range(2550)]
        others = [100 + (i * 37 + i // 50) % 3000 for i in range(2499)]
        await complete(rig, mine[:2500])
        await complete(rig, others)
        # Restored, and continued so little that no context checkpoint is made behind the other one's.
        await complete(rig, mine, n_predict=8)
        next_one = [*mine, 5, 6, 7]
        live = await complete(rig, next_one)
        cold = await complete(rig, next_one, cache_prompt=False)
        assert rig.sample("restores_total", result="done") == 1
        assert distance(live, cold) <= LOGPROB_BAR


async def complete(rig: Rig, tokens: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": tokens, "n_predict": 1, "temperature": 0, "n_probs": 10, **fields}
    reply = await rig.post("/completion", body)
    await rig.settled()
    return reply
