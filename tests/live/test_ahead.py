"""What the next prompt begins with is evaluated while nothing else runs, on a real llama-server."""

import asyncio
from typing import Any

import pytest

from proxy.core.messages import Kind
from proxy.servers import background
from tests.lab.conversation import prose, system, tool_call, tool_result, tools, user
from tests.lab.models import TEMPLATE_FOLDER
from tests.lab.rig import Rig
from tests.lab.waiting import HANG_SECONDS, until
from tests.live.conftest import ONE_KIND, StartRig

THINKING = ("--chat-template-file", str(TEMPLATE_FOLDER / "thinking.jinja"))
SLACK_TOKENS = 64
N_REQUESTS = 4
"""Of the work that every test begins with."""


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(background, "_WORTH_SECONDS", 0.05)  # tiny models are quick


async def ask(rig: Rig, messages: list[Any], session: str = "one") -> dict[str, Any]:
    body = {"messages": messages, "tools": tools(2), "max_tokens": 4, "temperature": 0}
    headers = {"X-Session-Id": session}
    return await rig.post("/v1/chat/completions", body, headers=headers)


async def work(rig: Rig) -> list[Any]:
    """Have three steps of a tool loop with reasoning; return the messages with the answer."""
    messages = [system(300), user(1, 50)]
    await ask(rig, messages)
    for step in range(3):
        call = tool_call(step) | {"reasoning_content": prose(80 + step, 40)}
        messages += [call, tool_result(step, 200)]
        reply = await ask(rig, messages)
    said = reply["choices"][0]["message"].get("content") or ""
    return [*messages, {"role": "assistant", "content": said}]


async def requests(rig: Rig) -> list[dict[str, Any]]:
    async with rig.client.get(rig.admin_url + "/requests") as reply:
        return list((await reply.json())["requests"])


async def records(rig: Rig) -> list[dict[str, Any]]:
    return [r for r in await requests(rig) if r["kind"] == "evaluated ahead"]


@ONE_KIND
async def test_next_message_finds_its_turn_evaluated(start_rig: StartRig, kind: str) -> None:
    async with start_rig(kind, extra_args=THINKING, ahead_seconds=600.0) as rig:
        messages = await work(rig)

        async def is_ahead() -> bool:
            """Whether it is the last that was done."""
            last = (await requests(rig))[0]
            return last["kind"] == "evaluated ahead" and int(last["evaluated"]) > 5 * SLACK_TOKENS

        await until(is_ahead)
        before = await rig.evaluated()
        reply = await ask(rig, [*messages, user(2, 30)])
        usage = reply["usage"]
        n_evaluated = await rig.evaluated() - before
        # Its own words, and what the template writes around them.
        assert n_evaluated <= SLACK_TOKENS + 3 * 30 + 4, usage
        plain = {"messages": [*messages, user(2, 30)], "tools": tools(2), "max_tokens": 4}
        url = rig.server.base_url + "/v1/chat/completions"
        alone = plain | {"temperature": 0, "cache_prompt": False}
        async with rig.client.post(url, json=alone) as answer:
            assert (await answer.json())["choices"] == reply["choices"]


async def test_requests_come_first(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second piece is never begun, for another session's request has come meanwhile."""
    monkeypatch.setattr(background, "_PIECE_SECONDS", 0.0)
    async with start_rig("hybrid", extra_args=THINKING, ahead_seconds=600.0) as rig:
        (process,) = rig.running.pool.processes
        stop, begun, may_end = process.stop, asyncio.Event(), asyncio.Event()

        async def slow_stop(*arguments: Any) -> Any:
            timings = await stop(*arguments)
            ended = [r for r in rig.running.shared.journal.latest(20) if r.kind is not Kind.AHEAD]
            if len(ended) == N_REQUESTS and not arguments[1].conversation:
                begun.set()
                await may_end.wait()
            return timings

        monkeypatch.setattr(process, "stop", slow_stop)
        messages = await work(rig)
        async with asyncio.timeout(HANG_SECONDS):
            await begun.wait()
        n_before = len(await records(rig))
        await ask(rig, [system(300), user(5)], "two")
        may_end.set()

        async def is_told() -> bool:
            return len(await records(rig)) > n_before

        await until(is_told)
        assert (await records(rig))[0]["evaluated"] <= 128
        await ask(rig, [*messages, user(2, 30)])


async def test_nothing_is_evaluated_for_which_llama_server_would_empty_another_slot(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*THINKING, "--kv-unified")
    async with start_rig("hybrid", extra_args=arguments, ahead_seconds=600.0) as rig:
        await ask(rig, [system(300), user(5, 200)], "two")
        (process,) = rig.running.pool.processes
        read_next, n_before = process.reader.read_next, list[int]()

        async def read(*arguments: Any) -> Any:
            tokens = await read_next(*arguments)
            done = rig.running.shared.journal.latest(20)
            ahead = sum(r.kind is Kind.AHEAD for r in done)
            if len(done) - ahead == 1 + N_REQUESTS:
                process.n_ctx, process.has_run_out_of_cells = len(tokens) + 1, True
                n_before.append(ahead)
            return tokens

        monkeypatch.setattr(process.reader, "read_next", read)
        await work(rig)
        ahead = rig.running.pool.ahead
        await until(lambda: bool(n_before) and (not ahead._waiting or ahead._waiting.done()))
        await until(lambda: not ahead._evaluating)
        assert len(await records(rig)) == n_before[0]
