"""Everything that is not a cached generation passes through as llama-server sent it."""

import asyncio
import io
import json
import re
from typing import Any

import aiohttp
import pytest

from tests.lab.rig import Rig
from tests.lab.run import slots_in
from tests.live.conftest import StartRig

# A proxy may add Date; Keep-Alive and Connection belong to one hop.
HOP_HEADERS = {"Date", "Keep-Alive", "Connection", "Transfer-Encoding"}

REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/", None),
    ("GET", "/health", None),
    ("GET", "/props", None),
    ("GET", "/v1/models", None),
    ("GET", "/slots", None),
    ("GET", "/no/such/path?with=query&and=%2Fslash", None),
    ("GET", "/no/such%0Apath", None),
    ("DELETE", "/v1/models", None),
    ("HEAD", "/", None),
    ("HEAD", "/health", None),
    ("OPTIONS", "/v1/chat/completions", None),
    ("POST", "/tokenize", b'{"content": "hello world", "with_pieces": true}'),
    ("POST", "/tokenize", b"{not json"),
    ("POST", "/detokenize", b'{"tokens": [300, 301]}'),
    ("POST", "/v1/chat/completions", b"{not json"),
    ("POST", "/v1/chat/completions", b'{"messages": "wrong"}'),
    ("POST", "/v1/chat/completions", b"{}"),
    ("POST", "/completion", b'{"prompt": []}'),
    ("POST", "/v1/embeddings", b'{"input": "text"}'),
    ("POST", "/props", b"{}"),
]


async def fetch(
    client: aiohttp.ClientSession, base_url: str, method: str, path: str, body: Any
) -> tuple[int, dict[str, str], bytes]:
    async with client.request(
        method, base_url + path, data=body, headers={"Content-Type": "application/json"}
    ) as reply:
        headers = {k: v for k, v in reply.headers.items() if k not in HOP_HEADERS}
        return reply.status, headers, await reply.read()


@pytest.fixture
async def rig(start_rig: StartRig) -> Any:
    async with start_rig("hybrid") as rig:
        yield rig


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
async def test_request_through_proxy_equals_direct_one(
    lasting_rig: Rig, method: str, path: str, body: Any
) -> None:
    rig = lasting_rig

    async def ask(base_url: str) -> Any:
        status, headers, content = await fetch(rig.client, base_url, method, path, body)
        return status, headers, re.sub(rb'"created":\d+', b'"created":0', content)

    assert await ask(rig.base_url) == await ask(rig.server.base_url)


@pytest.mark.asyncio(loop_scope="module")
async def test_large_upload_reaches_llama_server_whole(lasting_rig: Rig) -> None:
    rig, text = lasting_rig, "word " * 250_000
    body = io.BytesIO(json.dumps({"content": text}).encode())
    async with rig.client.post(rig.base_url + "/tokenize", data=body) as reply:
        n_through = len((await reply.json())["tokens"])
    _, direct = await asyncio.to_thread(rig.server.request, "POST", "/tokenize", {"content": text})
    assert n_through == len(direct["tokens"]) > 200_000


async def test_stream_is_relayed_while_llama_server_goes_on(rig: Rig) -> None:
    body = {
        "messages": [{"role": "user", "content": "go on"}],
        "stream": True,
        "max_tokens": 20000,
        "ignore_eos": True,
    }
    async with rig.client.post(rig.base_url + "/v1/chat/completions", json=body) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        for _ in range(5):
            await reply.content.readany()
            _, slots = await asyncio.to_thread(rig.server.request, "GET", "/slots")
            assert [slot["is_processing"] for slot in slots].count(True) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "def main():"}),
        ("/completion", {"prompt": "def main():"}),
        ("/completion", {"prompt": [300, 301, 302, 303]}),
        ("/completion", {"prompt": [300, "and text", 301]}),
        ("/completion", {"prompt": [(1 << 32) + 300, 301]}),  # llama-server reads 32 bits of each
        ("/completion", {"prompt": "def main():", "response_fields": ["content", "timings"]}),
        ("/completion", {"prompt": "def main():", "response_fields": ["tokens_predicted"]}),
        ("/infill", {"input_prefix": "def f(", "input_suffix": "return"}),
        ("/infill", {"input_prefix": "def f(", "input_suffix": "", "response_fields": ["content"]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
async def test_generation_through_proxy_has_the_direct_answer(
    rig: Rig, path: str, fields: dict[str, Any], stream: bool
) -> None:
    body = {**fields, "stream": stream, "max_tokens": 12, "n_predict": 12, "temperature": 0}
    async with rig.client.post(rig.server.base_url + path, json=body) as reply:
        direct = reply.status, reply.headers["Content-Type"], text_of(await reply.text())
    async with rig.client.post(rig.base_url + path, json=body) as reply:
        proxied = reply.status, reply.headers["Content-Type"], text_of(await reply.text())
    assert proxied == direct
    await rig.settled()
    assert rig.n_faults() == 0


def text_of(answer: str) -> list[str]:
    """Return the events and parts of an answer that are not ids, times or counts of what was reused."""
    words = ('"content":"', '"text":"', '"delta":"', '"reasoning_content":"', '"thinking":"')
    pattern = "data:|" + "|".join(re.escape(word) + r'(?:[^"\\]|\\.)*"' for word in words)
    return re.findall(pattern, answer)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "path", ["/slots/0?action=erase", "/slots/0?action=save", "/lora-adapters"]
)
async def test_request_that_changes_server_state_is_refused(lasting_rig: Rig, path: str) -> None:
    page, url = {"Origin": "http://page.example"}, lasting_rig.base_url + path
    async with lasting_rig.client.post(url, json={}, headers=page) as reply:
        error = (await reply.json())["error"]
        assert reply.headers["Access-Control-Allow-Origin"] == page["Origin"], (
            "its page may read it"
        )
        assert (reply.status, error["code"], error["src"]) == (403, 403, "llama-prefix-cache")
        assert "behind the cache's back" in error["message"]


async def test_n_completions_take_slots_and_leave_them_unknown(rig: Rig) -> None:
    reply = await rig.chat([{"role": "user", "content": "hello"}], n=2)
    assert len(reply["choices"]) == 2
    await rig.settled()
    assert "leased" not in slots_in(await rig.health())


async def test_messages_requests_at_once_leave_the_table_true(rig: Rig) -> None:
    """llama-server chooses the slot of /v1/messages: the proxy must find out which."""

    async def ask(i: int) -> None:
        messages = [{"role": "user", "content": f"question {i} " * 60}]
        await rig.post("/v1/messages", {"messages": messages, "max_tokens": 8})

    chats = (rig.chat([{"role": "user", "content": f"{i} " * 400}]) for i in range(4))
    await asyncio.gather(*(ask(i) for i in range(6)), *chats)
    await rig.settled()
    table = rig.running.server.process.queue.table  # type: ignore[union-attr]
    assert not any(slot.is_leased for slot in table)
    assert rig.sample("drift_total") == 0
