"""What each request is to its conversation, on a real llama-server; and side calls displace none."""

from typing import Any

import pytest

from tests.lab.conversation import answer, prose, system, tool_call, tool_result, tools, user
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import StartRig

SESSION = {"X-Session-Id": "one"}
HEADER = [system(300)]
TITLE = [{"role": "system", "content": "Name the conversation."}, user(90, 60)]


async def ask(rig: Rig, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Send a request of one session, and return its record."""
    body = {"messages": messages, "tools": tools(2), "max_tokens": 4, "temperature": 0, **fields}
    await rig.post("/v1/chat/completions", body, headers=SESSION)
    return await last(rig)


async def last(rig: Rig) -> dict[str, Any]:
    async with rig.client.get(rig.admin_url + "/requests/last") as reply:
        return dict((await reply.json())["request"])


@pytest.mark.parametrize("n_conversations", [1, 2])
async def test_side_calls_displace_no_conversation(
    start_rig: StartRig, n_conversations: int
) -> None:
    """With as many conversations as slots but one, all of them go on live."""
    async with start_rig("hybrid", n_slots=3, idle_save_seconds=3600.0) as rig:
        conversations = [[*HEADER, user(10 * n, 200)] for n in range(n_conversations)]
        for messages in conversations:
            await ask(rig, messages)
        for step in range(1, 4):
            for number, messages in enumerate(conversations):
                title = await ask(rig, [TITLE[0], user(90 + 10 * step + number, 200)], tools=[])
                assert title["kind"] == "side call"
                messages += [answer(10 * number + step), user(10 * number + step, 100)]
                record = await ask(rig, messages)
                assert (record["kind"], record["chosen"]) == ("user turn", "live")
                assert record["cause"] == "hit"


async def test_kinds_of_requests_are_told_in_their_records(start_rig: StartRig) -> None:
    async with start_rig("hybrid", idle_save_seconds=3600.0) as rig:
        messages = [*HEADER, user(1, 200)]
        assert (await ask(rig, messages))["kind"] == "first"
        messages += [tool_call(1), tool_result(1, 50)]
        assert (await ask(rig, messages))["kind"] == "tool round trip"
        messages += [answer(1), user(2, 50)]
        left = {"messages": messages, "tools": tools(2), "max_tokens": 20_000, "stream": True}
        left["ignore_eos"] = True
        url = rig.base_url + "/v1/chat/completions"
        async with rig.client.post(url, json=left, headers=SESSION) as reply:
            await reply.content.readany()

        async def is_abandoned() -> bool:
            return str((await last(rig))["outcome"]) == "unanswered"

        await until(is_abandoned)
        assert (await last(rig))["kind"] == "user turn"
        assert (await ask(rig, messages))["kind"] == "retry"
        edited = [*messages[:-1], user(3, 50)]
        assert (await ask(rig, edited))["kind"] == "rewritten history"
        summary = {"role": "user", "content": "So far: " + prose(9, 60)}
        assert (await ask(rig, [*HEADER, summary]))["kind"] == "compaction"
        async with rig.client.get(rig.admin_url + "/requests?limit=50") as reply:
            kinds = [record["kind"] for record in (await reply.json())["requests"]]
        assert len(kinds) == 6 and "" not in kinds


async def test_explain_tells_what_each_part_of_a_prompt_costs(start_rig: StartRig) -> None:
    async with start_rig("hybrid", idle_save_seconds=3600.0) as rig:
        first = [*HEADER, user(1, 200)]
        await ask(rig, first)
        await ask(rig, [*first, answer(1), user(2, 80)])
        async with rig.client.get(rig.admin_url + "/requests/last") as reply:
            found = await reply.json()
        costs, n_prompt = found["costs"], found["request"]["n_prompt"]
        assert abs(sum(cost["n_tokens"] for cost in costs) - n_prompt) < 10
        names = [tool["function"]["name"] for tool in tools(2)]
        assert [cost["name"] for cost in costs if cost["part"] == "tools"] == names
        assert [cost["message"] for cost in costs if cost["is_changed"]] == [2, 3]
        for cost in costs[len(names) :]:
            text = [*first, answer(1), user(2, 80)][cost["message"]]["content"]
            n_tokens = len((await rig.post("/tokenize", {"content": text}))["tokens"])
            assert abs(cost["n_tokens"] - n_tokens) <= 0.25 * n_tokens + 16, (cost, n_tokens)
