"""The listener for clients: what is odd, slow or broken is answered as llama-server answers it."""

import asyncio
import os
import signal
from typing import Any

import pytest

from proxy import app
from proxy.servers import server
from proxy.web import clients, writer
from proxy.web.relay import Exchange
from tests.lab.raw_bytes import RawConnection, chat, get, post, status_of
from tests.lab.rig import Rig
from tests.lab.waiting import HANG_SECONDS, until
from tests.live.conftest import StartRig

CHAT = b"/v1/chat/completions"
_OPTIONS = b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n"

SAME = {
    "an Authorization that is no UTF-8": post(CHAT, chat(), b"Authorization: Bearer \xff\xe9\r\n"),
    "a Session-Id that is no UTF-8": post(CHAT, chat(), b"Session-Id: \xff\xe9\r\n"),
    "a User-Agent that is no UTF-8": post(CHAT, chat(), b"User-Agent: \xff\xe9\r\n"),
    "cache_prompt is a string": post(CHAT, chat(cache_prompt="x")),
    "cache_prompt is a number": post(CHAT, chat(cache_prompt=0)),
    "cache_prompt is a list": post(b"/completion", b'{"prompt": "a", "cache_prompt": []}'),
    "n_cache_reuse is a list": post(CHAT, chat(n_cache_reuse=[])),
    "cache_prompt is null": post(CHAT, chat(cache_prompt=None)),
    "a target of 20,000 bytes": get(b"/v1/models?" + b"a" * 20000),
    "a header of 20,000 bytes": get(b"/v1/models", b"X-A: " + b"a" * 20000 + b"\r\n"),
    "HTTP/2.0": get(b"/v1/models").replace(b"HTTP/1.1", b"HTTP/2.0"),
    "HTTP/1.0 without Host": b"GET /v1/models HTTP/1.0\r\n\r\n",
    "two lengths": post(CHAT, chat(), b"Content-Length: 5\r\n"),
    "two hosts": get(b"/v1/models", b"Host: other\r\n"),
    "chunks and a length": post(CHAT, chat(), b"Transfer-Encoding: chunked\r\n"),
}
DIFFERENT = {
    "the same length twice": (
        post(CHAT, chat(), b"Content-Length: %d\r\n" % len(chat())),
        200,
        400,
    ),
    "no Host": (get(b"/v1/models", host=b""), 200, 400),
    "bytes that are no ASCII in the target": (get(b"/v1/models?\xff"), 200, 400),
    "a Host that is none": (get(b"/v1/models", host=b"Host: \xff a\r\n"), 400, 200),
    "another Expect than 100-continue": (get(b"/v1/models", b"Expect: x\r\n"), 200, 417),
    "OPTIONS *": (_OPTIONS, 200, 404),
    "%u in the path": (post(b"/%u0063ompletion", chat(prompt="a")), 200, 400),
    "slots behind %u": (post(b"/%u0073lots/0?action=erase", b"{}"), 200, 400),
    "# before the query": (post(b"/completion#?", chat(prompt="a")), 200, 400),
    "adapters behind #": (post(b"/lora-adapters#?", b"[]"), 200, 400),
    "dots in the path": (get(b"/x/../v1/models"), 404, 400),
    "encoded dots in the path": (get(b"/x/%2e%2E/v1/models"), 404, 400),
    "a key twice": (post(CHAT, chat(), b"X-Api-Key: a\r\nX-Api-Key: b\r\n"), 200, 400),
    "a key that Connection names": (
        post(CHAT, chat(), b"Authorization: a\r\nConnection: authorization\r\n"),
        200,
        400,
    ),
    "a target of over 32 KiB": (get(b"/v1/models?" + b"a" * 40000), 0, 400),
}
"""What docs/security.md names, with llama-server's own answer and the proxy's; 0 is none."""


@pytest.fixture
async def rig(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(app, "MAX_REQUESTS", 4)
    async with start_rig("hybrid", n_ctx=4096) as rig:
        yield rig


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("raw", SAME.values(), ids=SAME.keys())
async def test_odd_request_has_the_direct_answer(lasting_rig: Rig, raw: bytes) -> None:
    rig = lasting_rig
    assert await status_of(rig.base_url, raw) == await status_of(rig.server.base_url, raw)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("raw", "alone", "ours"), DIFFERENT.values(), ids=DIFFERENT.keys())
async def test_odd_request_has_another_answer_only_as_documented(
    lasting_rig: Rig, raw: bytes, alone: int, ours: int
) -> None:
    assert await status_of(lasting_rig.server.base_url, raw) == alone
    assert await status_of(lasting_rig.base_url, raw) == ours


@pytest.mark.parametrize("raw", [get(b"/v1/models"), post(CHAT, chat())], ids=["GET", "chat"])
async def test_client_that_sends_no_more_gets_its_answer(
    rig: Rig, raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "HALF_CLOSED_SECONDS", HANG_SECONDS)
    assert await status_of(rig.server.base_url, raw, is_all=True) == 200
    assert await status_of(rig.base_url, raw, is_all=True) == 200


async def test_client_that_sends_no_more_is_taken_for_gone_after_a_while(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "HALF_CLOSED_SECONDS", 0.05)
    connection = await RawConnection.open(rig.base_url)
    connection.send(post(CHAT, chat(max_tokens=100000, ignore_eos=True)), is_all=True)
    assert await connection.status() == 0
    await connection.close()
    await rig.settled()


async def test_requests_that_are_not_read_yet_keep_nobody_out(rig: Rig) -> None:
    n_before = len(asyncio.all_tasks())
    slow = [await RawConnection.open(rig.base_url) for _ in range(20)]
    for connection in slow:
        connection.send(post(CHAT, chat())[:-1])
    await until(lambda: len(asyncio.all_tasks()) >= n_before + len(slow))
    assert await status_of(rig.base_url, post(CHAT, chat())) == 200
    slow[0].send(chat()[-1:])
    assert await slow[0].status() == 200
    for connection in slow:
        await connection.close()


async def test_upload_that_still_comes_at_shutdown_is_told_that_the_proxy_stops(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_sending, send = asyncio.Event(), Exchange.send

    async def told(*given: Any, **options: Any) -> None:
        is_sending.set()
        await send(*given, **options)

    monkeypatch.setattr(Exchange, "send", told)
    async with start_rig("hybrid", n_ctx=4096, drain_seconds=0.5) as rig:
        connection = await RawConnection.open(rig.base_url)
        connection.send(post(b"/tokenize", chat())[:-1])
        await is_sending.wait()
        await rig.stop_proxy()
        assert await connection.status() == 503
        await connection.close()


async def test_body_that_does_not_come_is_not_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "BODY_SECONDS", 0.2)
    assert await status_of(rig.base_url, post(CHAT, chat())[:-1]) == 408


async def test_bodies_that_are_coming_have_bounded_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "SMALL_BODY_BYTES", 2000)
    monkeypatch.setattr(clients, "MAX_COMING_BYTES", 30_000)
    large = post(CHAT, chat(metadata="a" * 20_000))
    slow = await RawConnection.open(rig.base_url)
    slow.send(large[:-1])
    assert await status_of(rig.base_url, post(CHAT, chat())) == 200
    assert await status_of(rig.base_url, large) == 503
    slow.send(large[-1:])
    assert await slow.status() == 200
    await slow.close()
    assert await status_of(rig.base_url, large) == 200


async def test_head_that_does_not_come_is_not_waited_for(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "IDLE_SECONDS", 0.2)
    async with start_rig("hybrid") as rig:
        for base_url in (rig.base_url, rig.admin_url):
            for raw in (b"", b"GET /v1/mod", get(b"/v1/models")[:-2]):
                assert await status_of(base_url, raw) == 0


async def test_operators_are_told_of_a_number_that_is_too_large(rig: Rig) -> None:
    assert await status_of(rig.admin_url, get(b"/requests?limit=" + b"9" * 23)) == 400
    assert await status_of(rig.admin_url, get(b"/requests?limit=" + b"9" * 18)) == 200


async def test_llama_server_that_stands_still_is_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SILENT_SECONDS", 0.3)
    os.kill(rig.server.pid, signal.SIGSTOP)
    try:
        await rig.reasons_are("llama-server is silent")
        assert (await rig.health())["state"] == "degraded"
    finally:
        os.kill(rig.server.pid, signal.SIGCONT)
    await rig.reasons_are()
    await rig.chat([{"role": "user", "content": "hello"}])
