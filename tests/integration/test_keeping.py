"""Clients that wait for their stream: they are told that somebody is there, and what went wrong."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from proxy.web.writer import COMMENT
from tests.integration.conftest import StartRig
from tests.integration.rig import CHAT, COMPLETION, Rig, question
from tests.lab.raw_bytes import RawConnection, post
from tests.lab.waiting import HANG_SECONDS, until

KEEP_SECONDS = 0.05
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": question("a"), "max_tokens": 4},
    COMPLETION: {"prompt": " word" * 300, "n_predict": 4},
    "/v1/messages": {"messages": question("a"), "max_tokens": 4},
    "/v1/responses": {"input": "a"},
}
SERVED = [path for path in BODIES if path != "/v1/responses"]
LAST = {CHAT: b"[DONE]", COMPLETION: b'"stop":true', "/v1/messages": b"message_stop"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.web.writer.KEEP_SECONDS", KEEP_SECONDS)


class Waiting:
    """A client that reads its stream as it comes."""

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        assert (reply.status, reply.headers["Content-Type"]) == (200, "text/event-stream")
        self._reply = reply

    async def comments(self, n_comments: int) -> None:
        """Read so many comments; nothing else may come."""
        expected = COMMENT * n_comments
        assert await self._reply.content.readexactly(len(expected)) == expected

    async def rest(self) -> bytes:
        """Return what comes until the stream ends, further comments left out."""
        return (await self._reply.content.read()).replace(COMMENT, b"")

    async def error(self) -> tuple[bytes, dict[str, Any]]:
        """Return the name of the event that comes, and its data.

        In a Responses stream a failed response with the same words follows the event.
        """
        event, *failed = (await self.rest()).removesuffix(b"\n\n").split(b"\n\n")
        *name, data = event.split(b"\n")
        assert data.startswith(b"data: ")
        told = json.loads(data[6:])
        for line in failed:
            name_of_failed, _, whole = line.partition(b"\ndata: ")
            assert name_of_failed == b"event: response.failed"
            error = json.loads(whole)["response"]["error"]
            assert error["message"] == told["message"] == told["error"]["message"]
        return b"".join(name), told


@asynccontextmanager
async def waiting(rig: Rig, path: str, **fields: Any) -> AsyncIterator[Waiting]:
    body = {**BODIES[path], "stream": True, **fields}
    async with rig.client.post(rig.base_url + path, json=body) as reply:
        yield Waiting(reply)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        *((path, place) for path in SERVED for place in ("generate", "tokenize")),
        (CHAT, "apply-template"),
        ("/v1/messages", "apply-template"),
    ],
)
async def test_client_gets_comments_until_its_stream_begins(
    start_rig: StartRig, path: str, place: str
) -> None:
    async with start_rig(n_slots=1) as rig:
        await rig.settled()
        rig.server.hold(place)
        async with waiting(rig, path) as client:
            await client.comments(3)
            rig.server.release(place)
            stream = await client.rest()
        assert b'"error"' not in stream
        assert LAST[path] in stream.rstrip().rsplit(b"\n", 1)[-1]
        await rig.settled()
        assert rig.sample("drift_total") == rig.n_faults() == 0


@pytest.mark.parametrize("n_comments", [0, 2])
async def test_stream_for_an_old_client_ends_with_its_connection(
    start_rig: StartRig, n_comments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP/1.0 has no chunks: nothing else tells such a client that its stream has ended."""
    monkeypatch.setattr("proxy.app.IDLE_SECONDS", 2 * HANG_SECONDS)
    body = json.dumps({**BODIES[CHAT], "stream": True}).encode()
    raw = post(CHAT.encode(), body, b"Connection: keep-alive\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")
    async with start_rig(n_slots=1) as rig:
        await rig.settled()
        held = rig.server.hold("generate")
        connection = await RawConnection.open(rig.base_url)
        connection.send(raw)
        if not n_comments:
            held.open()
        stream = await connection.until(COMMENT * n_comments)
        held.open()
        stream += await connection.rest()
        assert b"Connection: keep-alive" not in stream
        assert stream.endswith(b"data: [DONE]\n\n")
        await connection.close()


@pytest.mark.parametrize("n_before", [0, 2])
@pytest.mark.parametrize("path", SERVED)
async def test_client_whose_request_is_sent_again_gets_comments(
    start_rig: StartRig, path: str, n_before: int
) -> None:
    async with start_rig(n_slots=1) as rig:
        await rig.settled()
        rig.server.faults.n_out_of_cells = 1
        rig.server.hold("generate")
        tokenizing = rig.server.hold("tokenize")
        if not n_before:
            tokenizing.open()
        async with waiting(rig, path) as client:
            await client.comments(n_before)
            tokenizing.open()
            await client.comments(3)
            rig.server.release("generate")
            assert LAST[path] in await client.rest()
        await rig.settled()
        assert rig.server.faults.n_out_of_cells == rig.n_faults() == 0


@pytest.mark.parametrize("path", SERVED)
async def test_client_in_the_queue_gets_comments(start_rig: StartRig, path: str) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.hold("generate", n_calls=1)
        first = rig.begin_chat("other")
        await until(lambda: rig.requests_seen())
        async with waiting(rig, path) as client:
            await client.comments(2)
            rig.server.release("generate")
            assert LAST[path] in await client.rest()
        await first


async def test_client_of_an_absent_llama_server_gets_comments_and_then_its_stream(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        await rig.server.crash()
        async with waiting(rig, CHAT) as client:
            await client.comments(2)
            await rig.server.restart()
            assert LAST[CHAT] in await client.rest()


@pytest.mark.parametrize("path", SERVED)
async def test_refusal_after_comments_is_an_event_of_the_api(
    start_rig: StartRig, path: str
) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.hold("generate")
        rig.server.faults.refuse["generate"] = 400
        async with waiting(rig, path) as client:
            await client.comments(2)
            rig.server.release("generate")
            name, data = await client.error()
        assert "scripted fault at generate" in data["error"]["message"]
        is_anthropic = path == "/v1/messages"
        assert name == (b"event: error" if is_anthropic else b"")
        assert data.get("type") == ("error" if is_anthropic else None)
        rig.server.faults.refuse.clear()
        await rig.settled()
        await rig.chat("a")


@pytest.mark.parametrize("path", SERVED)
async def test_llama_server_that_goes_away_after_comments_is_told_in_an_event(
    start_rig: StartRig, path: str
) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.hold("generate")
        rig.server.faults.drop.add("generate")
        async with waiting(rig, path) as client:
            await client.comments(1)
            rig.server.release("generate")
            _, data = await client.error()
        assert "llama-server at" in data["error"]["message"]
        assert rig.sample("unanswered_requests_total", reason="llama-server gone") == 1
        rig.server.faults.drop.clear()
        await rig.settled()
        await rig.chat("a")


@pytest.mark.parametrize("path", BODIES)
async def test_llama_server_that_stays_away_is_told_in_an_event(
    start_rig: StartRig, path: str
) -> None:
    async with start_rig(n_slots=1, upstream_wait_seconds=HANG_SECONDS) as rig:
        await rig.server.crash()
        async with waiting(rig, path) as client:
            await client.comments(1)
            rig.running.server.give_up()
            name, data = await client.error()
        assert "llama-server cannot be reached" in data.get("error", data)["message"]
        is_named = path in ("/v1/messages", "/v1/responses")
        assert (name, data.get("type")) == ((b"event: error", "error") if is_named else (b"", None))
        await rig.server.restart()


@pytest.mark.parametrize("path", SERVED)
async def test_refusal_before_any_comment_has_its_own_status(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("proxy.web.writer.KEEP_SECONDS", 60.0)
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.refuse["generate"] = 400
        reply = await rig.post(path, {**BODIES[path], "stream": True})
        assert (reply.status, reply.headers["Content-Type"]) == (
            400,
            "application/json; charset=utf-8",
        )
        rig.server.faults.refuse.clear()


@pytest.mark.parametrize("path", SERVED)
async def test_client_that_asks_for_no_stream_is_sent_nothing_before(
    start_rig: StartRig, path: str
) -> None:
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("generate")
        asked = asyncio.ensure_future(rig.post(path, BODIES[path]))
        await gate.reached()
        await asyncio.sleep(3 * KEEP_SECONDS)
        rig.server.release("generate")
        reply = await asked
        assert (reply.status, reply.headers["Content-Type"]) == (
            200,
            "application/json; charset=utf-8",
        )
        assert COMMENT not in reply.body


@pytest.mark.parametrize("path", ["/embedding", "/rerank"])
async def test_answer_that_is_never_a_stream_comes_as_it_is(start_rig: StartRig, path: str) -> None:
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("generate")
        first = asyncio.ensure_future(rig.post(CHAT, BODIES[CHAT]))
        await gate.reached()
        asked = asyncio.ensure_future(rig.post(path, {"input": "a", "stream": True}))
        await asyncio.sleep(3 * KEEP_SECONDS)
        rig.server.release("generate")
        assert (await first).status == 200
        reply, alone = await asked, await rig.post(path, {"input": "a"})
        assert reply.headers["Content-Type"] == alone.headers["Content-Type"]
        assert (reply.status, reply.body) == (alone.status, alone.body)


async def test_client_that_leaves_while_it_is_kept_leaves_nothing_behind(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.hold("generate")
        with capture_logs() as logs:
            async with waiting(rig, CHAT) as client:
                await client.comments(2)
            await until(lambda: rig.sample("unanswered_requests_total", reason="client left") == 1)
        (said,) = (line["says"] for line in logs if line["event"] == "request")
        assert re.match(r"chat  not answered after [\d.]+ m?s: client left  id \w+$", said)
        rig.server.release("generate")
        await rig.settled()
        await rig.chat("b")


async def test_browser_may_read_the_stream_that_the_proxy_begins(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.hold("generate")
        body = {**BODIES[CHAT], "stream": True}
        origin = {"Origin": "http://x.example"}
        async with rig.client.post(rig.base_url + CHAT, json=body, headers=origin) as reply:
            assert reply.headers["Access-Control-Allow-Origin"] == "http://x.example"
            rig.server.release("generate")
            assert b"[DONE]" in await reply.read()


async def test_page_whose_browser_need_not_ask_first_may_not_read_that_stream(
    start_rig: StartRig,
) -> None:
    """It may be of a site that llama-server does not allow (--cors-origins)."""
    async with start_rig(n_slots=1) as rig:
        rig.server.hold("generate")
        body = json.dumps({**BODIES[CHAT], "stream": True})
        for kind in ({"Content-Type": "text/plain"}, {}):
            headers = {"Origin": "http://x.example", **kind}
            asked = rig.client.post(
                rig.base_url + CHAT, data=body, headers=headers, skip_auto_headers=["Content-Type"]
            )
            async with asked as reply:
                assert reply.headers["Content-Type"] == "text/event-stream"
                assert "Access-Control-Allow-Origin" not in reply.headers
        rig.server.release("generate")
