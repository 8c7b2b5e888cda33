"""llama-server's resumable streams: the proxy passes them, and the slot is leased until it is idle."""

import json
from typing import Any

import pytest

from proxy.core.slots import Known
from tests.lab.conversation import answer, system, user
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import StartRig

MESSAGES = [system(200), user(1, 150)]
N_TOKENS = 400
CONVERSATION = {"X-Conversation-Id": "conversation-1"}


def text_of(stream: bytes) -> str:
    """Return what the events of a chat's stream say together."""
    said = ""
    for line in stream.decode(errors="replace").splitlines():
        if line.startswith("data: {"):
            choices = json.loads(line[6:]).get("choices") or [{}]
            said += (choices[0].get("delta") or {}).get("content") or ""
    return said


def body(messages: list[Any], **fields: Any) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "stream": True, **fields}


async def whole(rig: Rig, base_url: str) -> str:
    """Return an answer that is read to its end."""
    asked = body(MESSAGES, max_tokens=N_TOKENS, ignore_eos=True)
    async with rig.client.post(f"{base_url}/v1/chat/completions", json=asked) as reply:
        return text_of(await reply.read())


@pytest.mark.parametrize("n_slots", [1, 2])
async def test_rest_of_an_answer_is_read_by_whoever_comes_back(
    start_rig: StartRig, n_slots: int
) -> None:
    async with start_rig("hybrid", n_slots=n_slots, idle_save_seconds=3600.0) as rig:
        expected = await whole(rig, rig.base_url)
        process = rig.running.pool.processes[0]
        slots = process.slots
        asked = body(MESSAGES, max_tokens=N_TOKENS, ignore_eos=True)
        url = rig.base_url + "/v1/chat/completions"
        async with rig.client.post(url, json=asked, headers=CONVERSATION) as reply:
            await reply.content.readany()
        query = "/v1/stream?conv_id=" + CONVERSATION["X-Conversation-Id"]
        async with rig.client.get(rig.base_url + query) as reply:
            assert reply.status == 200, await reply.read()
            assert text_of(await reply.read()) == expected
        # The saved file tells what the slot holds.
        await until(
            lambda: not any(slot.is_leased for slot in slots) and not process.saves.under_way
        )
        held = max((s.content for s in slots if isinstance(s.content, Known)), key=_n_tokens)
        assert held.n_tokens > N_TOKENS  # what was generated for nobody is there, too
        usage = (await rig.chat([*MESSAGES, answer(1), user(2)]))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.5 * usage["prompt_tokens"]
        assert rig.sample("drift_total") == 0


async def test_answer_that_a_client_stops_ends_as_at_llama_server(start_rig: StartRig) -> None:
    """llama-server ends it without [DONE], and has not gone away."""
    async with start_rig("hybrid", idle_save_seconds=3600.0) as rig:
        url, query = rig.base_url, "/v1/stream?conv_id=" + CONVERSATION["X-Conversation-Id"]
        asked = body(MESSAGES, max_tokens=20_000, ignore_eos=True)
        async with rig.client.post(
            f"{url}/v1/chat/completions", json=asked, headers=CONVERSATION
        ) as reply:
            await reply.content.readany()
            async with rig.client.delete(url + query) as stopped:
                assert stopped.status == 204
            assert b'"error"' not in await reply.read()
        usage = (await rig.chat([*MESSAGES, answer(1), user(2)]))["usage"]
        assert rig.sample("unanswered_requests_total", reason="llama-server gone") == 0
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.5 * usage["prompt_tokens"]


def _n_tokens(content: Known) -> int:
    return content.n_tokens
