"""Answers that break HTTP, or break off: their clients get what is right, and no request waits for ever.

A relay before a scripted socket; llama-server answers so only when it dies, other hosts whenever they like.
"""

import asyncio
import io
import json
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict

from proxy.core.messages import Route
from proxy.errors import ProxyError, UpstreamRefused
from proxy.explain.report import Journal, Report
from proxy.llama.client import LlamaServer, Target
from proxy.llama.connection import CannotConnect, EventLoop, ReplyHandler, new_session, read_most
from proxy.metrics import Metrics
from proxy.servers.warming import own_request
from proxy.serving.request import do_nothing
from proxy.web import writer
from proxy.web.relay import Exchange
from proxy.web.writer import Unread
from tests.lab.waiting import HANG_SECONDS, until

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close with a reset."""
BODY = b"{}"
LARGE_BODY = bytes(16 << 20)
"""More than sockets hold that nobody reads."""

OK = b"HTTP/1.1 200 OK\r\nContent-Type: "
JSON = OK + b"application/json\r\n"
EVENTS = OK + b"text/event-stream\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Upstream:
    """Reads the head of a request, sends *parts* one by one, and ends as *end* says; well by default."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.end = ""
        self.held = asyncio.Event()
        self.n_asked = 0
        self.n_closed = 0
        self.unread = Unread(Metrics())
        self.report = Report(Metrics(), Journal())
        self.path = "/v1/chat/completions"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Yield the port."""
        async with await asyncio.start_server(self.answer, "127.0.0.1", 0) as server:
            yield int(server.sockets[0].getsockname()[1])
            self.held.set()
            await until(lambda: self.n_closed == self.n_asked)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_asked += 1
        await reader.readuntil(b"\r\n\r\n")
        for part in self.parts:
            writer.write(part)
            await asyncio.sleep(0.01)  # else several arrive as one
        if self.end == "half-close":
            writer.write_eof()
        elif self.end == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if self.end in ("hold", "half-close"):
            await self.held.wait()
        if self.end:
            writer.transport.abort()
        else:
            writer.close()
            await writer.wait_closed()
        self.n_closed += 1


@pytest.fixture
async def upstream() -> Upstream:
    return Upstream()


@pytest.fixture(params=["127.0.0.1", "localhost"])
async def ask(
    request: pytest.FixtureRequest, upstream: Upstream
) -> AsyncIterator[Callable[..., aiohttp.client._RequestContextManager]]:
    """Return a function that asks *upstream* through a relay, which reaches it by address or by name."""

    async def relay(client: web.Request) -> web.StreamResponse:
        exchange = Exchange(client, upstream.path, upstream.unread, upstream.report)
        try:
            to = LlamaServer(session, Target(f"http://{request.param}:{port}"), None)
            await exchange.send(to, await client.read())
            await exchange.writer.delivered()
            assert exchange.writer.response is not None
            return exchange.writer.response
        except ProxyError as error:
            return await exchange.refuse(error)
        finally:
            exchange.writer.close()

    app = web.Application(client_max_size=0)
    app.router.add_post("/{path:.*}", relay)
    timeout = aiohttp.ClientTimeout(total=HANG_SECONDS)
    async with (
        upstream.listening() as port,
        new_session() as session,
        TestServer(app, handler_cancellation=True) as front,
        aiohttp.ClientSession(timeout=timeout) as client,
    ):
        yield lambda body=BODY: client.post(front.make_url(upstream.path), data=io.BytesIO(body))


Ask = Callable[..., aiohttp.client._RequestContextManager]


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        ([EVENTS + CHUNKED, chunk(TOKEN), b"no size\r\n"], "hold"),
        ([EVENTS + CHUNKED, chunk(TOKEN), chunk(TOKEN[:20])], "reset"),
        ([EVENTS + b"Content-Length: 200\r\n\r\n", TOKEN], "close"),
        ([EVENTS + b"\r\n", TOKEN], "reset"),
    ],
    ids=["no chunk", "in a line", "with a length", "without a length"],
)
async def test_broken_stream_ends_in_an_event_of_its_own(
    ask: Ask, upstream: Upstream, parts: list[bytes], end: str
) -> None:
    upstream.parts, upstream.end = parts, end
    async with ask() as answer:
        events = (await answer.read()).split(b"\n\n")
    assert events[0] == TOKEN.strip()
    assert events[-2].startswith(b'data: {"error"') and not events[-1]


@pytest.mark.parametrize(
    "half", [TOKEN[:20], TOKEN[:-1], b": a com"], ids=["data", "event", "comment"]
)
async def test_error_stands_apart_from_half_of_the_first_event(
    ask: Ask, upstream: Upstream, half: bytes
) -> None:
    upstream.parts, upstream.end = [EVENTS + CHUNKED, chunk(half)], "reset"
    async with ask() as answer:
        begun, last, end = (await answer.read()).split(b"\n\n")
    assert (begun, end) == (half.strip(), b"")
    assert last.strip().startswith(b'data: {"error"')


@pytest.mark.parametrize("end", ["reset", "close"])
async def test_stream_is_whole_with_its_last_event(ask: Ask, upstream: Upstream, end: str) -> None:
    upstream.parts, upstream.end = [EVENTS + CHUNKED, chunk(TOKEN), chunk(DONE)], end
    async with ask() as answer:
        assert await answer.read() == TOKEN + DONE


@pytest.mark.parametrize("last", [TOKEN, DONE], ids=["broken", "whole"])
async def test_what_came_before_a_connection_ended_reaches_the_client(
    ask: Ask, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, last: bytes
) -> None:
    """The connection ends before the proxy reads the answer."""
    begin, end, has_ended = Exchange._begin, ReplyHandler.connection_lost, asyncio.Event()

    async def begin_late(exchange: Exchange, *edited: Any) -> None:
        await has_ended.wait()
        await begin(exchange, *edited)

    def told(connection: ReplyHandler, error: BaseException | None) -> None:
        end(connection, error)
        has_ended.set()

    monkeypatch.setattr(Exchange, "_begin", begin_late)
    monkeypatch.setattr(ReplyHandler, "connection_lost", told)
    upstream.parts, upstream.end = [EVENTS + CHUNKED, chunk(TOKEN), chunk(last)], "close"
    async with ask() as answer:
        body = await answer.read()
    assert body.startswith(TOKEN + last)
    assert (b'data: {"error"' in body) == (last == TOKEN)


async def test_stream_that_ends_in_an_error_of_its_own_is_whole(
    ask: Ask, upstream: Upstream
) -> None:
    """Anthropic's error event has no object around it, and nothing follows it."""
    upstream.path = "/v1/messages"
    begin = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{}}}\n\n'
    error = b'event: error\ndata: {"code":500,"message":"no room","type":"server_error"}\n\n'
    upstream.parts = [EVENTS + CHUNKED, chunk(begin), chunk(error) + chunk(b"")]
    async with ask() as answer:
        begun, *told, end = (await answer.read()).split(b"\n\n")
    assert (begun, end) == (begin.strip(), b"")
    assert [b"no room" in event for event in told] == [True]


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        ([JSON + CHUNKED, chunk(b"[1]"), b"no size\r\n"], "hold"),
        ([JSON + b"\r\n", b"[1]"], "reset"),
    ],
    ids=["no chunk", "without a length"],
)
async def test_broken_answer_is_cut(
    ask: Ask, upstream: Upstream, parts: list[bytes], end: str
) -> None:
    upstream.parts, upstream.end = parts, end
    with pytest.raises(aiohttp.ClientPayloadError):
        async with ask() as answer:
            await answer.read()


async def test_small_answer_that_breaks_off_is_an_error_of_its_own(
    ask: Ask, upstream: Upstream
) -> None:
    """Its head waits for the rest: llama-server sends both at once."""
    upstream.parts, upstream.end = [JSON + b"Content-Length: 200\r\n\r\n", b"[1]"], "close"
    async with ask() as answer:
        assert answer.status == 502


async def test_end_is_an_end_though_the_body_was_not_read(ask: Ask, upstream: Upstream) -> None:
    upstream.end = "half-close"
    async with ask(LARGE_BODY) as answer:
        assert answer.status == 502
    upstream.parts = [JSON + b"\r\n", b"[1]"]
    async with ask(LARGE_BODY) as answer:
        assert await answer.read() == b"[1]"


async def test_end_is_an_end_though_writing_fails_beside_it(
    ask: Ask, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ReplyHandler.eof_received

    def received(connection: ReplyHandler) -> None:
        """As when aiohttp goes on to write a body on the connection that is being closed."""
        end(connection)
        connection.set_exception(aiohttp.ClientConnectionResetError("closing"))

    monkeypatch.setattr(ReplyHandler, "eof_received", received)
    upstream.parts, upstream.end = [JSON + b"\r\n", b"[1]"], "half-close"
    async with ask() as answer:
        assert await answer.read() == b"[1]"


async def test_client_that_leaves_leaves_no_connection(ask: Ask, upstream: Upstream) -> None:
    upstream.end = "hold"

    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    n_before = n_open()
    asking = asyncio.ensure_future(ask(LARGE_BODY).__aenter__())
    await until(lambda: upstream.n_asked)
    asking.cancel()
    await until(lambda: n_open() == n_before + 1)  # that of the server, which reads nothing


async def test_answer_that_had_to_wait_for_its_client_is_whole(
    ask: Ask, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_ANSWER_BYTES", 64 << 10)
    chance = random.Random(1)
    pieces = [chance.randbytes(chance.choice([1, 300, 16_000, 400_000])) for _ in range(100)]
    upstream.parts = [JSON + CHUNKED + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"]
    async with ask() as answer:
        await until(lambda: upstream.unread.n_bytes)
        assert await answer.read() == b"".join(pieces)


async def test_change_of_the_protocol_ends_the_exchange(ask: Ask, upstream: Upstream) -> None:
    upstream.parts, upstream.end = [b"HTTP/1.1 101 Switching Protocols\r\n\r\n"], "hold"
    async with ask() as answer:
        assert answer.status == 101


async def test_answer_without_a_length_is_not_whole_when_it_was_cut(upstream: Upstream) -> None:
    upstream.parts, upstream.end = [JSON + b"\r\n", b"[1]"], "hold"
    async with upstream.listening() as port, new_session() as session:
        to = LlamaServer(session, Target(f"http://127.0.0.1:{port}"), None)
        async with await to.forward("POST", "/", CIMultiDict(), BODY) as answer:
            assert await answer.content.readany() == b"[1]"
            answer.close()
            with pytest.raises(aiohttp.ClientError):
                await read_most(answer.content)


async def test_what_is_no_http_is_told_in_one_line(ask: Ask, upstream: Upstream) -> None:
    upstream.parts = [b"SSH-2.0-OpenSSH_9.0\r\n"]
    async with ask() as answer:
        told = (await answer.json())["error"]["message"]
    assert "SSH-2.0-OpenSSH_9.0" in told and "\n" not in told


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return more bytes than are kept of an answer, which are few here."""
    monkeypatch.setattr("proxy.llama.connection.MAX_BUFFERED_BYTES", 1 << 20)
    return b" " * (2 << 20)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_own_call_does_not_read_more_than_is_kept(
    upstream: Upstream, buffered: bytes, host: str
) -> None:
    upstream.parts, upstream.end = [JSON + b"\r\n", buffered], "hold"
    async with upstream.listening() as port, new_session() as session:
        to = LlamaServer(session, Target(f"http://{host}:{port}"), None)
        with pytest.raises(UpstreamRefused, match="/props: too long"):
            await to.props()


async def test_answer_larger_than_what_is_kept_passes_as_it_comes(
    ask: Ask, upstream: Upstream, buffered: bytes
) -> None:
    upstream.path = "/v1/messages"  # its answers are edited
    upstream.parts, upstream.end = [JSON + CHUNKED + chunk(buffered)], "hold"
    async with ask() as answer:
        assert await answer.content.readexactly(len(buffered)) == buffered


async def test_own_request_follows_no_redirect(upstream: Upstream) -> None:
    """It has a prompt, and a key."""
    elsewhere = Upstream()
    async with upstream.listening() as port, elsewhere.listening() as other, new_session() as own:
        to = LlamaServer(own, Target(f"http://127.0.0.1:{port}"), None)
        there = b"Location: http://127.0.0.1:%d/\r\n" % other
        upstream.parts = [b"HTTP/1.1 307 Moved\r\n" + there + b"Content-Length: 0\r\n\r\n"]
        request = own_request("/completion", Route.COMPLETION, {"X-Api-Key": "secret"}, b"")
        assert (await request.relay(to, BODY, do_nothing)).status == 307
    assert elsewhere.n_asked == 0


async def test_counts_are_read_from_an_own_answer_that_quotes_a_long_prompt(
    upstream: Upstream,
) -> None:
    """As /completion does: else a long prompt that was warmed would not be saved."""
    async with upstream.listening() as port, new_session() as own:
        to = LlamaServer(own, Target(f"http://127.0.0.1:{port}"), None)
        told = json.dumps({"timings": {"cache_n": 1, "prompt_n": 2}, "prompt": "a" * (1 << 20)})
        upstream.parts = [JSON + b"Content-Length: %d\r\n\r\n" % len(told) + told.encode()]
        request = own_request("/completion", Route.COMPLETION, {}, b"")
        assert (timings := (await request.relay(to, BODY, do_nothing)).timings)
        assert (timings.cache_n, timings.prompt_n) == (1, 2)


async def test_nothing_was_sent_on_a_connection_reset_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    connect = EventLoop.create_connection

    async def reset_before(self: EventLoop, *given: Any, **named: Any) -> Any:
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        accepted.close()
        return await connect(self, *given, **named)

    monkeypatch.setattr(EventLoop, "create_connection", reset_before)
    async with new_session() as session:
        with listener, pytest.raises(CannotConnect):
            to = LlamaServer(session, Target("http://{}:{}".format(*listener.getsockname())), None)
            await to.forward("POST", "/", CIMultiDict(), BODY)
