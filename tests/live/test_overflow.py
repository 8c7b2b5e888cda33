"""Conversations that outgrow the context, on a real llama-server."""

import pytest

from tests.lab.apis import CHAT, MESSAGES, Api, Usage
from tests.lab.conversation import Message, agent_requests, system, tool_result, tools, user
from tests.lab.models import TEMPLATE_FOLDER
from tests.lab.rig import Rig
from tests.live.conftest import StartRig
from tests.live.ledger import SLACK_TOKENS

N_CTX = 3072
TOOLS = tools(2, 40)
KEEPS_ALL = ("--chat-template-file", str(TEMPLATE_FOLDER / "plain.jinja"))
"""Drops no reasoning: a conversation that is not cut only ever grows."""

both_apis = pytest.mark.parametrize("api", [CHAT, MESSAGES], ids=["chat", "messages"])


def turns(n_turns: int) -> list[list[Message]]:
    """Return the request that begins each turn of a conversation with a call in each."""
    return agent_requests(n_turns, 1, header=[system(60)])[::2]


async def ask(rig: Rig, api: Api, messages: list[Message]) -> tuple[int, Usage | None]:
    """Send a request; return how much was evaluated for it, and its usage if it was answered."""
    before = await rig.evaluated()
    body = api.ask(messages, TOOLS, **api.limit(2))
    async with rig.client.post(rig.base_url + api.path, json=body) as reply:
        content = await reply.read()
        assert reply.status in (200, 400), content
    usage = api.read(content) if reply.status == 200 else None
    return await rig.evaluated() - before, usage


@both_apis
async def test_conversation_that_is_cut_evaluates_only_what_is_new_until_it_is_full_again(
    start_rig: StartRig, api: Api
) -> None:
    async with start_rig(
        "hybrid", n_slots=1, n_ctx=N_CTX, extra_args=KEEPS_ALL, context_overflow="stable"
    ) as rig:
        n_before, n_cuts = 0, 0
        for messages in turns(13):
            n_evaluated, usage = await ask(rig, api, messages)
            assert usage is not None and usage.n_prompt < N_CTX
            if usage.n_prompt < n_before:
                n_cuts += 1
                assert usage.n_prompt < 0.75 * N_CTX
                assert n_evaluated < usage.n_prompt  # the header is there
            else:
                assert n_evaluated <= usage.n_prompt - n_before + SLACK_TOKENS
            n_before = usage.n_prompt
        assert n_cuts == 2
        await rig.restart(server=False)
        n_evaluated, again = await ask(rig, api, messages)
        assert again is not None and again.n_prompt == n_before
        assert n_evaluated <= SLACK_TOKENS


@both_apis
async def test_prompt_that_is_refused_costs_the_conversation_nothing(
    start_rig: StartRig, api: Api
) -> None:
    async with start_rig("hybrid", n_slots=2, n_ctx=2 * N_CTX, extra_args=KEEPS_ALL) as rig:
        *_, before, now = turns(4)
        await ask(rig, api, before)
        n_evaluated, usage = await ask(rig, api, [*before, tool_result(1), user(1, 2 * N_CTX)])
        assert (n_evaluated, usage) == (0, None)
        n_evaluated, usage = await ask(rig, api, now)
        assert usage is not None and n_evaluated < usage.n_prompt / 4
        assert (await rig.health())["reasons"] == []
