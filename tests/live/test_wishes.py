"""What one request may ask of the cache, on a real llama-server: to store or read nothing, to warm."""

from typing import Any
from unittest.mock import AsyncMock

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from proxy.errors import UpstreamUnreachable
from tests.lab.apis import CHAT, MESSAGES, RESPONSES, Api
from tests.lab.conversation import answer, system, tools, user
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import StartRig, in_long

Body = dict[str, Any]
FIRST = [system(300), user(1, 300)]
NEXT = [*FIRST, answer(1), user(2, 100)]
APIS = pytest.mark.parametrize(
    "api", [MESSAGES, *in_long(CHAT, RESPONSES)], ids=lambda api: api.path
)


async def n_cached(rig: Rig, api: Api, messages: list[Any], **more: Any) -> tuple[int, int]:
    """Ask, and return how many tokens were reused, and how many the prompt has."""
    headers = more.pop("headers", {})
    body = api.ask(messages, tools(1), **api.limit(2), **more)
    async with rig.client.post(rig.base_url + api.path, json=body, headers=headers) as reply:
        usage = api.read(await reply.read())
    await rig.accounted()
    return usage.n_cached, usage.n_prompt


@APIS
async def test_request_that_is_not_to_be_stored_leaves_no_state_but_is_gone_on_with(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, api: Api
) -> None:
    async with start_rig("hybrid", n_slots=1) as rig:
        store = rig.running.pool.processes[0].store
        for wish in ({"cache": {"no_store": True}}, {"cache": {"no-store": True}}):
            await n_cached(rig, api, FIRST, **wish)
            reused, n_prompt = await n_cached(rig, api, NEXT, **wish)
            assert reused > n_prompt / 2
        await n_cached(rig, api, NEXT, headers={"X-Prefix-Cache": "no-store"})
        left = api.ask(NEXT, [], stream=True, **api.limit(500), cache={"no_store": True})
        async with rig.client.post(rig.base_url + api.path, json=left) as reply:
            await reply.content.readany()
        await n_cached(rig, api, [user(77, 200)], cache={"no_store": True})  # takes the slot
        await rig.settled()
        server = rig.running.pool.servers[0]
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(server.upstream, "props", AsyncMock(side_effect=UpstreamUnreachable))
            await until(lambda: server.process is None)
        await until(lambda: server.process)  # the same one, met again
        assert len(store) == 0
        await rig.restart()
        assert len(rig.running.pool.processes[0].store) == 0
        await n_cached(rig, api, FIRST)
        await rig.settled()
        assert len(rig.running.pool.processes[0].store) > 0


@APIS
async def test_request_that_is_to_read_nothing_is_evaluated_whole_and_kept(
    start_rig: StartRig, api: Api
) -> None:
    async with start_rig("hybrid", n_slots=2) as rig:
        for wish in (
            *({"cache": {"no_read": True}}, {"cache": {"no-cache": True}}),
            {"headers": {"X-Prefix-Cache": "no-read"}},
        ):
            await n_cached(rig, api, FIRST)
            await rig.settled()
            assert (await n_cached(rig, api, FIRST, **wish))[0] == 0, wish
            await rig.settled()  # clients have their answers a moment before they are recorded
            async with rig.client.get(rig.admin_url + "/requests/last") as reply:
                record = (await reply.json())["request"]
            assert (record["cause"], record["why"]) == (
                *("not looked up", "the client asks for no_read"),
            )
            rates = rig.running.pool.processes[0].rates
            assert record["expected_seconds"] > rates.evaluation_seconds(0, record["n_prompt"]) / 2
            reused, n_prompt = await n_cached(rig, api, NEXT)
            assert reused > n_prompt / 2
        assert rig.sample("drift_total") == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_message_that_only_warms_is_evaluated_saved_and_empty(
    start_rig: StartRig, stream: bool
) -> None:
    async with start_rig("hybrid", idle_save_seconds=3600.0) as rig:
        client = AsyncAnthropic(base_url=rig.base_url, api_key="none", max_retries=0)
        body = {"model": "local", **MESSAGES.body(FIRST, tools(1)), "max_tokens": 0}
        if stream:
            async with client.messages.stream(**body) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**body)
        assert message.stop_reason == "max_tokens" and (stream or message.content == [])
        assert message.usage.output_tokens == stream and message.usage.input_tokens > 0
        await rig.accounted()
        await rig.settled()
        await rig.restart()
        reused, n_prompt = await n_cached(rig, MESSAGES, FIRST)
        assert reused >= n_prompt - 32
        await client.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_response_that_only_warms_is_evaluated_saved_and_empty(
    start_rig: StartRig, stream: bool
) -> None:
    async with start_rig("hybrid", idle_save_seconds=3600.0) as rig:
        client = AsyncOpenAI(base_url=rig.base_url + "/v1", api_key="none", max_retries=0)
        body: Body = {"model": "local", **RESPONSES.body(FIRST, tools(1))}
        body["prompt_cache_options"] = {"prewarm": True}
        if stream:
            async with client.responses.stream(**body) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(**body)  # type: ignore[assignment]
        assert stream or (response.output, response.status) == ([], "completed")
        assert response.usage is not None and response.usage.output_tokens == stream
        assert response.usage.total_tokens == response.usage.input_tokens + stream > 1
        await rig.accounted()
        await rig.settled()
        await rig.restart()
        reused, n_prompt = await n_cached(rig, RESPONSES, FIRST)
        assert reused >= n_prompt - 32
        await client.close()
