"""The main job on a real llama-server, four kinds of memory: what is evaluated is what must be."""

from typing import Any

import pytest

from proxy.driver.saving import keep_as_saved
from tests.lab.conversation import Message, agent_requests, system, tools
from tests.lab.older_builds import strip_context_checkpoints
from tests.lab.rig import Rig
from tests.live.conftest import KINDS, StartRig

SLACK_TOKENS = 32
HEADER = [system(450)]
TOOLS = tools(6)

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Ledger:
    """Knows every prompt sent so far, and what a perfect cache would have to evaluate for the next."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.sequences: list[list[int]] = []

    async def tokens(self, messages: list[Message]) -> list[int]:
        body: dict[str, Any] = {"messages": messages, "tools": TOOLS}
        rendered = await self.rig.post("/apply-template", body)
        content = {"content": rendered["prompt"], "add_special": True, "parse_special": True}
        return list((await self.rig.post("/tokenize", content))["tokens"])

    async def ask(self, messages: list[Message]) -> tuple[int, int, int]:
        """Send a request; return its new tokens, those evaluated for it, and its prompt's length."""
        tokens = await self.tokens(messages)
        n_known = max((_n_common(tokens, s) for s in self.sequences), default=0)
        before = await self.rig.evaluated()
        reply = await self.rig.chat(messages, tools=TOOLS)
        n_evaluated = await self.rig.evaluated() - before
        text = reply["choices"][0]["message"].get("content") or ""
        self.sequences.append(tokens)
        assert reply["usage"]["prompt_tokens"] == len(tokens), text
        return len(tokens) - n_known, n_evaluated, len(tokens)


def _n_common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


async def test_conversation_after_restart_evaluates_only_new_tokens(
    start_rig: StartRig, kind: str
) -> None:
    requests = agent_requests(3, 3, header=HEADER)
    async with start_rig(kind) as rig:
        ledger = Ledger(rig)
        for messages in requests[:8]:
            n_new, n_evaluated, n_prompt = await ledger.ask(messages)
            assert n_evaluated <= n_new + SLACK_TOKENS
        assert n_prompt > 4000
        await rig.restart()
        for messages in requests[8:]:
            n_new, n_evaluated, _ = await ledger.ask(messages)
            assert n_evaluated <= n_new + SLACK_TOKENS


@pytest.mark.parametrize("restarts", [False, True])
async def test_second_conversation_with_same_header_shares_it(
    start_rig: StartRig, kind: str, restarts: bool
) -> None:
    async with start_rig(kind) as rig:
        ledger = Ledger(rig)
        for messages in agent_requests(2, 2, header=HEADER):
            await ledger.ask(messages)
        if restarts:
            await rig.restart()
        other = agent_requests(1, 0, header=HEADER, seed=500)[0]
        n_new, n_evaluated, n_prompt = await ledger.ask(other)
        assert n_evaluated <= n_new + SLACK_TOKENS
        assert n_new < n_prompt / 10


async def test_older_builds_continue_at_the_end_of_the_state(
    start_rig: StartRig, kind: str
) -> None:
    """Without context checkpoints in the file only a state's exact end can be continued."""
    requests = agent_requests(3, 2, header=HEADER)
    async with start_rig(kind, rewrite=strip_context_checkpoints) as rig:
        ledger = Ledger(rig)
        expected = "any prefix" if kind == "full" else "end only"
        assert (await rig.health())["rule"] == expected
        for messages in requests[:5]:
            await ledger.ask(messages)
        await rig.restart()
        n_new, n_evaluated, _ = await ledger.ask(requests[5])
        assert n_evaluated <= n_new + SLACK_TOKENS
        other = agent_requests(1, 0, header=HEADER, seed=500)[0]
        n_new, n_evaluated, _ = await ledger.ask(other)
        assert n_evaluated <= n_new + SLACK_TOKENS


@pytest.mark.parametrize("rewrite", [keep_as_saved, strip_context_checkpoints])
async def test_turn_start_survives_a_long_tool_loop_and_a_restart(
    start_rig: StartRig, kind: str, rewrite: Any
) -> None:
    """A new user message drops old reasoning, so the prompt goes back to the previous turn's start."""
    requests = agent_requests(2, 14, header=HEADER)
    async with start_rig(kind, rewrite=rewrite) as rig:
        ledger = Ledger(rig)
        for messages in requests[:15]:
            await ledger.ask(messages)
        await rig.restart()
        n_new, n_evaluated, _ = await ledger.ask(requests[15])
        assert n_evaluated <= n_new + SLACK_TOKENS


async def test_slots_are_adopted_when_only_the_proxy_restarts(
    start_rig: StartRig, kind: str
) -> None:
    requests = agent_requests(2, 1, header=HEADER)
    async with start_rig(kind) as rig:
        ledger = Ledger(rig)
        await ledger.ask(requests[0])
        n_checkpoints = (await rig.health())["checkpoints"]
        await rig.restart(server=False)
        assert (await rig.health())["slots"] == {"empty": 1, "known": 1}
        assert (await rig.health())["checkpoints"] == n_checkpoints  # adopted, not saved twice
        for messages in requests[1:]:
            n_new, n_evaluated, _ = await ledger.ask(messages)
            assert n_evaluated <= n_new + SLACK_TOKENS
