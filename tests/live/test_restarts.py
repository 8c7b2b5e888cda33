"""llama-server is killed with requests in flight and in the queue: the queue is served by the next one."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import gguf
import pytest

from proxy import app
from proxy.llama.client import LlamaServer
from proxy.servers import background
from tests.lab.conversation import agent_requests, system, tool_call, tool_result, tools, user
from tests.lab.models import least_model
from tests.lab.page_cache import can_tell, folder_on_disk, forget
from tests.lab.raw_client import RawClient
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import StartRig, in_long

TOOLS = tools(2)
CHAT = "/v1/chat/completions"
ENDLESS = {"max_tokens": 50_000, "ignore_eos": True}
CANARY_TOKENS = 128
SLACK_TOKENS = 32
CONVERSATIONS = [
    agent_requests(2, 1, header=[system(150 + 50 * i)], seed=100 * i) for i in range(2)
]


def body(conversation: int, index: int) -> dict[str, Any]:
    messages = CONVERSATIONS[conversation][index]
    return {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 12}


async def begin_endless_stream(rig: Rig) -> "asyncio.Task[bytes]":
    """Have the only slot used by a stream that does not end; return what the client will have read."""
    began = asyncio.Event()

    async def read() -> bytes:
        seen = b""
        endless = {"messages": CONVERSATIONS[0][0], "stream": True, **ENDLESS}
        async with rig.client.post(rig.base_url + CHAT, json=endless) as reply:
            async for chunk in reply.content.iter_any():
                seen += chunk
                began.set()
        return seen

    task = asyncio.ensure_future(read())
    await began.wait()
    return task


async def await_waiting(rig: Rig, n_requests: int) -> None:
    await until(lambda: rig.running.server.n_queued == n_requests)


async def queue(rig: Rig, *which: tuple[int, int]) -> list["asyncio.Task[dict[str, Any]]"]:
    """Send requests that find the slot in use or llama-server gone, one after the other."""
    asked = []
    for conversation, index in which:
        n_waiting = rig.running.server.n_queued
        asked.append(asyncio.ensure_future(rig.post(CHAT, body(conversation, index))))
        await await_waiting(rig, n_waiting + 1)
    return asked


def cold(rig: Rig, conversation: int, index: int) -> dict[str, Any]:
    """Return llama-server's own answer to a request, nothing reused."""
    alone = {**body(conversation, index), "cache_prompt": False}
    return dict(rig.server.request("POST", CHAT, alone)[1])


async def kill(rig: Rig, stream: "asyncio.Task[bytes]") -> None:
    """Kill llama-server in mid-stream; the stream must say so, and who waited for the slot waits for it."""
    n_waiting = rig.running.server.n_queued
    await asyncio.to_thread(rig.server.kill)
    assert b"llama-server went away" in (await stream).splitlines()[-2]
    await until(lambda: rig.running.server.process is None)
    await await_waiting(rig, n_waiting)


def text_of(stream: bytes) -> str:
    events = (json.loads(line[5:]) for line in stream.split(b"\n\n") if line.startswith(b"data: {"))
    return "".join(event["content"] for event in events)


def slots_of(rig: Rig) -> list[dict[str, Any]]:
    return list(rig.server.request("GET", "/slots")[1])


async def test_queue_outlives_the_server_and_its_states_are_restored(start_rig: StartRig) -> None:
    async with start_rig("hybrid", n_slots=1) as rig:
        for conversation in (0, 1):
            await rig.post(CHAT, body(conversation, 0))
            await rig.settled()
        stream = await begin_endless_stream(rig)
        asked = await queue(rig, (0, 1), (1, 1))
        await kill(rig, stream)
        asked += await queue(rig, (0, 2))
        assert (await rig.health())["n_waiting"] == 3
        await asyncio.to_thread(rig.server.start)
        replies = await asyncio.gather(*asked)
        n_evaluated = await rig.evaluated()
        assert rig.sample("restores_total", result="done") >= 2
        assert rig.sample("unanswered_requests_total", reason="llama-server gone") == 1
        alone = [cold(rig, *which) for which in ((0, 1), (1, 1), (0, 2))]
        for reply, expected in zip(replies, alone, strict=True):
            assert reply["choices"] == expected["choices"]
            n_new = reply["usage"]["prompt_tokens"] - reply["timings"]["cache_n"]
            assert n_new < expected["timings"]["prompt_n"] / 3
        n_whole = sum(expected["timings"]["prompt_n"] for expected in alone)
        assert n_evaluated < n_whole / 3 + CANARY_TOKENS


async def test_server_that_dies_after_the_first_of_several_completions_is_told_of(
    start_rig: StartRig,
) -> None:
    """The client must not take the half of the second one for all of it; its connection goes on."""
    async with start_rig("hybrid", n_ctx=2048) as rig:
        # The first prompt soon fills the context of its slot.
        prompts = [random.Random(n).choices(range(100, 3000), k=n) for n in (1000, 100)]
        several = {"prompt": prompts, "n_predict": 900, "stream": True, "ignore_eos": True}
        with RawClient(rig.base_url, "/completion", several) as client:
            while b'"stop":true' not in client.answer:
                await client.read(1 << 16)
            await asyncio.to_thread(rig.server.kill)
            seen = await client.read_to_end()
            assert seen.count(b'"stop":true') == 1
            assert b"llama-server went away" in seen.splitlines()[-2]
            await until(lambda: rig.running.server.process is None)
            client.ask()
            await await_waiting(rig, 1)
            await asyncio.to_thread(rig.server.start)
            assert (await client.read_to_end()).count(b'"stop":true') == 2
        await rig.settled()
        assert rig.sample("unanswered_requests_total", reason="llama-server gone") == 1
        assert not (await rig.health())["reasons"]


async def test_server_that_dies_between_two_requests_of_a_connection_leaves_it_open(
    start_rig: StartRig,
) -> None:
    async with start_rig("hybrid") as rig:
        asked = {"prompt": "tell me more " * 60, "n_predict": 12, "temperature": 0, "stream": True}
        with RawClient(rig.base_url, "/completion", asked) as client:
            first = await client.read_to_end()
            await rig.settled()
            await asyncio.to_thread(rig.server.kill)
            client.ask()
            await await_waiting(rig, 1)
            await asyncio.to_thread(rig.server.start)
            second = await client.read_to_end()
        assert text_of(first) == text_of(second) != ""
        assert rig.sample("restores_total", result="done") == 1
        await rig.settled()
        assert not (await rig.health())["reasons"]


async def test_other_model_on_the_same_port_has_states_of_its_own(start_rig: StartRig) -> None:
    async with start_rig("hybrid", n_slots=1) as rig:
        await rig.post(CHAT, body(0, 0))
        await rig.settled()
        first = rig.server.model
        stream = await begin_endless_stream(rig)
        asked = await queue(rig, (0, 1))
        await kill(rig, stream)
        n_reused = rig.sample("prompt_tokens_total", source="reused")
        rig.server.model = least_model("full")
        await asyncio.to_thread(rig.server.start)
        (reply,) = await asyncio.gather(*asked)
        assert rig.sample("restores_total", result="done") == 0
        assert rig.sample("prompt_tokens_total", source="reused") == n_reused
        await rig.settled()
        assert (await rig.health())["servers"][0]["rule"] == "any prefix"
        assert reply["choices"] == cold(rig, 0, 1)["choices"]
        await rig.post(CHAT, body(0, 1))  # the direct request is not the proxy's to know of
        await rig.settled()

        stream = await begin_endless_stream(rig)
        asked = await queue(rig, (0, 1))
        await kill(rig, stream)
        rig.server.model = first
        await asyncio.to_thread(rig.server.start)
        (reply,) = await asyncio.gather(*asked)
        assert rig.sample("restores_total", result="done") >= 1
        n_new = reply["usage"]["prompt_tokens"] - reply["timings"]["cache_n"]
        assert n_new < reply["usage"]["prompt_tokens"] / 3
        await rig.settled()
        assert (await rig.health())["servers"][0]["rule"] == "restore points"
        assert reply["choices"] == cold(rig, 0, 1)["choices"]


async def test_client_that_leaves_while_the_server_is_away_frees_its_place(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_REQUESTS", 3)
    async with start_rig("hybrid", n_slots=1) as rig:
        stream = await begin_endless_stream(rig)
        asked = await queue(rig, (0, 1))
        async with aiohttp.ClientSession() as leaver:
            url = rig.base_url + CHAT
            leaving = [asyncio.ensure_future(leaver.post(url, json=body(1, 1)))]
            await await_waiting(rig, 2)
            await kill(rig, stream)
            leaving.append(asyncio.ensure_future(leaver.post(url, json=body(1, 0))))
            await await_waiting(rig, 3)
            async with rig.client.post(url, json=body(0, 0)) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "2")
                await refused.read()
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
        await until(lambda: len(rig.running.shared.journal.in_flight) == 1)
        asked += await queue(rig, (1, 1))
        await asyncio.to_thread(rig.server.start)
        assert [reply["object"] for reply in await asyncio.gather(*asked)] == [
            "chat.completion"
        ] * 2
        await rig.settled()
        assert rig.sample("unanswered_requests_total", reason="client left") == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_server_that_is_told_to_end_does_not_wait_for_clients_it_will_not_answer(
    start_rig: StartRig, stream: bool
) -> None:
    async with start_rig("hybrid", n_slots=2) as rig:

        async def ask(**fields: Any) -> tuple[int, bytes]:
            async with rig.client.post(rig.base_url + CHAT, json={**body(0, 0), **fields}) as reply:
                return reply.status, await reply.read()

        def is_answering(slot: dict[str, Any]) -> bool:
            return any(generation["n_decoded"] > 12 for generation in slot.get("next_token", ()))

        # Nothing as short is ever restored: a request with a restored state would be sent again.
        endless: dict[str, Any] = {"tools": [], "stream": stream, **ENDLESS}
        running = [asyncio.ensure_future(ask(messages=[user(n)], **endless)) for n in range(2)]
        await until(lambda: all(map(is_answering, slots_of(rig))))
        waiting = asyncio.ensure_future(ask())
        await await_waiting(rig, 1)
        # Now and then it goes on taking connections without answering, and has to be killed.
        ending = asyncio.ensure_future(asyncio.to_thread(rig.server.stop, 15.0))
        for status, content in await asyncio.gather(*running):
            assert (status == 200) == stream
            assert b"llama-prefix-cache: llama-server" in content
        await ending
        await asyncio.to_thread(rig.server.start)
        assert (await waiting)[0] == 200


@pytest.mark.parametrize("kind", ["full", *in_long("swa", "recurrent", "hybrid")])
async def test_disk_is_timed_before_a_request_needs_it(
    kind: str, start_rig: StartRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LEAST_TIMED_BYTES", 64 << 10)
    with folder_on_disk() as directory:
        (tmp_path / "slots").symlink_to(directory)
        async with start_rig(kind) as rig:
            await rig.post(CHAT, body(0, 0))
            await rig.settled()
            await rig.stop_proxy()
            for path in directory.glob("*.state"):
                if not can_tell(path):
                    pytest.skip("the kernel does not say what its page cache has")
                forget(path)
            await rig.start_proxy()
            [process] = rig.running.pool.processes
            await until(lambda: process.rates.cold_restore.bytes_per_second > 0)
            assert not process.rates.warm_restore.bytes_per_second, "nothing was restored"


@pytest.mark.parametrize("kind", ["full", "hybrid", *in_long("swa", "recurrent")])
async def test_conversation_that_is_sent_again_from_its_beginning_finds_its_file_at_each_turn(
    start_rig: StartRig, kind: str
) -> None:
    async with start_rig(kind, n_slots=1) as rig:

        async def ask(seed: int) -> list[int]:
            """Send four steps of a tool loop; return how many tokens each evaluates."""
            messages, n_evaluated = [system(300, seed), user(seed, 50)], list[int]()
            for step in range(4):
                body = {"messages": messages, "tools": tools(2), "max_tokens": 4, "temperature": 0}
                reply = await rig.post("/v1/chat/completions", body)
                n_evaluated.append(reply["timings"]["prompt_n"])
                messages += [tool_call(seed + step), tool_result(seed + step, 300)]
            await rig.settled()
            return n_evaluated

        first = await ask(1)
        await ask(100)
        again = await ask(1)
        assert first[-1] > 300 and again[-1] < 100
        assert kind != "full" or max(again) < 100


def with_another_layer(model: bytes) -> bytes:
    """Return a model of the same shape that computes other values, as another fine-tune does."""
    reader = gguf.GGUFReader(least_model("full"))
    values = next(t for t in reader.tensors if t.name == "blk.0.attn_v.weight")
    begin, end = int(values.data_offset), int(values.data_offset + values.n_bytes)
    turned = model[begin + values.n_bytes // 2 : end] + model[begin : end - values.n_bytes // 2]
    return model[:begin] + turned + model[end:]


async def test_model_that_is_replaced_between_two_looks_gets_no_state_of_the_other(
    start_rig: StartRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model is loaded in less than the second between two looks."""
    monkeypatch.setattr("proxy.servers.server.WATCH_SECONDS", 1e6)
    other = tmp_path / "other.gguf"
    async with start_rig("full", n_slots=1) as rig:
        other.write_bytes(with_another_layer(rig.server.model.read_bytes()))
        for conversation in (0, 1):
            await rig.post(CHAT, body(conversation, 0))
            await rig.settled()
        restore = LlamaServer.restore

        async def restore_into_another(*given: Any) -> Any:
            monkeypatch.setattr(LlamaServer, "restore", restore)
            await asyncio.to_thread(rig.server.kill)
            rig.server.model = other
            await asyncio.to_thread(rig.server.start)
            return await restore(*given)

        monkeypatch.setattr(LlamaServer, "restore", restore_into_another)
        reply = await rig.post(CHAT, body(0, 1))
        assert rig.server.model is other
        await rig.restart(server=False)  # what the slot holds is taken up as this model's
        later = await rig.post(CHAT, body(0, 2))
        assert reply["choices"] == cold(rig, 0, 1)["choices"]
        assert later["choices"] == cold(rig, 0, 2)["choices"]
