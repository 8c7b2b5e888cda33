"""What a reply says of the cache, on a real llama-server: diagnostics for who asks, a header for all."""

from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.lab.apis import MESSAGES, RESPONSES
from tests.lab.conversation import prose, user
from tests.lab.mutations import OF_MESSAGES, OF_RESPONSES, base
from tests.lab.rig import Rig
from tests.live.conftest import StartRig

Body = dict[str, Any]
AS_SENT: Body = {"idle_save_seconds": 3600.0, "stabilizers": "none"}


def anthropic_of(rig: Rig) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=rig.base_url, api_key="none", max_retries=0)


def openai_of(rig: Rig) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=rig.base_url + "/v1", api_key="none", max_retries=0)


async def message(client: AsyncAnthropic, body: Body, before: str | None, *, stream: bool) -> Any:
    fields = {"max_tokens": 2, **body, "diagnostics": {"previous_message_id": before}}
    extra = {name: fields.pop(name) for name in ("temperature", "speed") if name in fields}
    if not stream:
        return await client.messages.create(**fields, extra_body=extra)
    async with client.messages.stream(**fields, extra_body=extra) as events:
        return await events.get_final_message()


async def response(client: AsyncOpenAI, body: Body, before: str | None, *, stream: bool) -> Any:
    fields = {"max_output_tokens": 2, **body}
    if before is not None:
        fields["prompt_cache_options"] = {"comparison_response_id": before}
    if not stream:
        return await client.responses.create(**fields)
    async with client.responses.stream(**fields) as events:
        return await events.get_final_response()


LIVE = (
    *("the same again", "next turn", "model", "date in the system prompt", "tool added"),
    *("tools in another order", "first message edited", "history summed up"),
)
IN_STREAM = ("the same again", "date in the system prompt", "tool added", "history summed up")
"""Each reason once: a stream only says it in another form."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_messages_are_told_what_changed_since_the_message_that_they_name(
    start_rig: StartRig, stream: bool
) -> None:
    async with start_rig("hybrid", **AS_SENT) as rig, anthropic_of(rig) as client:
        for mutation in [m for m in OF_MESSAGES if m.name in (IN_STREAM if stream else LIVE)]:
            first = await message(client, base(MESSAGES), None, stream=stream)
            assert first.diagnostics is None
            found = await message(client, mutation.body(), first.id, stream=stream)
            reason = found.diagnostics and found.diagnostics.cache_miss_reason
            assert (mutation.name, reason and reason.type) == (mutation.name, mutation.reason)
            if reason and reason.type in ("system_changed", "tools_changed"):
                assert reason.cache_missed_input_tokens > 500
        new = {"model": "local", **MESSAGES.ask([user(8, 300)], [])}
        unknown = await message(client, new, "msg_unknown", stream=stream)
        assert unknown.diagnostics.cache_miss_reason.type == "previous_message_not_found"
        raw = await rig.post(MESSAGES.path, {**base(MESSAGES), "max_tokens": 2})
        assert "diagnostics" not in raw and raw["usage"]["cache_creation_input_tokens"] >= 0


async def test_what_a_stabilizer_has_mended_is_no_divergence(start_rig: StartRig) -> None:
    (mutation,) = (m for m in OF_MESSAGES if m.name == "tools in another order")
    async with start_rig("hybrid", idle_save_seconds=3600.0) as rig, anthropic_of(rig) as client:
        first = await message(client, base(MESSAGES), None, stream=False)
        found = await message(client, mutation.body(), first.id, stream=False)
        assert found.diagnostics is None and found.usage.cache_read_input_tokens > 3000


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_responses_are_told_what_changed_since_the_response_that_they_name(
    start_rig: StartRig, stream: bool
) -> None:
    async with start_rig("hybrid", **AS_SENT) as rig, openai_of(rig) as client:
        names = (*(IN_STREAM if stream else LIVE), "instructions")
        for mutation in [m for m in OF_RESPONSES if m.name in names]:
            first = await response(client, base(RESPONSES), None, stream=stream)
            assert first.prompt_cache_diagnostics is None
            found = await response(client, mutation.body(), first.id, stream=stream)
            told = found.prompt_cache_diagnostics
            if mutation.reason is None:
                assert told.type == "cache_hit", mutation.name
                continue
            assert (told.type, told.reason) == ("cache_miss", mutation.reason), mutation.name
            n_input = first.usage.input_tokens
            assert told.cache_missed_tokens <= told.comparison_reusable_tokens <= n_input
        new = {"model": "local", **RESPONSES.ask([user(8, 300)], [])}
        unknown = await response(client, new, "resp_unknown", stream=stream)
        assert unknown.prompt_cache_diagnostics.type == "comparison_response_not_found"


async def test_every_reply_says_in_a_header_what_is_reused(start_rig: StartRig) -> None:
    async def header(path: str, messages: list[Any], **fields: Any) -> str:
        body = {"messages": messages, "max_tokens": 2, "temperature": 0, **fields}
        async with rig.client.post(rig.base_url + path, json=body) as reply:
            assert reply.status == 200
            await reply.read()
        await rig.accounted()
        return str(reply.headers["X-Prefix-Cache"])

    async with start_rig("hybrid", **AS_SENT) as rig:
        chat, first = "/v1/chat/completions", [user(1, 400)]
        new = await header(chat, first)
        assert new.startswith("reused=0 evaluated=") and new.endswith("cause=first-sight")
        for stream in (False, True):
            again = await header(chat, first, stream=stream)
            assert again.endswith("cause=hit") and not again.startswith("reused=0 ")
        edited = [{**first[0], "content": prose(5, 20) + first[0]["content"]}]
        assert "cause=" in await header(chat, edited)
        image = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert await header(chat, image, n=2) == "cause=not-looked-up"
        async with rig.client.get(rig.base_url + "/v1/models") as reply:
            assert "X-Prefix-Cache" not in reply.headers
