"""Requests that plainly go on with what a slot holds are sent at once, and read beside their answers."""

import asyncio
import gc
import random
from typing import Any

import pytest

from proxy.core.plan import Why
from proxy.core.tokens import Namespace
from proxy.llama.client import LlamaServer
from proxy.serving import cache, cached
from proxy.serving.cache import BRIEF
from proxy.serving.prompts import KnownTexts
from tests.lab.conversation import Message, agent_requests
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import StartRig, in_long
from tests.live.ledger import SLACK_TOKENS, TOOLS, Ledger
from tests.live.test_main_job import HEADER

N_TEXTS = 60


async def stream(rig: Rig, messages: list[Message]) -> dict[str, Any]:
    """Have a request answered as a stream; return its record."""
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 8, "stream": True}
    async with rig.client.post(rig.base_url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 200 and b"[DONE]" in await reply.read()
    await rig.accounted()
    async with rig.client.get(rig.admin_url + "/requests?limit=1") as reply:
        record: dict[str, Any] = (await reply.json())["requests"][0]
        return record


@pytest.mark.parametrize("kind", ["hybrid", *in_long("full", "swa", "recurrent")])
async def test_steps_of_a_tool_loop_are_not_read_before_they_are_sent(
    start_rig: StartRig, kind: str
) -> None:
    n_turns, n_calls = 2, 4
    async with start_rig(kind) as rig:
        ledger, why = Ledger(rig), []
        for messages in agent_requests(n_turns, n_calls, header=HEADER):
            n_new, before = await ledger.enter(messages), await rig.evaluated()
            record = await stream(rig, messages)
            assert await rig.evaluated() - before <= n_new + SLACK_TOKENS
            assert record["n_prompt"] == len(ledger.sequences[-1])
            why.append(record["why"])
        assert why.count(Why.EXTENDS.value) >= n_turns * n_calls


@pytest.mark.parametrize("idle_save_seconds", [0.1, 60.0])
@pytest.mark.parametrize("kind", ["full", *in_long("hybrid", "swa", "recurrent")])
async def test_step_behind_a_request_that_was_asked_again_is_not_read_before_it_is_sent(
    start_rig: StartRig, kind: str, idle_save_seconds: float
) -> None:
    async with start_rig(kind, idle_save_seconds=idle_save_seconds) as rig:
        *steps, last = agent_requests(1, 3, header=HEADER)
        for messages in (*steps, steps[-1]):
            await stream(rig, messages)
            if idle_save_seconds < 1:
                await rig.settled()
        assert (await stream(rig, last))["why"] == Why.EXTENDS.value


@pytest.mark.parametrize("kind", ["hybrid", *in_long("full", "swa", "recurrent")])
async def test_brief_chats_are_not_looked_up_and_displace_nothing(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # On a busy machine the same chat takes so long that looking it up would pay.
    monkeypatch.setattr(cache, "_LOOKING_SECONDS", 3600.0)
    first, *_ = agent_requests(1, 1, header=HEADER)
    question = [{"role": "user", "content": "What is a prefix?"}]
    async with start_rig(kind, n_slots=2) as rig:
        await rig.chat(first, tools=TOOLS)
        answers, before = [], await rig.evaluated()
        for _ in range(3):
            answers.append((await rig.chat(question))["choices"][0]["message"]["content"])
            question = [
                *question,
                {"role": "assistant", "content": answers[-1]},
                {"role": "user", "content": "And then?"},
            ]
        n_chat = await rig.evaluated() - before
        await rig.accounted()
        async with rig.client.get(rig.admin_url + "/requests?limit=3") as reply:
            records = (await reply.json())["requests"]
        assert [record["why"] for record in records] == [BRIEF] * 3
        await rig.chat(first, tools=TOOLS)
        assert await rig.evaluated() - before - n_chat <= SLACK_TOKENS
        assert answers == await alone(rig, question[:-1])


async def test_brief_chat_that_grows_long_goes_on_in_its_slot(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_LOOKING_SECONDS", 3600.0)
    question = {"role": "user", "content": "What is a prefix? " * 30}
    answer, more = {"role": "assistant", "content": "This."}, {**question, "content": "So? " * 90}
    async with start_rig("full", n_slots=2) as rig:
        n_brief = (await rig.chat([question], max_tokens=1))["usage"]["prompt_tokens"]
        usage = (await rig.chat([question, answer, more]))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > n_brief - SLACK_TOKENS


async def test_long_text_behind_a_short_chat_displaces_no_other(start_rig: StartRig) -> None:
    """llama-server looks for a similar slot only if a tenth of a /v1/messages prompt is in it."""
    long = [{"role": "user", "content": "Of a ship. " * 400}]
    hello = {"role": "user", "content": "Hello."}
    answer = {"role": "assistant", "content": "Yes."}
    async with start_rig("full", n_slots=2, idle_save_seconds=60.0) as rig:
        for messages in (long, [hello], [hello, answer, {**hello, "content": "To a port. " * 400}]):
            await rig.post("/v1/messages", {"messages": messages, "max_tokens": 1})
        usage = (await rig.post("/v1/messages", {"messages": long, "max_tokens": 1}))["usage"]
        assert usage["cache_read_input_tokens"] > 2000
        assert (await rig.health())["state"] == "caching"


async def alone(rig: Rig, chat: list[Message]) -> list[str]:
    """Return what llama-server itself answers to each question of a chat."""
    answers, url = [], rig.server.base_url + "/v1/chat/completions"
    for n in range(1, len(chat) + 1, 2):
        body = {"messages": chat[:n], "max_tokens": 8, "temperature": 0, "cache_prompt": False}
        async with rig.client.post(url, json=body) as reply:
            answers.append((await reply.json())["choices"][0]["message"]["content"])
    return answers


@pytest.mark.parametrize("is_late", [False, True])
async def test_stream_that_a_new_process_got_is_withdrawn_and_restored(
    start_rig: StartRig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_late: bool,
) -> None:
    """Also if the stream begins so late that the proxy has seen the new process before."""
    # A tiny model's first token may come sooner than the proxy looks.
    monkeypatch.setattr(cached, "_FIRST_TOKEN_SECONDS", 0.0)
    first, second, *_ = agent_requests(1, 1, header=HEADER)
    async with start_rig("hybrid") as rig:
        await stream(rig, first)
        await rig.settled()
        old, forward = rig.running.server.process, LlamaServer.forward

        async def forward_late(upstream: LlamaServer, *request: Any) -> Any:
            answer = await forward(upstream, *request)
            if "/v1/chat/completions" in request:
                await until(lambda: rig.running.server.process not in (None, old))
            return answer

        if is_late:
            monkeypatch.setattr(LlamaServer, "forward", forward_late)
        await asyncio.to_thread(rig.server.stop)
        await asyncio.to_thread(rig.server.start)
        record = await stream(rig, second)
        # What was withdrawn late may be in the new process's slot by then.
        assert record["chosen"] in ({"restore", "live"} if is_late else {"restore"})
        assert record["evaluated"] < 0.2 * record["n_prompt"]
    gc.collect()
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


async def test_known_texts_are_tokenized_as_if_they_were_whole(start_rig: StartRig) -> None:
    rng = random.Random(1)
    pieces = [
        "word",
        " ",
        "\n",
        "é",
        "日本",
        "<|im_end|>",
        "<|im_start|>",
        "<",
        "|",
        "0",
        "\t",
        "🙂",
    ]
    async with start_rig("full") as rig:
        upstream = rig.running.server.upstream
        known, messages, n_spliced, n_tails = KnownTexts(upstream), [*HEADER], 0, 0
        for _ in range(N_TEXTS):
            content = "".join(rng.choices(pieces, k=rng.randrange(1, 30)))
            keep = rng.randrange(1, len(messages) + 1) if rng.random() < 0.2 else len(messages)
            messages = [*messages[:keep], {"role": "user", "content": content}]
            text = (await rig.post("/apply-template", {"messages": messages}))["prompt"]
            whole = await upstream.tokenize(text, {}, add_special=True)
            assert await known.tokenize(text, {}, Namespace(b"")) == whole
            for tail in (text[text.rindex(content) :], text[rng.randrange(len(text)) :]):
                n_behind = known.ends.get((Namespace(b""), text), {}).get(len(tail.encode()))
                alone = await upstream.tokenize(tail, {}, add_special=False)
                if n_behind and whole[-len(alone) :] == alone:
                    n_tails += 1
                    assert n_behind == len(alone)
            n_spliced = known.n_spliced
        assert n_spliced > N_TEXTS / 2 and n_tails > N_TEXTS / 2
